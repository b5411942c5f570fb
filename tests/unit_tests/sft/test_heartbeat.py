"""Ranks that notice one another's end. Each is an object of this process, which takes down what its
rank would report, instead of ending with it.
"""

import contextlib
import multiprocessing
import os
import socket
import threading
import time
from typing import Any

import pytest
import torch.distributed as dist

from megatron.sft.heartbeat import cause, hub, member
from megatron.sft.heartbeat.cause import Cause, Clock, ranks_text
from megatron.sft.heartbeat.connection import connect
from megatron.sft.heartbeat.member import Heartbeat


def shut(connection):
    with contextlib.suppress(OSError):  # closed already
        connection._socket.shutdown(socket.SHUT_RDWR)


class Rank:
    """A rank with its heartbeat, and how it ended."""

    def __init__(self, number, world_size, timeout_seconds, store):
        self.number = number
        self.ended = threading.Event()
        self.said: tuple[str, int, bool] | None = None
        self.heartbeat: Any = Heartbeat(
            number, world_size, timeout_seconds, store, self._tell, self._leave
        )

    def _tell(self, reported, speaks):
        self.said = reported.text, reported.status, speaks

    def _leave(self, status):
        self.ended.set()
        raise SystemExit(status)

    def die(self):
        """As a killed process: all of its sockets are closed, and no thread of it says a word."""
        beat = self.heartbeat
        beat._hear = beat.finish = lambda *_: None
        if beat._hub is not None:
            beat._hub._is_over = True
            beat._hub._send = lambda *_, **__: None
            for connection in list(beat._hub._connections.values()):
                shut(connection)
        shut(beat._connection)

    def stop(self):
        """As by SIGSTOP: its connections stay, and it answers nothing."""
        beat = self.heartbeat
        beat._hear = beat.finish = lambda *_: None
        if beat._hub is not None:
            beat._hub._send = lambda *_, **__: None
            beat._hub._decide = lambda _: None

    def report(self, text, status, rank):
        beat = self.heartbeat
        threading.Thread(target=beat.end, args=(Cause(text, status, rank),), daemon=True).start()


@pytest.fixture
def start(monkeypatch):
    """Starts ranks whose collectives have this timeout."""
    for module in (cause, hub, member):
        for name, seconds in (("ANSWER_SECONDS", 0.3), ("GRACE_SECONDS", 0.1)):
            monkeypatch.setattr(module, name, seconds, raising=False)
    monkeypatch.setattr(hub, "_ALIKE_SECONDS", 0.3)
    monkeypatch.setattr(hub, "_LEAVE_SECONDS", 0.3)
    monkeypatch.setattr(threading, "excepthook", lambda _: None)  # ends of threads by `leave`
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    started: list[Rank] = []

    def start_ranks(world_size, timeout_seconds=60.0, absent=()):
        store = dist.HashStore()
        for number in range(world_size):
            if number not in absent:
                started.append(Rank(number, world_size, timeout_seconds, store))
        while len(started[0].heartbeat._hub._connections) < len(started):
            time.sleep(0.001)
        return list(started)

    yield start_ranks
    for rank in started:
        rank.heartbeat._is_over = True
        if rank.heartbeat._hub is not None:
            rank.heartbeat._hub._is_over = True
        rank.die()


def all_said(ranks, seconds=3.0):
    """What each rank reports; None of one that is not told to end in time."""
    latest = time.monotonic() + seconds
    for rank in ranks:
        rank.ended.wait(max(0.0, latest - time.monotonic()))
    return [rank.said for rank in ranks]


def test_killed_ranks_are_named_within_a_second(start):
    """The others waited for the timeout of a collective, or for two hours in a save. The ranks of a
    lost machine are one message.
    """
    ranks = start(4)
    for rank in ranks[2:]:
        rank.die()
    said = "ranks 2-3 are gone: killed (out of memory? see dmesg), or cut off"
    assert all_said(ranks[:2], 1.0) == [(said, 1, True), (said, 1, False)]


def test_killed_first_rank_is_named_by_each_of_the_others(start):
    """Rank 0 was named in no phase of a run without a launcher, whose store it hosts."""
    ranks = start(3)
    ranks[0].die()
    said = (
        "rank 0 is gone, with the store at which ranks met: killed (out of memory? see dmesg), or "
        "cut off"
    )
    assert all_said(ranks[1:], 1.0) == [(said, 1, True), (said, 1, False)]


@pytest.mark.parametrize("stopped", [0, 1])
def test_a_stopped_rank_is_named_within_the_timeout(start, stopped):
    """In a later save it was noticed after 12 timeouts: questions were answered once per run."""
    ranks = start(3, timeout_seconds=0.6)
    left = [rank for rank in ranks if rank.number != stopped]
    time.sleep(0.7)
    assert not any(rank.ended.is_set() for rank in ranks)
    began = time.monotonic()
    ranks[stopped].stop()
    said = f"rank {stopped} has not answered for 0 s: stopped, hung, or cut off"
    assert all_said(left) == [(said, 1, True), (said, 1, False)]
    assert 0.2 < time.monotonic() - began < 1.5


def test_a_slow_rank_is_waited_for_each_time(start):
    """One rank writes the files of all, for longer than collectives wait."""
    ranks = start(3, timeout_seconds=0.2)
    for _ in range(2):
        waiting = [threading.Thread(target=rank.heartbeat.wait_for_all) for rank in ranks]
        for thread in waiting[:2]:
            thread.start()
        time.sleep(0.4)
        assert waiting[0].is_alive()
        assert waiting[1].is_alive()
        waiting[2].start()
        for thread in waiting:
            thread.join(1)
            assert not thread.is_alive()
    assert all_said(ranks, 0) == [None] * 3


def test_one_that_answers_but_never_comes_is_named(start):
    """Ranks that wait for different things would wait for ever."""
    ranks = start(3, timeout_seconds=0.05)
    for rank in ranks[:2]:
        threading.Thread(target=rank.heartbeat.wait_for_all, daemon=True).start()
    said = "rank 2 answers, but did not come to where the others wait within 1 s"
    assert [text for text, *_ in all_said(ranks)] == [said] * 3


def test_a_failure_ends_all_and_its_rank_speaks(start):
    """Over NCCL a collective raises nothing when a rank is gone. The first cause counts: others
    follow from it.
    """
    ranks = start(3)
    ranks[2].report("MemoryError: no room", 1, 2)
    ranks[1].report("lost its connection", 1, 1)
    said = "rank 2: MemoryError: no room"
    assert all_said(ranks) == [(said, 1, False), (said, 1, False), (said, 1, True)]


@pytest.mark.parametrize(
    ("refusing", "said"),
    [
        ([1], "rank 1: chats.jsonl is missing"),
        ([0, 1], "ranks 0-1: chats.jsonl is missing"),
        ([0, 1, 2], "chats.jsonl is missing"),
    ],
)
def test_data_that_some_ranks_refuse_are_the_line_of_all(start, refusing, said):
    """The others waited at their rendezvous, and ended in a traceback that said nothing of it."""
    ranks = start(3)
    for number in refusing:
        ranks[number].report("chats.jsonl is missing", 2, number)
    found = all_said(ranks)
    assert [(text, status) for text, status, _ in found] == [(said, 2)] * 3
    speaker = 0 if len(refusing) == 3 else refusing[0]
    assert [speaks for *_, speaks in found] == [number == speaker for number in range(3)]


def test_what_all_ranks_agree_on_waits_for_each(start):
    """Each of them may still have files to close. Status and line are those of all."""
    ranks = start(3)
    for rank in ranks[1:]:
        rank.report("bore is wide", 2, None)
    assert all_said(ranks, 0.15) == [None] * 3
    ranks[0].report("bore is wide", 2, None)
    assert all_said(ranks, 0.2)[0] == ("bore is wide", 2, True)


def test_questions_are_answered_each_time(start):
    """A launcher sends SIGTERM when a rank has died, and when a run is to stop: then all save."""
    ranks = start(3)
    for _ in range(3):
        ranks[1].heartbeat.check_all_answer()
    ranks[2].stop()
    ranks[1].heartbeat.check_all_answer(lambda: True)  # all have agreed to stop meanwhile
    assert all_said(ranks[:2], 0) == [None] * 2
    threading.Thread(target=ranks[1].heartbeat.check_all_answer, daemon=True).start()
    assert "rank 2 has not answered" in all_said(ranks[:2])[0][0]


def test_a_rank_that_never_came_is_named(start):
    """One that was not started, or died while it imported."""
    ranks = start(3, absent=[2])
    threading.Thread(target=ranks[0].heartbeat.check_all_answer, daemon=True).start()
    assert [text for text, *_ in all_said(ranks)] == [
        "rank 2 did not come: not started, or ended at its start"
    ] * 2


def test_a_stopped_first_rank_is_named_after_a_question(start):
    """It cannot answer for the others; a launcher kills all of them 30 seconds after SIGTERM."""
    ranks = start(2)
    ranks[0].stop()
    ranks[1].heartbeat._connection.send = lambda **_: None
    began = time.monotonic()
    with pytest.raises(SystemExit):
        ranks[1].heartbeat.check_all_answer()
    assert time.monotonic() - began < 2
    assert ranks[1].said == ("rank 0 has not answered for 0 s: stopped, hung, or cut off", 1, True)


def test_others_that_connect_are_ignored(start):
    """A port scanner, or a rank of another run, would count as a rank that dies."""
    ranks = start(2)
    port = ranks[0].heartbeat._hub._listener.getsockname()[1]
    for sent in (
        b"",
        b"GET / HTTP/1.1\r\n\r\n",
        b'{"token": "x", "rank": 1}\n{"over": 1}\n',
        b"[]\n",
    ):
        with socket.create_connection(("127.0.0.1", port)) as stranger:
            stranger.sendall(sent)
            time.sleep(0.05)
    ranks[1].heartbeat.check_all_answer()
    assert all_said(ranks, 0.3) == [None] * 2
    with pytest.raises(ValueError, match=r"rank 3 cannot reach rank 0 at port 9 \(127.0.0.1: "):
        connect(3, ["127.0.0.1"], 9)


def test_a_run_that_went_well_ends_without_a_word(start):
    """The end of one rank's process would be a death to the others, which still print."""
    ranks = start(3)
    ranks[1].heartbeat.close()
    for rank in ranks:
        rank.heartbeat._thread.join(1)
        assert not rank.heartbeat._thread.is_alive()
    assert all_said(ranks, 0.3) == [None] * 3


def dies_beside_a_worker(store_file, ready):
    """Rank 1 of two, with a data worker that outlives it."""
    store = dist.FileStore(store_file, 2)
    Heartbeat(1, 2, 60.0, store, lambda *_: None, os._exit)
    if os.fork() == 0:
        time.sleep(3)
        os._exit(0)
    ready.wait(5)
    os._exit(0)


def test_a_data_worker_does_not_keep_its_rank_alive(start, tmp_path):
    """It has inherited the connection, whose end would come with its own."""
    ready = multiprocessing.get_context("fork").Event()
    child = multiprocessing.get_context("fork").Process(
        target=dies_beside_a_worker, args=(str(tmp_path / "store"), ready)
    )
    child.start()
    rank = Rank(0, 2, 60.0, dist.FileStore(str(tmp_path / "store"), 2))
    while 1 not in rank.heartbeat._hub._connections:
        time.sleep(0.01)
    ready.set()
    assert "rank 1 is gone" in all_said([rank], 1.5)[0][0]
    child.join()


def test_time_in_which_this_process_is_stopped_is_not_silence_of_others():
    """A scheduler suspends a job for an hour, and each rank would blame the others for it."""
    clock = Clock(600.0)
    assert (clock.period, clock.patience) == (5.0, 450.0)
    assert clock.tick()[1] == 0
    clock._last -= 3600
    assert clock.tick()[1] == pytest.approx(3590, abs=1)
    assert clock.tick()[1] == 0


def test_ranks_are_written_as_ranges():
    assert ranks_text([2]) == "rank 2"
    assert ranks_text([1, 2, 3, 6]) == "ranks 1-3, 6"
