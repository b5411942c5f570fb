"""pure. The thread of rank 0 that hears all ranks, and decides for which cause they end."""

from __future__ import annotations

import selectors
import socket
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any, NamedTuple, NoReturn

from megatron.sft.heartbeat.cause import (
    ANSWER_SECONDS,
    GRACE_SECONDS,
    USER_ERROR,
    Cause,
    Clock,
    gone,
    ranks_text,
    silent,
)
from megatron.sft.heartbeat.connection import Connection

_ALIKE_SECONDS = 1.0
"""Time in which other ranks report the same message for the user, each by itself."""
_FILES_FACTOR = 12
"""How much longer than in a collective ranks wait for one that writes or reads files."""
_LEAVE_SECONDS = 1.0
"""Time that ranks have to end, once they have the cause."""


class _Question(NamedTuple):
    """A rank's question who answers."""

    rank: int
    number: int
    ping: int
    """Ping that was sent for it; whoever answers this one, or a later one, lives."""
    asked: float


class Hub(threading.Thread):
    """Hears all ranks until they end. Rank 0 is connected as the others are."""

    def __init__(
        self,
        world_size: int,
        timeout_seconds: float,
        listener: socket.socket,
        token: str,
        finish: Callable[[Cause, Callable[[], None]], NoReturn],
    ) -> None:
        """Args:
        token: text that ranks present, and others that connect do not know.
        finish: function that reports a cause on rank 0, calls its second argument and ends the
            process.
        """
        super().__init__(name="heartbeats", daemon=True)
        self._world_size, self._finish, self._token = world_size, finish, token
        self._clock = Clock(timeout_seconds)
        self._longest_meeting = _FILES_FACTOR * timeout_seconds
        self._listener, self._selector = listener, selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ)
        self._connections = dict[int, Connection]()
        self._heard, self._answered = dict[int, float](), dict[int, int]()
        self._lost = dict[int, float]()
        self._ping, self._next_ping = 0, 0.0
        self._meeting, self._meeting_since, self._present = 1, 0.0, set[int]()
        self._questions = list[_Question]()
        self._causes, self._first_cause = dict[int, Cause](), 0.0
        self._is_over = False
        own, other_end = map(Connection, socket.socketpair())
        self.connection_of_rank_0 = own
        """Connection for rank 0's own heartbeat."""
        self._selector.register(other_end, selectors.EVENT_READ, other_end)
        self._join(other_end, 0)
        self.start()

    def run(self) -> None:
        """Hears the ranks until one says that the run is over, or a cause ends them."""
        while not self._is_over:
            self._read(self._pause())
            now, own_pause = self._clock.tick()
            for rank in self._heard:
                self._heard[rank] += own_pause
            if now > self._next_ping:
                self._send_pings(now)
            cause = self._decide(now)
            if cause is not None and not self._is_over:
                self._end(cause)
            self._answer(now)
        self._send(self._connections, over=True)

    def _pause(self) -> float:
        is_waiting = self._causes or self._lost or self._questions
        return min(0.05, self._clock.period) if is_waiting else self._clock.period

    def _read(self, seconds: float) -> None:
        for key, _ in self._selector.select(seconds):
            if key.data is not None:
                self._receive(key.data)
                continue
            with suppress(OSError):  # who connects may be gone again
                connection = Connection(self._listener.accept()[0])
                self._selector.register(connection, selectors.EVENT_READ, connection)

    def _receive(self, connection: Connection) -> None:
        messages = connection.receive()
        if messages and connection.rank is None:
            if messages[0].get("token") == self._token:
                self._join(connection, messages.pop(0)["rank"])
            else:  # something else that connects, such as a port scanner
                messages = None
        if messages is None:
            self._drop(connection)
        elif connection.rank is not None:
            for message in messages:
                self._hear(connection.rank, message)

    def _send(self, ranks: Iterable[int], **message: object) -> None:
        for rank in ranks:
            self._connections[rank].send(**message)

    def _join(self, connection: Connection, rank: int) -> None:
        connection.rank = rank
        self._connections[rank] = connection
        self._heard[rank], self._answered[rank] = time.monotonic(), 0

    def _drop(self, connection: Connection) -> None:
        self._selector.unregister(connection)
        connection.close()
        rank = connection.rank
        if rank is not None:
            del self._connections[rank], self._heard[rank]
            self._lost[rank] = time.monotonic()

    def _hear(self, rank: int, message: dict[str, Any]) -> None:
        now = time.monotonic()
        self._heard[rank] = now
        if "answer" in message:
            self._answered[rank] = message["answer"]
        elif "meeting" in message:
            self._meet(rank, now)
        elif "question" in message:
            self._send_pings(now)
            self._questions.append(_Question(rank, message["question"], self._ping, now))
        elif "cause" in message:
            self._first_cause = self._first_cause if self._causes else now
            self._causes.setdefault(rank, Cause(*message["cause"]))
        elif "over" in message:
            self._is_over = True

    def _meet(self, rank: int, now: float) -> None:
        self._meeting_since = self._meeting_since if self._present else now
        self._present.add(rank)
        if len(self._present) == self._world_size:
            self._send(self._connections, held=self._meeting)
            self._meeting += 1
            self._present.clear()

    def _send_pings(self, now: float) -> None:
        self._ping, self._next_ping = self._ping + 1, now + self._clock.period
        self._send(self._connections, ping=self._ping)

    def _answer(self, now: float) -> None:
        for question in list(self._questions):
            answered = {rank for rank, ping in self._answered.items() if ping >= question.ping}
            answered &= set(self._connections)
            is_late = now > question.asked + ANSWER_SECONDS
            if len(answered) == self._world_size or is_late:
                self._questions.remove(question)
                if question.rank in self._connections:
                    fault = self._describe_silent(sorted(set(range(self._world_size)) - answered))
                    self._send([question.rank], question=question.number, fault=fault)

    def _describe_silent(self, ranks: list[int]) -> str:
        """Returns the message of ranks that have not answered; "" if there are none."""
        if absent := [rank for rank in ranks if rank not in self._answered]:
            return f"{ranks_text(absent)} did not come: not started, or ended at its start"
        return silent(ranks, ANSWER_SECONDS) if ranks else ""

    def _decide(self, now: float) -> Cause | None:
        """Returns the cause for which all ranks end, if there is one by now."""
        if self._causes:
            return self._reported(now)
        if self._lost and now > min(self._lost.values()) + GRACE_SECONDS:
            return Cause(gone(sorted(self._lost)), 1, 0)
        pauses = {rank: now - heard for rank, heard in self._heard.items()}
        if late := [rank for rank in sorted(pauses) if pauses[rank] > self._clock.patience]:
            return Cause(silent(late, max(pauses.values())), 1, 0)
        if self._present and now > self._meeting_since + self._longest_meeting:
            absent = ranks_text(sorted(set(self._connections) - self._present))
            waited = f"to where the others wait within {self._longest_meeting:.0f} s"
            return Cause(f"{absent} answers, but did not come {waited}", 1, 0)
        return None

    def _reported(self, now: float) -> Cause | None:
        """Returns the first cause that was reported. A message for the user waits for the other
        ranks, which may be about to report the same, or to write what they have.
        """
        first = next(iter(self._causes.values()))
        longest = ANSWER_SECONDS if first.rank is None else _ALIKE_SECONDS
        is_waited_for = first.status == USER_ERROR and now < self._first_cause + longest
        if is_waited_for and len(self._causes) + len(self._lost) < self._world_size:
            return None
        if first.rank is None:
            return first._replace(rank=0)
        ranks = sorted(rank for rank, cause in self._causes.items() if cause.text == first.text)
        if len(ranks) == self._world_size:
            return first._replace(rank=0)
        # The first of them speaks, whichever was heard first.
        return first._replace(text=f"{ranks_text(ranks)}: {first.text}", rank=ranks[0])

    def _end(self, cause: Cause) -> NoReturn:
        """Ends all ranks: first the one that speaks, since torchrun ends the others then, and
        rank 0 last, with which this thread ends.
        """

        others = set(self._connections) - {0}

        def spread() -> None:
            for ranks in (others & {cause.rank}, others - {cause.rank}):
                connected = ranks & set(self._connections)
                self._send(connected, cause=cause)
                latest = time.monotonic() + _LEAVE_SECONDS
                while connected & set(self._connections) and time.monotonic() < latest:
                    self._read(0.05)

        if cause.rank != 0:
            spread()
        self._finish(cause, spread if cause.rank == 0 else lambda: None)
