"""collective. What a rank does when it fails or has to wait: it ends all ranks with one line that
says why, and waits for slow files.
"""

from __future__ import annotations

import multiprocessing
import os
import re
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

import torch.distributed as dist

from megatron.packing.step.decide import GlobalBatchError
from megatron.sft.agreement import AgreedError
from megatron.sft.environment import (
    fail,
    has_error_file,
    local_rank,
    tell_torchrun,
    world_from_environment,
)
from megatron.sft.heartbeat.cause import ANSWER_SECONDS, GRACE_SECONDS, USER_ERROR, Cause
from megatron.sft.heartbeat.member import Heartbeat

_running: list[Heartbeat] = []
"""The heartbeat of this process: one, or none."""


@contextmanager
def heartbeats(
    rank: int, world_size: int, store: dist.Store | None, minutes: float
) -> Iterator[None]:
    """Context in which all ranks end with the first failure of one: its message, or its death.
    Raises ValueError if rank 0 does not come within the timeout.

    Args:
        store: store at which ranks meet; None for a single process, where this does nothing.
        minutes: timeout of collectives.
    """
    if store is None:
        yield
        return
    try:
        heartbeat = Heartbeat(rank, world_size, 60 * minutes, store, _report, _leave)
    except dist.DistError as error:
        raise ValueError(
            f"rank {rank}: rank 0 did not come within {minutes:g} minutes ({error}); see its log"
        ) from None
    _running.append(heartbeat)
    yield
    _running.remove(heartbeat)
    heartbeat.close()


def wait_for_all() -> None:
    """Waits as a barrier does until every rank has come here, but as long as all answer, up to 12
    times --distributed-timeout-minutes: ranks that write or read more than others come late, and in
    a collective the others would give up on them. Collective.
    """
    if _running:
        _running[0].wait_for_all()
    else:
        dist.barrier()


def end_unless_all_answer(is_agreed: threading.Event) -> None:
    """Ends all ranks unless each of them answers within 5 seconds, or all agree to stop in a step.

    It is called after SIGTERM, when a launcher soon kills: a rank that is stopped or hangs is not
    waited for until the timeout.
    """
    if _running:
        _running[0].check_all_answer(is_agreed.is_set)


def abort(failure: BaseException) -> NoReturn:
    """Ends this process, and all other ranks, after a failure. One line on the terminal and in
    torchrun's summary has the cause.

    Status 2 is that of a message for the user: a ValueError.
    """
    rank, world_size = world_from_environment()
    is_agreed = isinstance(failure, (GlobalBatchError, AgreedError))
    if _running:
        _running[0].end(_cause_of(failure, rank, is_agreed))
    if is_agreed:
        tell_torchrun(str(failure), is_shown=local_rank() == 0)
        _leave(USER_ERROR)
    if isinstance(failure, ValueError):
        fail(str(failure), local_rank())
    if isinstance(failure, OSError) and world_size == 1:
        fail(f"{type(failure).__name__}: {failure}", local_rank())
    traceback.print_exception(failure)
    fail(f"rank {rank}: {type(failure).__name__}: {failure}", 0)


def _cause_of(failure: BaseException, rank: int, is_agreed: bool) -> Cause:
    """Returns the cause to report. Ends all ranks if the failure only says that others are gone."""
    if is_agreed:
        return Cause(str(failure), USER_ERROR, None)
    if isinstance(failure, ValueError):
        return Cause(str(failure), USER_ERROR, rank)
    more = _cause_of_loss(failure) if is_lost(failure) else ""
    if not more and not isinstance(failure, OSError):
        traceback.print_exception(failure)  # an OSError has its path
    return Cause(f"{type(failure).__name__}: {failure}{more}", 1, rank)


def _cause_of_loss(failure: BaseException) -> str:
    """Returns what is known of a failure to reach another rank, after all of them have answered."""
    _running[0].check_all_answer()
    is_cut = re.search("connection|broken pipe", str(failure), re.IGNORECASE) is not None
    # The rank at fault may be about to say why; whoever closed a connection waits here as well.
    time.sleep(ANSWER_SECONDS if is_cut else 2 * GRACE_SECONDS)
    if isinstance(failure, dist.DistNetworkError):
        return "; all ranks answer, so the store at which they met is lost: its host, torchrun"
    if re.search("time(d )?out", str(failure), re.IGNORECASE):
        return "; all ranks answer, so one of them came too late"
    return "; all ranks answer, so the connection alone was lost" if is_cut else ""


def is_lost(failure: BaseException) -> bool:
    """Returns whether a failure only says that another rank could not be reached."""
    text = str(failure)
    return (
        isinstance(failure, (dist.DistError, ConnectionError)) or "gloo" in text or "NCCL" in text
    )


def _report(cause: Cause, speaks: bool) -> None:
    # Without torchrun, whose summary has it, each rank may have a terminal of its own.
    tell_torchrun(cause.text, is_shown=speaks or not has_error_file())


def _leave(status: int) -> NoReturn:
    """Ends this process at once. Python's usual exit might wait for other ranks."""
    for process in multiprocessing.active_children():
        process.kill()
    sys.stdout.flush()
    os._exit(status)
