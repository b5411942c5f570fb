"""What a rank says when it ends after a failure of its own, or after one of another rank."""

import json
import multiprocessing
import os
import sys
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from megatron.sft import peers
from megatron.sft.agreement import AgreedError


@pytest.fixture
def ends(monkeypatch, tmp_path):
    """The first of two ranks, whose other does not answer; calls return (status, what torchrun is
    told).
    """
    monkeypatch.setattr("sys.argv", ["pretrain_sft.py"])
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    monkeypatch.setattr(peers, "ANSWER_SECONDS", 0.3)
    store = dist.HashStore()
    rank: Any = SimpleNamespace(
        _rank=0, _world_size=2, _store=store, store=store, _ending=threading.Lock()
    )
    rank._missing = lambda call: peers.Peers._missing(rank, call)
    rank._end = lambda cause: peers.Peers._end(rank, cause)

    def end(failure):
        def leave(status):
            raise SystemExit(status)

        monkeypatch.setattr(os, "_exit", leave)
        with pytest.raises(SystemExit) as done:
            peers.Peers.abort(rank, failure)
        return done.value.code, json.loads((tmp_path / "error.json").read_text())["message"][
            "message"
        ]

    return rank, end


def test_a_failure_of_its_own_is_told_with_its_rank(ends, capsys):
    """Which of a hundred ranks failed, and of what, is lost among a hundred tracebacks of those
    that lost it.
    """
    rank, end = ends
    told = "pretrain_sft.py: error: rank 0: MemoryError: no room"
    assert end(MemoryError("no room")) == (1, told)
    assert told in capsys.readouterr().err.splitlines()
    assert rank.store.get("cause") == b"0 rank 0: MemoryError: no room"


def test_what_another_rank_told_comes_first(ends, capsys):
    """A connection that was closed is the effect; the cause is what the other rank said before it
    left.
    """
    rank, end = ends
    rank.store.set("cause", "1 rank 1: MemoryError: no room")
    told = "pretrain_sft.py: error: rank 1: MemoryError: no room"
    assert end(RuntimeError("[third_party/gloo/pair.cc:5] Connection closed by peer")) == (1, told)
    assert capsys.readouterr().err == ""


@pytest.mark.slow
def test_a_rank_that_does_not_answer_is_named(ends, capsys):
    """One that was killed says nothing itself."""
    rank, end = ends
    rank.store.set("lost 0", "")
    told = "pretrain_sft.py: error: rank 1 does not answer any more: killed, stopped, or cut off"
    assert end(RuntimeError("[third_party/gloo/pair.cc:5] Connection closed by peer")) == (1, told)
    assert capsys.readouterr().err == told + "\n"


def test_all_that_answer_are_told_apart_from_those_that_are_gone(ends):
    """A timeout where nobody is gone would be blamed on a rank that works."""
    rank, end = ends
    for number in (0, 1):
        rank.store.set(f"lost {number}", "")
    status, told = end(RuntimeError("gloo: Timed out waiting 9000ms"))
    assert status == 1
    assert "rank 0: RuntimeError: gloo: Timed out" in told
    assert told.endswith("all ranks answer, so one of them came too late")


def test_a_failure_of_nccl_alone_says_nothing_of_time(ends):
    """Out of memory in NCCL's own setup: another rank would be looked for that came too late."""
    rank, end = ends
    for number in (0, 1):
        rank.store.set(f"lost {number}", "")
    _, told = end(dist.DistBackendError("NCCL error: Cuda failure 2 'out of memory'"))
    assert told.endswith("rank 0: DistBackendError: NCCL error: Cuda failure 2 'out of memory'")


def test_before_there_are_peers_the_rank_and_kind_are_told(monkeypatch, capsys):
    """An unexpected error of one rank at the start: torchrun's summary would have no word of it."""
    monkeypatch.setattr("sys.argv", ["pretrain_sft.py"])
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(SystemExit) as done:
        peers.abort(OSError("no such disk"), None)
    assert done.value.code == 2
    assert "error: rank 3: OSError: no such disk" in capsys.readouterr().err


@pytest.mark.parametrize("rank", [0, 1])
def test_what_all_ranks_have_is_told_once(rank, monkeypatch, capsys):
    """torchrun's summary is of the rank that ends first: it must be the one that told."""

    def leave(status):
        raise SystemExit(status)

    slept: list[float] = []
    monkeypatch.setattr("time.sleep", slept.append)
    monkeypatch.setattr(os, "_exit", leave)
    monkeypatch.setenv("LOCAL_RANK", str(rank))
    with pytest.raises(SystemExit) as done:
        peers.abort(AgreedError("bore is wide"), None)
    assert done.value.code == 2
    assert slept == [1] * rank
    assert ("error: bore is wide" in capsys.readouterr().err) == (rank == 0)


def test_threads_of_all_ranks_end_with_the_run(monkeypatch):
    """Rank 0 keeps the store where no launcher does: it aborted at times, after a run that went
    well, as its interpreter ended while its thread was in there.
    """
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    ranks = []
    for number in range(2):
        monkeypatch.setattr(dist, "get_rank", lambda number=number: number)
        ranks.append(peers.Peers(store))
    assert all(rank._thread.is_alive() for rank in ranks)
    ranks[0].close()
    assert not ranks[0]._thread.is_alive()
    ranks[1]._thread.join(5)
    assert not ranks[1]._thread.is_alive()


def waits_as_over_nccl(port, rank, folder):
    """A rank whose collective never ends; rank 1 of two fails."""
    os.environ.update(RANK=str(rank), WORLD_SIZE="2", LOCAL_RANK=str(rank))
    sys.stderr = (folder / f"rank{rank}").open("w")
    store = dist.TCPStore("127.0.0.1", port, wait_for_workers=False)
    group: Any = peers.dist
    group.get_rank, group.get_world_size = lambda: rank, lambda: 2
    ours = peers.Peers(store)
    time.sleep(0.5)
    if rank == 1:
        ours.abort(MemoryError("no room"))
    time.sleep(60)


@pytest.mark.slow
@pytest.mark.parametrize("store_is_lost", [False, True])
def test_a_rank_ends_whose_collective_raises_nothing(tmp_path, store_is_lost, monkeypatch):
    """Over NCCL a rank waited for the dead one until the timeout, on a node that no launcher
    ends, and did not learn why.
    """
    monkeypatch.delenv("TORCHELASTIC_ERROR_FILE", raising=False)
    monkeypatch.setattr(peers, "ANSWER_SECONDS", 0.5)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    context = multiprocessing.get_context("fork")
    ranks = [
        context.Process(target=waits_as_over_nccl, args=(store.port, rank, tmp_path))
        for rank in range(1 if store_is_lost else 2)
    ]
    start = time.monotonic()
    for rank in ranks:
        rank.start()
    if store_is_lost:
        time.sleep(1)
        del store
    for rank in ranks:
        rank.join(10)
        rank.kill()
    assert time.monotonic() - start < 10
    assert [rank.exitcode for rank in ranks] == [1] * len(ranks)
    told = "rank 0 does not answer any more" if store_is_lost else "MemoryError: no room"
    assert told in (tmp_path / f"rank{len(ranks) - 1}").read_text()
