"""Whole runs of the trainer in forked processes, started and ended as torchrun does it, in a
fifteenth of its time.

A launcher process of its own hosts the store, forks the ranks, sends SIGTERM to all of them once
one has failed, and puts down when each of them ended, and who was left. Where a fault is asked for,
ranks end as any interpreter does: the fork unwinds its stack.
"""

from __future__ import annotations

import ctypes
import faulthandler
import importlib
import json
import logging
import os
import signal
import socket
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

import psutil
import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from megatron.sft.__main__ import main
from megatron.sft.model.cpu_support import rewritten_functions
from tests.functional_tests.fault_injection import Fault
from tests.functional_tests.forks import before_fork

# What a run imports as it goes, a sixth of its time: forked ranks have it.
for name in (
    *("training.train", "run", "peers", "preflight.samples_of_run", "preflight.dry_run"),
    *("data.trained_tokens", "model.huggingface.pretrained"),
):
    importlib.import_module(f"megatron.sft.{name}")
importlib.import_module("megatron.core.dist_checkpointing.strategies.torch")
if not torch.cuda.is_available():
    rewritten_functions()  # found once, and changed in each rank
ROOT = Path(__file__).parents[2]
NO_PLOT = ModuleType("no_plot")
NO_PLOT.plot = lambda *_: None  # type: ignore[attr-defined]  # to draw is half of a short run's time
LIMIT_SECONDS = 90.0
"""A run that takes longer hangs."""


class ForkedRun:
    """A run of pretrain_sft.py under way, with the outcome that torchrun would give it.

    It starts within half a second, since its ranks are forks of this process, which has imported
    everything. `script` is the main function of another program.
    """

    def __init__(
        self, num_processes: int, arguments: Sequence[str], script: Callable[[], None] = main
    ) -> None:
        self._num_processes = num_processes
        self._temporary = tempfile.TemporaryDirectory()
        self._folder = Path(self._temporary.name)
        self._launcher = launch(self._folder, num_processes, arguments, None, -1, script)
        self._has_ended = False
        self.summary = ""

    def is_running(self) -> bool:
        """Return whether a rank is left."""
        self._has_ended = self._has_ended or bool(os.waitpid(self._launcher, os.WNOHANG)[0])
        return not self._has_ended

    def signal_all(self, number: int) -> None:
        """Signal every rank and its data workers."""
        for rank in json.loads((self._folder / "pids.json").read_text()):
            _signal_tree(rank, number)

    def signal_rank(self, rank: int, number: int) -> None:
        """Signal one rank alone."""
        os.kill(json.loads((self._folder / "pids.json").read_text())[rank], number)

    def finish(self) -> tuple[int, str]:
        """Return (exit status, output of all ranks).

        The status is that of the rank that failed first. Its error file is part of the output where
        rank 0 was ended before it said the same; `summary` is what torchrun makes of that file.
        """
        deadline = time.monotonic() + 2 * LIMIT_SECONDS
        while self.is_running():
            if time.monotonic() > deadline:  # the launcher itself hangs, which ends others' hangs
                _signal_tree(self._launcher, signal.SIGKILL)
            time.sleep(0.01)
        outcome = json.loads((self._folder / "outcome.json").read_text())
        logs = [self._folder / f"rank{rank}.log" for rank in range(self._num_processes)]
        output = "".join(log.read_text() for log in logs)
        first = outcome["first_failed_rank"]
        error = self._folder / f"error{first}.json"
        if first is not None:
            failure = ProcessFailure(first, 0, outcome["codes"][first], str(error))
            self.summary = ChildFailedError("pretrain_sft.py", {first: failure}).format_msg()
        if error.exists():
            line = json.loads(error.read_text())["message"]["message"]
            output += "" if line in output else f"{line}\n"
        self._temporary.cleanup()
        assert not outcome["hangs"], f"hang:\n{output}"
        return 0 if first is None else outcome["codes"][first], output


def train_forked(
    num_processes: int, arguments: Sequence[str], script: Callable[[], None] = main
) -> tuple[int, str]:
    """Return (exit status, output of all ranks) of a run of pretrain_sft.py."""
    return ForkedRun(num_processes, arguments, script).finish()


def command_forked(
    arguments: Sequence[str],
    typed: str = "",
    script: Callable[[], object] = main,
    limit_seconds: float = LIMIT_SECONDS,
) -> tuple[int, str, str]:
    """Return (exit status, output, errors) of a command that no launcher started.

    `typed` is its standard input, `script` its main function. As forked runs do, it spares the
    imports of a process of its own.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "typed").write_text(typed)

        def run() -> None:
            for number, mode in enumerate((os.O_RDONLY, *[os.O_WRONLY | os.O_CREAT] * 2)):
                os.dup2(os.open(folder / ("typed", "output", "errors")[number], mode), number)
            sys.stdin = open(0, closefd=False)  # noqa: SIM115
            _become_script()
            sys.argv = ["megatron-sft", *arguments]
            script()

        sys.stdout.flush()
        before_fork()
        process = os.fork()
        if not process:
            _end_after(run)
        deadline = time.monotonic() + limit_seconds
        while not (ended := os.waitpid(process, os.WNOHANG))[0]:
            if time.monotonic() > deadline:
                _signal_tree(process, signal.SIGKILL)
            time.sleep(0.02)
        output, errors = ((folder / file).read_text() for file in ("output", "errors"))
        return os.waitstatus_to_exitcode(ended[1]), output, errors


def launch(
    folder: Path,
    world_size: int,
    arguments: Sequence[str],
    fault: Fault | None,
    faulty_rank: int,
    script: Callable[[], None] = main,
    *,
    has_launcher: bool = True,
) -> int:
    """Start a launcher with its ranks; returns its process. It leaves `folder`/outcome.json, ranks
    rank*.log there.

    has_launcher: False as under Slurm: rank 0 hosts the store, and nobody ends the others when one
        has failed.
    """
    sys.stdout.flush()
    before_fork()
    process = os.fork()
    if process:
        return process
    launcher = os.getpid()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # the child subreaper: whoever outlives a rank becomes the launcher's
        ctypes.CDLL(None).prctl(36, 1)
        listener = socket.socket()
        # Without a launcher it only keeps the port from others, until rank 0 listens there.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", 0))
        if has_launcher:
            listener.listen(64)
        start, ranks = time.monotonic(), dict[int, int]()
        for rank in range(world_size):
            forked = os.fork()
            if forked:
                ranks[forked] = rank
                continue
            own = fault if rank == faulty_rank else None
            environment = _environment(folder, rank, world_size, listener.getsockname()[1])
            if not has_launcher:
                environment = {name: environment[name] for name in _WITHOUT_LAUNCHER}
            listener.close()
            run = partial(_run_rank, folder, environment, arguments, own, script)
            if fault is None:
                _end_after(run)  # what is to be done at an interpreter's end is the parent's
            run()
            sys.exit()
        (folder / "pids.tmp").write_text(json.dumps(list(ranks)))
        os.replace(folder / "pids.tmp", folder / "pids.json")
        _end_after(partial(_watch, folder, ranks, start, listener, has_launcher))
    finally:
        if os.getpid() == launcher:  # else a rank that ends as an interpreter does
            traceback.print_exc()
            os._exit(1)


def _run_rank(
    folder: Path,
    environment: Mapping[str, str],
    arguments: Sequence[str],
    fault: Fault | None,
    script: Callable[[], None],
) -> None:
    _become_rank(folder, environment)
    os.environ["FAULT_MOMENT"] = str(folder / "moment")
    sys.argv = ["pretrain_sft.py", *arguments, *(fault.inject() if fault is not None else ())]
    script()


def _end_after(work: Callable[[], None]) -> NoReturn:
    """Do this and end the process: whatever happens, a fork must not go on with its parent's
    tests.
    """
    status = 1
    try:
        status = _status_of(work)
    finally:
        os._exit(status)


def _status_of(work: Callable[[], None]) -> int:
    """What a process would end with that does this alone."""
    try:
        work()
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
        return 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
    return 0


def _become_rank(folder: Path, environment: Mapping[str, str]) -> None:
    """Make this process one that a launcher would have started."""
    path = folder / f"rank{environment['RANK']}.log"
    log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    _become_script()
    os.environ.update(environment)


_WITHOUT_LAUNCHER = "RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT".split()
"""Variables that a user sets without a launcher."""


def _environment(folder: Path, rank: int, world_size: int, port: int) -> dict[str, str]:
    """What torchrun sets."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_RUN_ID": "none",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_ERROR_FILE": str(folder / f"error{rank}.json"),
    }


def _become_script() -> None:
    """Make this process one that runs a script: undo what pytest does to output, warnings and
    logging.
    """
    os.chdir(ROOT)
    # a fork's pool is rebuilt by its first user: threads must not race to
    torch.set_num_threads(torch.get_num_threads())
    sys.modules["megatron.sft.report.plot"] = NO_PLOT
    sys.stdout, sys.stderr = (open(number, "w", buffering=1, closefd=False) for number in (1, 2))  # noqa: SIM115
    faulthandler.enable()
    warnings.resetwarnings()
    warnings.showwarning = lambda *told, **_: print(
        warnings.formatwarning(*told[:4]), end="", file=sys.stderr
    )
    logging.getLogger().handlers.clear()


def _watch(
    folder: Path,
    ranks: dict[int, int],
    start: float,
    listener: socket.socket,
    has_launcher: bool,
) -> None:
    store = _host_store(listener) if has_launcher else None
    codes: dict[int, int] = {}
    ends: dict[int, float] = {}
    is_told = hangs = False
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(
            number, lambda told, _: _signal([pid for pid in ranks if ranks[pid] not in codes], told)
        )
    while len(codes) < len(ranks):
        pid, status = os.waitpid(-1, os.WNOHANG)
        now = time.monotonic() - start
        if pid in ranks:
            codes[ranks[pid]] = os.waitstatus_to_exitcode(status)
            ends[ranks[pid]] = now
        left = {pid: rank for pid, rank in ranks.items() if rank not in codes}
        if any(codes.values()) and not is_told:
            is_told = True
            _signal(left if has_launcher else (), signal.SIGTERM)
        if (
            is_told
            and left
            and all(psutil.Process(pid).status() == psutil.STATUS_STOPPED for pid in left)
        ):
            _signal(left, signal.SIGKILL)  # torchrun does so after 30 seconds
        if now > LIMIT_SECONDS and not hangs:
            hangs = True
            _signal(left, signal.SIGUSR1)
            time.sleep(1)
            _signal(left, signal.SIGKILL)
        time.sleep(0.02)
    orphans = psutil.Process().children(recursive=True)
    _, alive = psutil.wait_procs(orphans, timeout=2)
    for process in alive:
        process.kill()
    outcome = {
        "codes": [codes[rank] for rank in sorted(codes)],
        "first_failed_rank": next(
            (rank for rank, code in codes.items() if code), None
        ),  # others end by its signal
        "ends": [round(ends[rank], 2) for rank in sorted(ends)],
        "hangs": hangs,
        "start": start,
        "num_orphans": len(alive),
    }
    (folder / "outcome.json").write_text(json.dumps(outcome))
    del store


def _host_store(listener: socket.socket) -> dist.TCPStore:
    port = listener.getsockname()[1]
    return dist.TCPStore(
        "127.0.0.1",
        port,
        is_master=True,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )


def _signal_tree(pid: int, number: int) -> None:
    """Signal a process and all that it started."""
    with suppress(psutil.NoSuchProcess):
        process = psutil.Process(pid)
        for one in [*process.children(recursive=True), process]:
            with suppress(psutil.NoSuchProcess):
                one.send_signal(number)


def _signal(processes: Any, number: int) -> None:
    for pid in processes:
        with suppress(ProcessLookupError):
            os.kill(pid, number)
