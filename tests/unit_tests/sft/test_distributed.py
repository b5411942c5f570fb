"""The groups of a run."""

import os
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
