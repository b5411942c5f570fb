"""The groups of a run."""

import contextlib
import os
import socket
import threading
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from megatron.packing.device import Device
from megatron.sft.agreement import AgreedError
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


@pytest.mark.parametrize(
    ("flags", "capability", "chosen", "expected"),
    [
        ("--tensor-model-parallel-size 2", 9, None, "1"),
        ("--context-parallel-size 2", 8, None, "1"),
        ("--tensor-model-parallel-size 2", 9, "8", "8"),  # as the user chose
        ("--tensor-model-parallel-size 2", 10, None, None),
        ("--tensor-model-parallel-size 2", 0, None, None),
        ("--pipeline-model-parallel-size 2", 9, None, None),
    ],
)
def test_launches_keep_their_order_where_collectives_hide(
    monkeypatch, flags, capability, chosen, expected
):
    """Collectives of tensor parallel ranks would run after the products that hide them, and
    megatron-core's warning is hidden. It must be set before the device is used.
    """
    from megatron.sft import distributed

    class Driver:
        """The calls of NVML."""

        nvmlInit_v2 = staticmethod(lambda: 0)
        nvmlDeviceGetHandleByIndex_v2 = staticmethod(lambda _, gpu: 0)

        @staticmethod
        def nvmlDeviceGetCudaComputeCapability(gpu, major, minor):
            major._obj.value = capability

    def device():
        found.append(os.environ.get(name))
        raise InterruptedError

    name = "CUDA_DEVICE_MAX_CONNECTIONS"
    found: list[str | None] = []
    monkeypatch.setenv(name, chosen or "")
    if chosen is None:
        monkeypatch.delenv(name)
    monkeypatch.setattr("ctypes.CDLL", {"libnvidia-ml.so.1": Driver}.__getitem__)
    monkeypatch.setattr(distributed, "_device", device)
    with pytest.raises(InterruptedError), distributed.process_groups(parse(flags, world_size=2)):
        pass
    assert found == [expected]


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


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_a_taken_port_ends_every_rank(monkeypatch, taken_port, rank):
    """Without a launcher rank 0 ended with a traceback, and the others waited for ever."""
    from megatron.sft import distributed

    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(taken_port))
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    monkeypatch.setattr(distributed, "_ANSWER_SECONDS", 2.0)
    with pytest.raises(ValueError, match=rf"at port {taken_port} of 127.*set another MASTER_PORT"):
        distributed.meet(rank, 2, timedelta(minutes=10))


def test_a_wrong_port_and_an_absent_first_rank_are_named(monkeypatch):
    from megatron.sft import distributed

    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "http")
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    with pytest.raises(
        ValueError, match=r"MASTER_PORT must be the number of a port, but is 'http'"
    ):
        distributed.meet(1, 2, timedelta(seconds=1))
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        monkeypatch.setenv("MASTER_PORT", str(unused.getsockname()[1]))
        with pytest.raises(ValueError, match=r"rank 0 does not listen at port .* start it"):
            distributed.meet(1, 2, timedelta(seconds=0.3))


@pytest.mark.parametrize(
    ("num_visible", "local_rank", "index"), [(8, "3", 3), (1, "3", 0), (1, None, 0), (8, None, 0)]
)
def test_a_process_that_sees_one_gpu_takes_it(monkeypatch, num_visible, local_rank, index):
    """`srun --gpus-per-task=1` and Ray show each process its own GPU alone, as number 0."""
    from megatron.sft import distributed

    monkeypatch.delenv("LOCAL_RANK", raising=False)
    if local_rank is not None:
        monkeypatch.setenv("LOCAL_RANK", local_rank)
    taken: list[int] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: num_visible)
    monkeypatch.setattr(torch.cuda, "set_device", taken.append)
    assert distributed._device() == Device("cuda", index)
    assert taken == [index]


def test_more_processes_than_gpus_are_named(monkeypatch):
    from megatron.sft import distributed

    monkeypatch.setenv("LOCAL_RANK", "4")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    with pytest.raises(ValueError, match=r"local rank 4 has no GPU: .* --nproc-per-node 4"):
        distributed._device()


@pytest.mark.parametrize(
    ("gpus", "fault"),
    [
        (["a", "b", "c"], None),
        (["-", "-", "-"], None),
        (["a", "b", "a"], r"^ranks 0 and 2 have the same GPU \(a\); .* set LOCAL_RANK"),
        (["a", "-", "c"], r"^rank 1 finds no GPU, but others do; see nvidia-smi"),
        (["-", "b", "c"], r"^rank 0 finds no GPU, but others do"),
    ],
)
def test_each_rank_has_a_gpu_of_its_own(monkeypatch, gpus, fault):
    """NCCL says "Duplicate GPU detected" of ranks without a LOCAL_RANK, which all take GPU 0; a
    rank without a GPU would wait over gloo for those that wait over NCCL.
    """
    from megatron.sft import distributed

    store = dist.HashStore()
    for rank in (1, 2):
        store.set(f"gpu {rank}", gpus[rank])
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda _: SimpleNamespace(uuid=gpus[0])
    )
    device = Device("cpu") if gpus[0] == "-" else Device("cuda", 0)
    with pytest.raises(AgreedError, match=fault) if fault else contextlib.nullcontext():
        distributed._check_gpus(device, 0, 3, store)
    assert store.get("gpu 0").decode() == gpus[0]
