"""pure. The heartbeat of one rank.

Each rank has one TCP connection to rank 0 and a thread that answers there, even while its main
thread computes, waits in a collective or writes a file. A thread of rank 0, the hub, hears them:

    killed    the connection closes: all ranks end within a second
    stopped   no ping is answered: all end after three quarters of the timeout of collectives
    slow      pings are answered: the others wait
    failed    the rank reports a cause: all end with it

If rank 0 is killed or stopped, each of the others finds out by itself. The store at which ranks met
is read for rank 0's address alone, so that it may be lost with its host later on: torchrun, or
rank 0 without torchrun.

Cost: every 5 seconds one message of 20 bytes to each rank, and one from it.
"""

from __future__ import annotations

import json
import os
import secrets
import select
import threading
import time
from collections.abc import Callable
from itertools import count
from typing import TYPE_CHECKING, Any, NoReturn

from megatron.sft.heartbeat.cause import ANSWER_SECONDS, GRACE_SECONDS, Cause, Clock, gone, silent
from megatron.sft.heartbeat.connection import connect, listen, machine_names
from megatron.sft.heartbeat.hub import Hub

if TYPE_CHECKING:
    import torch.distributed as dist

_KEY = "heartbeat"


class Heartbeat:
    """This rank's connection to the others. Its thread ends this process if rank 0 is silent, or
    tells the cause for which all ranks end.
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        timeout_seconds: float,
        store: dist.Store,
        report: Callable[[Cause, bool], None],
        leave: Callable[[int], NoReturn],
    ) -> None:
        """Raises ValueError if rank 0 cannot be reached.

        Args:
            timeout_seconds: timeout of collectives.
            store: store at which ranks meet.
            report: function that reports a cause; True on the one rank that speaks for all.
            leave: function that ends this process with a status.
        """
        self._rank, self._report, self._leave = rank, report, leave
        self._clock = Clock(timeout_seconds)
        self._changed = threading.Condition()
        self._meetings, self._num_held = count(1), 0
        self._questions, self._answers = count(), dict[int, str]()
        self._is_over = False
        self._ending = threading.Lock()
        self._hub: Hub | None = None
        store_host = os.environ.get("MASTER_ADDR", "127.0.0.1")
        if rank == 0:
            token, listener = secrets.token_hex(8), listen(world_size)
            self._hub = Hub(world_size, timeout_seconds, listener, token, self.finish)
            self._connection = self._hub.connection_of_rank_0
            place = [token, listener.getsockname()[1], machine_names(store_host)]
            store.set(_KEY, json.dumps(place))
        else:
            token, port, names = json.loads(store.get(_KEY))
            self._connection = connect(rank, names, port)
            self._connection.send(token=token, rank=rank)
        self._thread = threading.Thread(target=self._listen, name="heartbeat", daemon=True)
        self._thread.start()

    def wait_for_all(self) -> None:
        """Waits until every rank has called this as often as this one. Collective.

        Slow ranks are waited for, up to 12 times the timeout of collectives.
        """
        number = next(self._meetings)
        self._connection.send(meeting=number)
        with self._changed:
            self._changed.wait_for(lambda: self._num_held >= number)

    def check_all_answer(self, is_excused: Callable[[], bool] = lambda: False) -> None:
        """Returns once every rank has answered. Ends all ranks if one does not within 5 seconds,
        and `is_excused` does not return True by then.
        """
        number = next(self._questions)
        self._connection.send(question=number)
        with self._changed:
            self._changed.wait_for(lambda: number in self._answers, ANSWER_SECONDS + 1)
            fault = self._answers.pop(number, None)
        if is_excused():
            return
        if fault is None:  # the others find out by themselves, and rank 1 speaks
            self.finish(Cause(silent([0], ANSWER_SECONDS), 1, 1))
        if fault:
            self.end(Cause(fault, 1, None))

    def end(self, cause: Cause) -> NoReturn:
        """Ends all ranks with this cause, or with one that was reported before it.

        Threads, worker processes and process groups are not waited for: others may be stuck there.
        """
        self._connection.send(cause=cause)
        # The thread that hears of the decision ends this process. If there is none, rank 0 is
        # stopped, or other ranks have ended without a failure.
        self._thread.join(2 * ANSWER_SECONDS)
        self.finish(cause._replace(text=f"rank {self._rank}: {cause.text}", rank=self._rank))

    def close(self) -> None:
        """Ends the heartbeats of all ranks, after a run without a failure."""
        self._is_over = True
        self._connection.send(over=True)
        for thread in (self._hub, self._thread):
            if thread is not None:
                thread.join(ANSWER_SECONDS)

    def finish(self, cause: Cause, before_leaving: Callable[[], None] | None = None) -> NoReturn:
        """Reports a cause and ends this process, without asking other ranks."""
        self._ending.acquire()  # for good: one thread of this process ends it
        self._report(cause, cause.rank == self._rank)
        self._connection.close()
        if before_leaving is not None:
            before_leaving()
        self._leave(cause.status)

    def _listen(self) -> None:
        poll = select.poll()
        poll.register(self._connection.fileno(), select.POLLIN)
        heard = time.monotonic()
        while not self._is_over:
            is_ready = poll.poll(1000 * self._clock.period)
            now, own_pause = self._clock.tick()
            heard += own_pause
            messages = self._connection.receive() if is_ready else []
            if messages is None:
                time.sleep(GRACE_SECONDS)  # a signal to all ranks ends this process as well
                if self._is_over:
                    return
                self.finish(Cause(gone([0], _store_of_rank_0()), 1, 1))
            for message in messages:
                heard = now
                self._hear(message)
            if now - heard > self._clock.patience:
                self.finish(Cause(silent([0], now - heard), 1, 1))

    def _hear(self, message: dict[str, Any]) -> None:
        if "ping" in message:
            self._connection.send(answer=message["ping"])
        elif "cause" in message:
            self.finish(Cause(*message["cause"]))
        elif "over" in message:
            self._is_over = True
        else:
            with self._changed:
                self._num_held = message.get("held", self._num_held)
                if "question" in message:
                    self._answers[message["question"]] = message["fault"]
                self._changed.notify_all()


def _store_of_rank_0() -> str:
    """Returns what else is lost with rank 0: the store, unless torchrun hosts it."""
    is_torchruns = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return "" if is_torchruns else ", with the store at which ranks met"
