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
