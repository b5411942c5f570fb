"""The groups of a run."""

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
        found = {group.group_desc: group._get_backend(torch.device("cpu")).options._timeout for group in groups}
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()
    assert {"TENSOR_MODEL_PARALLEL_GROUP", "DATA_PARALLEL_GROUP", "EXPERT_DATA_PARALLEL_GROUP_GLOO"} <= set(found)
    assert set(found.values()) == {timeout}, found


def test_deterministic_mode_is_told_to_all_that_compute(monkeypatch):
    """One library that goes on as it likes, and no two runs on GPUs are the same."""
    from megatron.sft import distributed

    monkeypatch.setattr(distributed.os, "environ", {"NCCL_ALGO": "Tree"})
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    try:
        distributed._compute_in_one_order()
        assert torch.are_deterministic_algorithms_enabled()
    finally:
        torch.use_deterministic_algorithms(False)
    assert distributed.os.environ["NVTE_ALLOW_NONDETERMINISTIC_ALGO"] == "0"
    assert {"CUBLAS_WORKSPACE_CONFIG", "NCCL_ALGO"} <= distributed.os.environ.keys()
