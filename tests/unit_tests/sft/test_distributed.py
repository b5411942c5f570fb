"""The groups of a run."""

import contextlib
import os
import socket
import threading
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from tests.unit_tests.sft.command_line import parse

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


def test_timeout_reaches_every_group():
    """A rank that is gone would be waited for as long as megatron-core likes: 30 minutes."""
    from megatron.core import parallel_state

    from megatron.sft.distributed import make_groups

    timeout = timedelta(minutes=2.5)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)
    try:
        make_groups(parse("--distributed-timeout-minutes 2.5"))
        groups = list(dist.distributed_c10d._world.pg_map)
        found = {
            group.group_desc: group._get_backend(torch.device("cpu")).options._timeout
            for group in groups
        }
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()
    assert {
        "TENSOR_MODEL_PARALLEL_GROUP",
        "DATA_PARALLEL_GROUP",
        "EXPERT_DATA_PARALLEL_GROUP_GLOO",
    } <= set(found)
    assert set(found.values()) == {timeout}, found


def test_deterministic_kernels_are_asked_of_all_libraries(monkeypatch):
    """On a GPU two equal runs would differ in the last bits, and a continued one from what it
    continues.
    """
    from megatron.sft.distributed import use_deterministic_kernels

    for name in ("CUBLAS_WORKSPACE_CONFIG", "NCCL_ALGO", "NVTE_ALLOW_NONDETERMINISTIC_ALGO"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NCCL_ALGO", "Tree")  # as the user chose
    try:
        use_deterministic_kernels()
        assert torch.are_deterministic_algorithms_enabled()
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
        assert os.environ["NVTE_ALLOW_NONDETERMINISTIC_ALGO"] == "0"
        assert os.environ["NCCL_ALGO"] == "Tree"
    finally:
        torch.use_deterministic_algorithms(False)
        for name in ("CUBLAS_WORKSPACE_CONFIG", "NVTE_ALLOW_NONDETERMINISTIC_ALGO"):
            os.environ.pop(name, None)


@pytest.fixture(params=["silent", "web"])
def taken_port(request):
    """A port at which something else listens, which never answers or says what it is."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()

        def answer():
            with contextlib.suppress(OSError):
                while request.param == "web":
                    connection, _ = listening.accept()
                    with connection:
                        connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

        threading.Thread(target=answer, daemon=True).start()
        yield listening.getsockname()[1]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_taken_port_ends_every_rank(monkeypatch, taken_port, rank):
    """Without a launcher rank 0 ended with a traceback, and the others waited for ever."""
    from megatron.sft import distributed

    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(taken_port))
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    monkeypatch.setattr(distributed, "_ANSWER_SECONDS", 2.0)
    with pytest.raises(ValueError, match=rf"at port {taken_port} of 127.*set another MASTER_PORT"):
        distributed._store(rank, 2, timedelta(minutes=10))


def test_a_wrong_port_and_an_absent_first_rank_are_named(monkeypatch):
    from megatron.sft import distributed

    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "http")
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    with pytest.raises(
        ValueError, match=r"MASTER_PORT must be the number of a port, but is 'http'"
    ):
        distributed._store(1, 2, timedelta(seconds=1))
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        monkeypatch.setenv("MASTER_PORT", str(unused.getsockname()[1]))
        with pytest.raises(ValueError, match=r"rank 0 does not listen at port .* start it"):
            distributed._store(1, 2, timedelta(seconds=0.3))
