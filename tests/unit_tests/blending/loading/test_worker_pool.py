"""Real processes: they start, end, die and hang, and nothing waits for ever."""

import faulthandler
import functools
import gc
import itertools
import logging
import multiprocessing
import os
import pathlib
import random
import re
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
import torch

from megatron.blending import BatchDataset, MapDataset
from megatron.blending.energon._loading.loader import get_loader, get_savable_loader
from megatron.blending.loading.time_limit import TIME_LIMIT
from megatron.blending.loading.worker_pool import WorkerProcess
from megatron.blending.streams.failures import FatalSampleError
from tests.unit_tests.blending.number_streams import (
    config,
    drawn,
    endless,
    listed,
    loaders,
    source_of,
)
from tests.unit_tests.blending.trees import ENDLESS

SECONDS = 60
ROOT = pathlib.Path(__file__).parents[4]


@pytest.fixture(autouse=True)
def _hard_timeout():
    """A hang is a failure, with the stacks of all threads."""
    faulthandler.dump_traceback_later(SECONDS, exit=True)
    yield
    faulthandler.cancel_dump_traceback_later()
    for child in multiprocessing.active_children():
        child.kill()


def processes(num_workers=2, **options):
    return config(num_workers=num_workers, **options)


def as_tensors(sample):
    return {
        "long": torch.arange(5000) + sample[1],
        "short": torch.tensor([sample[1]]),
        "array": np.arange(9000.0),
    }


def hang(begun, sample):
    if sample[1] == 7:
        begun.touch()
        time.sleep(1000)
    return sample


def die(sample):
    if sample[1] == 7:
        os.kill(os.getpid(), signal.SIGKILL)
    return sample


def fail(sample):
    raise NameError("no such thing")


def slow(sample):
    time.sleep(0.2)
    return sample


@pytest.mark.parametrize("name", ["blend of samples", "filters", "packs"])
def test_processes_give_the_stream_and_restore_it(name):
    tree = ENDLESS[name]()
    stream = listed(tree, 40)
    head, states = drawn(loaders(tree, 1, 2), 20)
    tail, _ = drawn(loaders(tree, 1, 3, states), 20)
    assert head + tail == stream


@pytest.mark.slow
@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_methods_that_pickle(method):
    """Spawned workers get nothing but what can be pickled, also beside an open process group or a
    handler.
    """
    loader = get_loader(
        BatchDataset(MapDataset(source_of("a", 20), slowless), 3), processes(1, start_method=method)
    )
    first = next(loader)
    time.sleep(2.2)  # a worker that has nothing to do asks after this process
    assert len(first) + sum(len(next(loader)) for _ in range(6)) == 20
    loader.close()


def slowless(sample):
    return sample


def test_what_cannot_be_pickled_is_refused():
    loader = get_loader(
        MapDataset(endless(), lambda sample: sample), processes(1, start_method="spawn")
    )
    with pytest.raises(
        ValueError, match=r"worker 0 of rank 0 cannot be started: .*top of a module"
    ):
        next(loader)
    assert multiprocessing.active_children() == []


def test_tensors_and_arrays_arrive_writable():
    tree = MapDataset(source_of("a", 4, shuffle=False), as_tensors)
    for loaded, index in zip(get_loader(tree, processes(1)), itertools.count()):
        assert torch.equal(loaded["long"], torch.arange(5000) + index)
        assert loaded["short"].item() == index
        loaded["long"].add_(1)
        loaded["array"][0] = 1


def with_a_lock(sample):
    value = threading.Lock() if sample[1] == 5 else sample[1]
    return {"__key__": f"sample {sample[1]}", "parts": [1, {"lock": value}]}


def test_an_output_that_cannot_be_sent_is_named():
    """The worker died: "exit code 1", and nobody knew of which sample and why."""
    batches = BatchDataset(MapDataset(source_of("a", 20), with_a_lock), 4)
    with (
        get_loader(batches, processes(1)) as loader,
        pytest.raises(
            FatalSampleError,
            match=r"output\[0\].*\['lock'\] of sample 'sample 5' \(a:5\) is a lock",
        ),
    ):
        list(loader)


def lock_alone(sample):
    return threading.Lock() if sample[1] == 5 else sample[1]


@pytest.mark.parametrize(
    ("size", "told"),
    [
        (4, r"output\[\d\] \(a:5\) is a lock, which cannot be sent"),
        (None, r"output \(a:5\) is a lock, which cannot be sent"),
        (20, r"output\[\d+\] \(a:5\) is a lock, which cannot be sent"),
    ],
)
def test_an_output_without_a_key_is_named_by_its_record(size, told):
    """Encoders return what they like: few outputs of theirs have a key."""
    samples = MapDataset(source_of("a", 20), lock_alone)
    tree = samples if size is None else BatchDataset(samples, size)
    with get_loader(tree, processes(1)) as loader, pytest.raises(FatalSampleError, match=told):
        list(loader)


def totals(samples):
    return {"total": sum(sample for sample in samples), "lock": threading.Lock()}


def test_a_batch_that_cannot_be_sent_names_its_first_records():
    batches = BatchDataset(MapDataset(source_of("a", 20, shuffle=False), number_of), 5, totals)
    told = r"output\['lock'\] \(a:0, a:1, a:2 and 2 more\) is a lock"
    with get_loader(batches, processes(1)) as loader, pytest.raises(FatalSampleError, match=told):
        list(loader)


def number_of(sample):
    return sample[1]


def test_batches_in_shared_memory_keep_no_descriptor():
    """At the usual limit of 1,024 open files no more than a thousand batches could be kept."""
    with get_loader(MapDataset(endless(10), large), processes(1)) as loader:
        stream = iter(loader)
        first = next(stream)
        before = len(os.listdir("/proc/self/fd"))
        kept = [next(stream) for _ in range(20)]
        assert len(os.listdir("/proc/self/fd")) <= before + 2
        first["array"][:] = 7.0
        assert all((one["array"] == one["number"]).all() for one in kept)


def large(sample):
    return {"number": sample[1], "array": np.full(100_000, float(sample[1]))}


def test_a_hurried_loader_waits_no_longer(monkeypatch):
    """A worker that is stopped held the rank for ten minutes after it was asked to end."""
    monkeypatch.setattr("megatron.blending.loading.worker_pool._HURRIED_SECONDS", 0.5)
    with get_loader(endless(10), processes(1)) as loader:
        stream = iter(loader)
        next(stream)
        (worker,) = multiprocessing.active_children()
        os.kill(worker.pid or 0, signal.SIGSTOP)
        loader.hurry()
        begin = time.monotonic()
        with pytest.raises(RuntimeError, match="has given nothing for"):
            list(stream)
        assert time.monotonic() - begin < 15


def test_a_dead_worker_is_named():
    """The out-of-memory killer leaves no message; a training run would wait until its collectives
    time out.
    """
    loader = get_loader(MapDataset(source_of("a", 10, shuffle=False), die), processes())
    started = time.monotonic()
    with pytest.raises(
        RuntimeError,
        match=r"worker 1 of rank 0 \(pid \d+\) died: killed by SIGKILL; is there enough",
    ):
        list(loader)
    assert time.monotonic() - started < 10
    assert multiprocessing.active_children() == []


def late(sample):
    TIME_LIMIT.subject = f"record {sample[1]}"
    with TIME_LIMIT.limited(0.1, "takes too long"):
        sum(range(40_000_000 * (sample[1] == 3)))
    return {}


@pytest.mark.skipif(TIME_LIMIT._library is None, reason="no such timers here")
def test_a_worker_beyond_its_time_limit_says_why_through_the_rank(capfd):
    """Its own line and the rank's would both be printed, the rank's with a traceback."""
    loader = get_loader(MapDataset(source_of("a", 10, shuffle=False), late), processes(1))
    with pytest.raises(ValueError, match=r"^record 3: takes too long$"):
        list(loader)
    assert capfd.readouterr() == ("", "")


@pytest.mark.slow
def test_a_hung_worker_is_named_with_its_stack(caplog, monkeypatch, tmp_path):
    """A busy machine may take minutes to get there: seconds count from when it hangs."""
    monkeypatch.setattr("megatron.blending.loading.worker_pool._LEAVE_SECONDS", 0.1)
    begun = tmp_path / "begun"
    wait = WorkerProcess._wait

    def wait_briefly(worker):
        if worker.name.startswith("worker 1 "):
            while not begun.exists():  # until the test's hard timeout
                time.sleep(0.01)
            assert (worker._slow, worker._timeout) in ((SECONDS, 2 * SECONDS), (0.5, 2.0))
            worker._slow, worker._timeout = 0.5, 2.0
        wait(worker)

    tree = MapDataset(source_of("a", 10, shuffle=False), functools.partial(hang, begun))
    patient = {"slow_worker_seconds": SECONDS, "worker_timeout_seconds": 2 * SECONDS}
    loader = get_loader(tree, processes(**patient))
    given = [next(loader)[1] for _ in range(7)]
    monkeypatch.setattr(WorkerProcess, "_wait", wait_briefly)
    with (
        caplog.at_level(logging.WARNING),
        pytest.raises(RuntimeError, match=r"worker 1 of rank 0.* nothing for 2 sec"),
    ):
        next(loader)
    assert given == list(range(7))
    assert "in hang" in caplog.text
    assert multiprocessing.active_children() == []


def test_a_mistake_in_a_function_is_told_as_such():
    loader = get_loader(MapDataset(endless(), fail), processes())
    with pytest.raises(
        FatalSampleError, match=r"worker 0 of rank 0 .*a:\d+: fail: NameError: no such thing"
    ):
        next(loader)
    assert multiprocessing.active_children() == []


BROKEN_SCRIPT = """
import functools, logging, os, sys, threading
from megatron.blending import MapDataset, WorkerConfig, get_loader
from tests.unit_tests.blending.number_streams import source_of

def fail_seven(path, sample):
    if sample[1] == 7:
        with open(path, "a") as file:
            print(os.getpid(), threading.get_ident(), file=file)
        raise ValueError("seven")
    return sample

if __name__ == "__main__":
    logging.basicConfig(format="LOG %(message)s")
    num_workers, path = sys.argv[1:]
    config = WorkerConfig(num_workers=int(num_workers))
    loader = get_loader(MapDataset(source_of("a", 11), functools.partial(fail_seven, path)), config)
    for epoch in range(4):
        assert sorted(index for _, index in loader) == [0, 1, 2, 3, 4, 5, 6, 8, 9, 10]
        print(loader.num_failed)
        if epoch == 1:
            loader.close()
"""


@pytest.mark.parametrize("num_workers", [2, 0])
def test_a_failing_sample_is_logged_once_by_all_workers(tmp_path, num_workers):
    """Over epochs, in which other workers meet it, and after they start again."""
    script, meetings = tmp_path / "broken.py", tmp_path / "meetings"
    script.write_text(BROKEN_SCRIPT)
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), *sys.path])),
    }
    command = [sys.executable, str(script), str(num_workers), str(meetings)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, env=environment)
    assert done.stdout.split() == ["1", "2", "1", "2"], done.stderr
    lines = [line for line in done.stderr.splitlines() if "seven" in line]
    assert len(lines) == 1, done.stderr
    assert lines[0].startswith("LOG a:7: ")
    assert "ValueError: seven [" in lines[0]
    assert lines[0].endswith("; left out, 1 so far")
    assert len(set(meetings.read_text().splitlines())) >= max(1, num_workers)


def fail_three_die_at_five(sample):
    if sample[1] == 3:
        raise ValueError("three")
    if sample[1] == 5:
        os.kill(os.getpid(), signal.SIGKILL)
    return sample


@pytest.mark.parametrize("tree", [lambda node: BatchDataset(node, 10), lambda node: node])
def test_what_failed_is_logged_though_the_worker_dies(caplog, tree):
    """Told only with the next output, which never came, the line that hints at the cause would be
    lost.
    """
    loader = get_loader(
        tree(MapDataset(source_of("a", 10, shuffle=False), fail_three_die_at_five)), processes(1)
    )
    with (
        caplog.at_level(logging.WARNING),
        pytest.raises(RuntimeError, match="died: killed by SIGKILL"),
    ):
        list(loader)
    assert [message.partition(":")[2][:1] for message in caplog.messages] == ["3"]


def fail_few_then_all(sample):
    if sample[1] in (1, 2) or sample[1] > 5:
        raise ValueError("failing")
    return sample


def test_what_failed_before_a_fatal_row_is_logged(caplog):
    loader = get_loader(
        MapDataset(source_of("a", 20, shuffle=False), fail_few_then_all),
        processes(1, failure_tolerance=4),
    )
    with (
        caplog.at_level(logging.WARNING),
        pytest.raises(FatalSampleError, match=r"a:9: .*failing.*; 4 samples in a"),
    ):
        list(loader)
    assert [message.partition(":")[2][0] for message in caplog.messages] == [
        "1",
        "2",
        "6",
        "7",
        "8",
        "9",
    ]


def test_workers_end_with_the_loader():
    """Workers that stay would fill the machine, one notebook cell after the other."""
    loader = get_savable_loader(MapDataset(endless(), slow), processes())
    assert len(multiprocessing.active_children()) == 0
    next(loader)
    assert len(multiprocessing.active_children()) == 2
    loader.close()
    assert multiprocessing.active_children() == []
    following = next(loader)
    del loader
    gc.collect()
    assert multiprocessing.active_children() == []
    assert following is not None


@pytest.mark.slow
def test_workers_end_with_a_killed_parent(tmp_path):
    """Orphans hold memory and file handles of a job that is gone."""
    script = (
        "import os, sys\n"
        "from tests.unit_tests.blending.loading.test_worker_pool import *\n"
        "loader = get_loader(endless(), processes())\n"
        "next(loader)\n"
        "print(*[child.pid for child in multiprocessing.active_children()], flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        timeout=SECONDS,
        env=environment,
    )
    pids = [int(pid) for pid in done.stdout.split()]
    assert len(pids) == 2, done.stderr
    deadline = time.monotonic() + 10
    while any(map(_is_alive, pids)):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert list(tmp_path.glob("worker-stack-*")) == []


def _is_alive(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.slow
def test_workers_work_ahead():
    loader = get_loader(MapDataset(endless(), slow), processes())
    next(loader)
    time.sleep(0.8)
    started = time.monotonic()
    for _ in range(3):
        next(loader)
    assert time.monotonic() - started < 0.4
    loader.close()


@pytest.mark.slow
def test_a_worker_that_starts_slowly_is_waited_for(tmp_path):
    """Asked for its stack before it could give one, a worker whose imports took longer than
    slow_worker_seconds was killed by the question.
    """
    script = tmp_path / "slow_start.py"
    script.write_text(
        "import logging, time\n"
        "if __name__ == '__mp_main__':\n"
        "    time.sleep(1)\n"
        "from megatron.blending import WorkerConfig, get_loader\n"
        "from tests.unit_tests.blending.number_streams import source_of\n"
        "if __name__ == '__main__':\n"
        "    logging.basicConfig()\n"
        "    config = WorkerConfig(num_workers=1, start_method='spawn', slow_worker_seconds=0.3)\n"
        "    with get_loader(source_of('a', 5), config) as loader:\n"
        "        print(len(list(loader)))\n"
    )
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), *sys.path])),
    }
    done = subprocess.run(
        [sys.executable, str(script)],
        capture_output=True,
        text=True,
        timeout=SECONDS,
        env=environment,
    )
    assert done.stdout == "5\n", done.stderr
    assert re.search(r"has given nothing for \d+ seconds: it is still starting", done.stderr)


def draw(sample):
    return random.random(), np.random.rand(), torch.rand(1).item()


@pytest.mark.slow
def test_workers_draw_random_numbers_of_their_own():
    """Forked, they inherited torch's generator: in a function that is not seeded by sample, all
    drew the same.
    """

    def drawn_by(seed, method="fork"):
        with get_loader(
            MapDataset(source_of("a", 8), draw), processes(2, start_method=method, seed=seed)
        ) as loader:
            return list(loader)

    first = drawn_by(3)
    for numbers in zip(*first):
        assert len(set(numbers)) == 8
    assert drawn_by(3) == drawn_by(3, "spawn") == first
    assert all(a != b for one, other in zip(first, drawn_by(4)) for a, b in zip(one, other))
