"""What a rank reads of a sharded optimizer's state."""

from types import SimpleNamespace
from typing import Any

import torch
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

from megatron.sft.model.checkpoints.content import METADATA
from megatron.sft.model.checkpoints.own_state import own_state_alone


def test_only_the_state_of_own_parameters_is_read() -> None:
    """A machine of eight ranks ran out of memory where it had to continue, as each rank read the
    state of all of them.
    """
    first, second = torch.nn.Parameter(torch.ones(2, 4)), torch.nn.Parameter(torch.ones(4))
    part: Any = DistributedOptimizer.__new__(DistributedOptimizer)
    index = {first: (0, 8, 0), second: (8, 12, 0)}
    part.buffers = [SimpleNamespace(numel_unpadded=12, param_index_map=index)]
    part.gbuf_ranges = [{(torch.bfloat16, torch.float32): []}]
    part.model_param_gbuf_map = {second: (0, torch.bfloat16, 0)}
    model = {
        name: ShardedTensor.from_rank_offsets(name, parameter)
        for name, parameter in (("first", first), ("second", second))
    }
    plain = dict(vars(part))
    with own_state_alone(SimpleNamespace(chained_optimizers=[part, object()])):
        asked = part.sharded_param_state_fully_reshardable(
            model, is_loading=True, metadata=METADATA
        )
    assert list(asked) == [1]
    assert {kind: entry.key for kind, entry in asked[1].items()} == {
        kind: f"optimizer.state.{kind}.second" for kind in ("param", "exp_avg", "exp_avg_sq")
    }
    stored = {entry.data.untyped_storage().data_ptr(): entry.data for entry in asked[1].values()}
    assert [values.untyped_storage().nbytes() for values in stored.values()] == 3 * [16]
    assert all(values.device.type == "cpu" for values in stored.values())
    assert vars(part) == plain
