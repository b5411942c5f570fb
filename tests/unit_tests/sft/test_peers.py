"""What a rank reports when it ends after a failure of its own, or after one of another rank."""

import os
import threading
from typing import Any

import pytest
import torch.distributed as dist

from megatron.sft import peers
from megatron.sft.agreement import AgreedError
from megatron.sft.heartbeat.cause import Cause


class Answering:
    """A heartbeat of ranks that all answer."""

    def __init__(self):
        self.num_questions = 0
        self.excuses: list[bool] = []

    def check_all_answer(self, is_excused=lambda: False):
        self.num_questions += 1
        self.excuses.append(is_excused())

    def end(self, cause):
        raise InterruptedError(cause)


@pytest.fixture
def running(monkeypatch):
    """Rank 1 of two, both of which answer."""
    heartbeat = Answering()
    monkeypatch.setattr(peers, "_running", [heartbeat])
    for seconds in ("GRACE_SECONDS", "ANSWER_SECONDS"):
        monkeypatch.setattr(peers, seconds, 0.0)
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    return heartbeat


def reported(failure):
    with pytest.raises(InterruptedError) as ended:
        peers.abort(failure)
    return ended.value.args[0]


NETWORK = dist.DistNetworkError("Connection reset by peer")
LOST_STORE = "; all ranks answer, so the store at which they met is lost: its host, torchrun"
TIMEOUT = "gloo: Timed out waiting 9000ms"
CLOSED = "gloo: Connection closed by peer [127.0.0.1]:1"
LOST_CONNECTION = "the connection alone was lost"
NCCL = "NCCL error: Cuda failure 2 'out of memory'"


@pytest.mark.parametrize(
    ("failure", "cause", "num_questions", "has_traceback"),
    [
        (MemoryError("no room"), Cause("MemoryError: no room", 1, 1), 0, True),
        (ValueError("x.jsonl:3: bad"), Cause("x.jsonl:3: bad", 2, 1), 0, False),
        (AgreedError("bore is wide"), Cause("bore is wide", 2, None), 0, False),
        (OSError(28, "full", "x"), Cause("OSError: [Errno 28] full: 'x'", 1, 1), 0, False),
        (NETWORK, Cause(f"DistNetworkError: {NETWORK}{LOST_STORE}", 1, 1), 1, False),
        (
            RuntimeError(TIMEOUT),
            Cause(f"RuntimeError: {TIMEOUT}; all ranks answer, so one of them came too late", 1, 1),
            1,
            False,
        ),
        # The other rank closed it, and is about to say why; this one knows nothing of interest.
        (
            RuntimeError(CLOSED),
            Cause(f"RuntimeError: {CLOSED}; all ranks answer, so {LOST_CONNECTION}", 1, 1),
            1,
            False,
        ),
        # Out of memory in NCCL's own setup: another rank would be looked for that came too late.
        (dist.DistBackendError(NCCL), Cause(f"DistBackendError: {NCCL}", 1, 1), 1, True),
    ],
)
def test_a_failure_is_reported_with_its_kind(
    running, capsys, failure, cause, num_questions, has_traceback
):
    """A connection that was closed is the effect: the ranks that are gone are looked for first."""
    assert reported(failure) == cause
    assert running.num_questions == num_questions
    assert (type(failure).__name__ in capsys.readouterr().err) == has_traceback


def test_a_stop_asks_who_answers_unless_all_agree(running):
    """SIGTERM comes when a user stops the run, and from a launcher whose rank has died."""
    agreed = threading.Event()
    peers.end_unless_all_answer(agreed)
    agreed.set()
    peers.end_unless_all_answer(agreed)
    assert running.excuses == [False, True]


@pytest.mark.parametrize("has_file", [False, True])
def test_the_line_is_on_each_terminal_that_torchrun_does_not_serve(
    monkeypatch, capsys, tmp_path, has_file
):
    """Ranks without a launcher may each have a terminal; torchrun's has a line, and its summary."""
    monkeypatch.setattr("sys.argv", ["pretrain_sft.py"])
    monkeypatch.delenv("TORCHELASTIC_ERROR_FILE", raising=False)
    if has_file:
        monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    line = "pretrain_sft.py: error: rank 1 is gone\n"
    for speaks in (True, False):
        peers._report(Cause("rank 1 is gone", 1, 0), speaks)
        assert capsys.readouterr().err == (line if speaks or not has_file else "")
    if has_file:
        assert "rank 1 is gone" in (tmp_path / "error.json").read_text()


def test_before_ranks_are_connected_the_rank_and_kind_are_told(monkeypatch, capsys):
    """An unexpected error of one rank at the start: torchrun's summary would have no word of it."""
    monkeypatch.setattr("sys.argv", ["pretrain_sft.py"])
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(SystemExit) as done:
        peers.abort(OSError("no such disk"))
    assert done.value.code == 2
    assert "error: rank 3: OSError: no such disk" in capsys.readouterr().err


def test_a_first_rank_that_does_not_come_is_named():
    """Others waited for the store's address of it, and ended in a traceback."""
    store: Any = Empty()
    with (
        pytest.raises(ValueError, match=r"rank 1: rank 0 did not come within 0.05 minutes \(wait"),
        peers.heartbeats(1, 2, store, 0.05),
    ):
        pass


class Empty:
    """A store at which rank 0 has left no word."""

    def get(self, key):
        raise dist.DistStoreError("wait timeout")


def test_an_agreed_error_of_a_single_process_is_told_once(monkeypatch, capsys):
    def leave(status):
        raise SystemExit(status)

    monkeypatch.setattr(os, "_exit", leave)
    monkeypatch.setenv("LOCAL_RANK", "0")
    with pytest.raises(SystemExit) as done:
        peers.abort(AgreedError("bore is wide"))
    assert done.value.code == 2
    assert capsys.readouterr().err.count("error: bore is wide") == 1
