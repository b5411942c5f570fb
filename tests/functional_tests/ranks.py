"""Run a function on several processes over gloo. A hang is a failure: after the timeout each rank's
stacks are shown.

Ranks are forked from a parent that has imported megatron-core, which costs a tenth of starting them
again.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import megatron.core.dist_checkpointing.strategies.filesystem_async
import megatron.core.optimizer
import torch
import torch.distributed as dist

from megatron.sft.model.cpu_support import rewritten_functions
from tests.functional_tests.forks import before_fork
from tests.functional_tests.gloo_guard import guard_collectives

TIMEOUT_SECONDS = 90.0
torch.set_num_threads(
    1
)  # threads that the parent computes with do not live on in a fork, which would wait for them


def run_ranks(
    function: Callable[..., Any],
    world_size: int,
    *arguments: Any,
    timeout_seconds: float = TIMEOUT_SECONDS,
) -> list[Any]:
    """`function(*arguments)` on each rank, with the default process group made; what each rank
    returned.

    Raises AssertionError with every rank's traceback if one fails, with every rank's stacks if they
    hang.
    """
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        ranks = [
            context.Process(target=_rank_main, args=(rank, world_size, folder, function, arguments))
            for rank in range(world_size)
        ]
        before_fork()
        for process in ranks:
            process.start()
        hung = _wait(ranks, folder, timeout_seconds)
        reports = [_read(folder / f"error{rank}") for rank in range(world_size)]
        failed = [f"--- rank {rank}\n{report}" for rank, report in enumerate(reports) if report]
        codes = [process.exitcode for process in ranks]
        if hung or any(codes):
            kind = f"hang: not over after {timeout_seconds:g} s" if hung else f"exit codes {codes}"
            raise AssertionError(f"{kind}\n" + "\n".join(failed))
        return [pickle.loads((folder / f"result{rank}").read_bytes()) for rank in range(world_size)]


def _rank_main(
    rank: int, world_size: int, folder: Path, function: Callable[..., Any], arguments: Sequence[Any]
) -> None:
    errors = (folder / f"error{rank}").open("w")
    faulthandler.register(signal.SIGUSR1, file=errors, all_threads=True)
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_RANK=str(rank))
    try:
        store = dist.FileStore(str(folder / "store"), world_size)
        dist.init_process_group(
            "gloo", store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=60)
        )
        guard_collectives()
        result = function(*arguments)
        (folder / f"result{rank}").write_bytes(pickle.dumps(result))
        dist.barrier()
        status = 0
    except BaseException:
        traceback.print_exc(file=errors)
        errors.flush()
        status = 1
    sys.stdout.flush()
    os._exit(status)  # a forked child must not run the parent's exit handlers


def _wait(ranks: Sequence[Any], folder: Path, timeout_seconds: float) -> bool:
    """Wait for all ranks; once one fails the others get a few seconds, since they may wait for it.
    True for a hang.
    """
    deadline = time.monotonic() + timeout_seconds
    failed_at: float | None = None
    while any(process.is_alive() for process in ranks):
        now = time.monotonic()
        if failed_at is None and any(process.exitcode for process in ranks):
            failed_at = now
        if now > deadline or (failed_at is not None and now > failed_at + 5):
            for process in ranks:
                if process.is_alive():
                    os.kill(process.pid, signal.SIGUSR1)
            time.sleep(0.5)
            for process in ranks:
                process.kill()
                process.join()
            return failed_at is None
        time.sleep(0.01)
    return False


def _read(path: Path) -> str:
    return path.read_text() if path.exists() else ""


assert megatron.core.optimizer  # imported for its cost: forked ranks have it
if not torch.cuda.is_available():
    rewritten_functions()  # found once, and changed in each rank
