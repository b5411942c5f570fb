"""A piece of work that takes too long ends its process with one line, whatever holds the
interpreter's lock. The work here takes some tenths of a second; the limit is lowered.
"""

import os
import subprocess
import sys
import time
from typing import Any

import pytest

from megatron.blending.loading.time_limit import TIME_LIMIT, TimeLimit

pytestmark = pytest.mark.skipif(TIME_LIMIT._library is None, reason="no such timers here")
LINE = "d.jsonl record 5: it takes 100% too long"
WORK = """
import os, sys, threading
from megatron.blending.loading.time_limit import TIME_LIMIT
def work(size):
    with TIME_LIMIT.limited(0.1, "it takes 100% too long"):
        sum(range(size))  # holds the interpreter's lock
work(10)
TIME_LIMIT.subject = "d.jsonl record 5"
def in_child():
    if (child := os.fork()) == 0:
        work(40_000_000)
        os._exit(0)
    sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
def in_thread():
    thread = threading.Thread(target=work, args=(40_000_000,))
    thread.start()
    thread.join()
"""


@pytest.mark.parametrize("call", ["work(40_000_000)", "in_child()", "in_thread()"])
def test_work_that_takes_too_long_ends_its_process(call):
    """A run hung for ever, and nothing said at which record."""
    ended = subprocess.run(
        [sys.executable, "-c", WORK + call + "\nprint('went on')"],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        timeout=60,
        check=False,
    )
    assert (ended.returncode, ended.stdout) == (2, "")
    assert ended.stderr.splitlines() == [f"-c: error: {LINE}"]


def test_work_within_its_time_goes_on():
    """Time that passes between two pieces, or in which a process waits, is not theirs."""
    limit: Any = TimeLimit()
    for pause in (0.11, 0, 0):
        with limit.limited(0.1, "late"), limit.limited(0.001, "late"):
            time.sleep(pause)
        end = time.thread_time() + 0.05
        while time.thread_time() < end:
            pass
