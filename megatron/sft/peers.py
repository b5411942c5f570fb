"""collective. Messages between ranks outside of collectives: the cause of a failure, which ranks
still answer, and who has come to where all wait for each other's files.

They go through the store of the process group's rendezvous, so that they work while a collective
waits for a rank that is gone. torchrun hosts that store, or rank 0 without torchrun. If the store
does not answer, rank 0 is assumed to be gone.
"""

from __future__ import annotations

import multiprocessing
import os
import re
import sys
import threading
import time
import traceback
from contextlib import suppress
from datetime import timedelta
from itertools import count
from typing import NoReturn

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from megatron.packing.step.decide import GlobalBatchError
from megatron.sft.agreement import AgreedError
from megatron.sft.environment import fail, local_rank, tell_torchrun, world_from_environment

ANSWER_SECONDS = 5.0
"""Time after which a rank that does not answer is assumed to be gone."""
_CALLS = _LATE, _STOP, _LOST = "late", "stop", "lost"
"""Questions. Each is answered once."""
_WAKE, _CLOSED = "wake", "closed"
_POLL_SECONDS = 0.5
_FILES_FACTOR = 12
"""How much longer than in a collective ranks wait for one that writes or reads files."""
_FOREVER = timedelta(days=365)
_numbers = count()
_running: list[Peers] = []
"""The `Peers` of this process: one, or none."""


class Peers:
    """The other ranks of a run. A thread of this rank answers their questions, even while its main
    thread waits in a collective. It ends this process once another rank has told a cause: over NCCL
    a collective raises no error when a rank is gone.
    """

    def __init__(self, store: dist.Store) -> None:
        """store: store of the default process group's rendezvous."""
        self._rank, self._world_size = dist.get_rank(), dist.get_world_size()
        self._store = dist.PrefixStore("peers", store)
        self._ending = threading.Lock()
        if self._world_size > 1:
            # A connection for each of the two threads.
            self._store = self._store.clone()  # type: ignore[attr-defined]
            store = self._store.clone()  # type: ignore[attr-defined]
            self._thread = threading.Thread(target=self._answer, args=(store,), daemon=True)
            self._thread.start()
            _running.append(self)

    def close(self) -> None:
        """Ends the threads of all ranks, after a run without a failure. If rank 0 hosts the store,
        its interpreter would otherwise abort at exit, with the thread still inside the store.
        """
        if self._world_size > 1:
            _running.remove(self)
            with suppress(RuntimeError):
                for call in (_CLOSED, _WAKE):
                    self._store.set(call, "")
            self._thread.join(ANSWER_SECONDS)

    def exit_unless_all_stop(self, is_agreed: threading.Event) -> None:
        """Ends this process unless, within 5 seconds, all ranks answer or agree to stop in a step.

        It is called after SIGTERM. A launcher also sends that when a rank has died, and then no
        checkpoint can be saved.
        """
        end = time.monotonic() + ANSWER_SECONDS
        missing = self._missing(_STOP)
        if missing != [] and not is_agreed.wait(max(0.0, end - time.monotonic())):
            self._end(
                _not_answering(missing)
                if missing
                else f"rank {self._rank}: nobody can be asked whether to stop"
            )

    def give_up_on_late(self) -> None:
        """Raises DistError unless all ranks answer, or did so when first asked."""
        if self._missing(_LATE) != []:
            raise dist.DistError("a rank that the others wait for does not answer")

    def leads(self, topic: str, seconds: float) -> bool:
        """Returns whether this rank is the first to call this for a topic. The others wait up to
        `seconds` until the first one has ended with its message.
        """
        with suppress(RuntimeError):
            me = str(self._rank)
            if self._store.compare_set(topic, "", me).decode() != me:
                self._store.wait(["cause"], timedelta(seconds=seconds))
                return False
        return True

    def abort(self, failure: BaseException) -> NoReturn:
        """Ends this process with status 1, after a failure that other ranks do not have.

        The first cause is printed by its rank, and all ranks pass it to torchrun. This waits for
        answers of other ranks only, and not for threads, worker processes or process groups, where
        others may be stuck.
        """
        cause = f"rank {self._rank}: {type(failure).__name__}: {failure}"
        if is_lost(failure):
            missing = self._missing(_LOST)
            if missing == [] and re.search("time(d )?out", str(failure), re.IGNORECASE):
                cause += "; all ranks answer, so one of them came too late"
            cause = _not_answering(missing) if missing else cause
        elif isinstance(failure, ValueError):  # a message for the user
            cause = f"rank {self._rank}: {failure}"
        elif not isinstance(failure, OSError):  # an OSError has its path: no traceback is needed
            traceback.print_exception(failure)
        self._end(cause)

    def _end(self, cause: str) -> NoReturn:
        self._ending.acquire()  # for good: one thread of this process ends it
        is_first = True
        with suppress(RuntimeError):
            first = self._store.compare_set("cause", "", f"{self._rank} {cause}").decode()
            number, _, cause = first.partition(" ")
            is_first = int(number) == self._rank
            self._store.set(_WAKE, "")  # wakes the threads of all ranks, which read the cause
        tell_torchrun(cause, is_shown=is_first)
        if self._rank == 0 and "TORCHELASTIC_RUN_ID" not in os.environ:
            time.sleep(1)  # the store ends with this process: others must have read the cause
        _leave(1)

    def _missing(self, call: str) -> list[int] | None:
        """Returns the ranks that do not answer in time; None if the store does not answer, or if
        the cause is known already.
        """
        with suppress(RuntimeError):
            answers = {
                f"{call} {rank}": rank for rank in range(self._world_size) if rank != self._rank
            }
            self._store.set(call, "")
            self._store.set(_WAKE, "")
            end = time.monotonic() + ANSWER_SECONDS
            while time.monotonic() < end:
                if self._store.check(["cause"]):
                    return None
                if not answers or self._store.check(list(answers)):
                    return []
                time.sleep(0.05)
            return [rank for answer, rank in answers.items() if not self._store.check([answer])]
        return None

    def _answer(self, store: dist.Store) -> None:
        is_woken = False
        try:
            # No polling before: one request for the whole run.
            store.wait([_WAKE], _FOREVER)
            is_woken = True
            unanswered = list(_CALLS)
            while not store.check([_CLOSED]):
                if store.check(["cause"]):
                    self._end(f"rank {self._rank}: another rank has failed")
                for call in [call for call in unanswered if store.check([call])]:
                    store.set(f"{call} {self._rank}", "")
                    unanswered.remove(call)
                time.sleep(_POLL_SECONDS)
        except RuntimeError:  # the store is gone: once woken, at the end of a run
            # That of torchrun is gone if torchrun was killed, after which ranks save.
            if not is_woken and "TORCHELASTIC_RUN_ID" not in os.environ:
                time.sleep(ANSWER_SECONDS)  # if the main thread has noticed, it knows more
                self._end(f"rank {self._rank}: rank 0 does not answer any more: killed, or cut off")


def wait_for_all() -> None:
    """Waits as a barrier does until every rank has come here, but up to 12 times as long as
    --distributed-timeout-minutes, as long as all answer: ranks that write or read more than others
    come late, and in a collective the others would give up on them. Collective.

    Raises DistError if a rank does not come.
    """
    # Not by a collective: NCCL ends the process at the limit of the group, and gloo's barriers with
    # a limit of their own have it for receiving alone.
    try:
        _meet(f"wait for all {next(_numbers)}")
    except (dist.DistNetworkError, dist.DistStoreError):  # its host is gone, as a killed launcher
        dist.barrier()


def _meet(place: str) -> None:
    store = _get_default_store()
    start, pause = time.monotonic(), 0.01
    limit = store.timeout.total_seconds()  # type: ignore[attr-defined]
    latest, is_asked = start + _FILES_FACTOR * limit, False
    store.add(place, 1)
    while missing := dist.get_world_size() - store.add(place, 0):
        if time.monotonic() > latest:
            raise dist.DistError(f"{missing} ranks are late by {latest - start:.0f} s")
        if time.monotonic() > start + limit and not is_asked:
            for peers in _running:
                peers.give_up_on_late()
            is_asked = True
        time.sleep(pause)
        pause = min(2 * pause, 1.0)


def _not_answering(missing: list[int]) -> str:
    those = (
        f"rank {missing[0]} does"
        if len(missing) == 1
        else f"ranks {', '.join(map(str, missing[:8]))} do"
    )
    return f"{those} not answer any more: killed, stopped, or cut off"


def abort(failure: BaseException, peers: Peers | None) -> NoReturn:
    """Ends this process after a failure. One line on the terminal and torchrun's summary have the
    cause.

    peers: None before process groups exist; then all ranks of a machine usually fail alike.
    """
    if isinstance(failure, (GlobalBatchError, AgreedError)):
        if local_rank() == 0:
            tell_torchrun(str(failure), is_shown=True)
        else:
            time.sleep(1)  # torchrun's summary is of the rank that ends first
        _leave(2)
    rank, world_size = world_from_environment()
    if isinstance(failure, ValueError) and (peers is None or world_size == 1):
        fail(str(failure), local_rank())
    if isinstance(failure, OSError) and world_size == 1:
        fail(f"{type(failure).__name__}: {failure}", local_rank())
    if peers is not None:
        peers.abort(failure)
    traceback.print_exception(failure)
    fail(f"rank {rank}: {type(failure).__name__}: {failure}", 0)


def _leave(status: int) -> NoReturn:
    """Ends this process at once. Python's usual exit might wait for other ranks."""
    for process in multiprocessing.active_children():
        process.kill()
    sys.stdout.flush()
    os._exit(status)


def is_lost(failure: BaseException) -> bool:
    """Returns whether a failure only says that another rank could not be reached."""
    text = str(failure)
    return (
        isinstance(failure, (dist.DistError, ConnectionError)) or "gloo" in text or "NCCL" in text
    )
