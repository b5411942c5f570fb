"""mcore. Lets each rank load the optimizer's state of the parameters that it updates, and no other.

megatron-core's sharded optimizer asks on every rank for the state of the whole model part, to throw
most of it away: 12 bytes of host memory per parameter, once for each rank of a machine.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

from megatron.sft.options.optimizer import ADAM_STATE

_KINDS = ("param", *ADAM_STATE)


@contextmanager
def own_state_alone(optimizer: Any) -> Iterator[None]:
    """Context in which `optimizer.sharded_state_dict(is_loading=True)` asks for this rank's state
    alone. Loading it again needs no more.
    """
    parts = [
        part
        for part in getattr(optimizer, "chained_optimizers", [optimizer])
        if isinstance(part, DistributedOptimizer)
    ]
    for part in parts:
        _ask_for_own(part)
    try:
        yield
    finally:
        for part in parts:
            del part.get_parameter_state_dp_zero, part.sharded_param_state_fully_reshardable


def _ask_for_own(part: Any) -> None:
    plain = part.sharded_param_state_fully_reshardable

    def without_memory(**_: Any) -> dict[int, dict[Any, dict[str, torch.Tensor]]]:
        return {
            number: {
                dtype: {
                    kind: torch.empty(part.buffers[number].numel_unpadded, device="meta")
                    for kind in _KINDS
                }
                for dtype in ranges
            }
            for number, ranges in enumerate(part.gbuf_ranges)
        }

    def of_own(*arguments: Any, **options: Any) -> dict[int, dict[str, Any]]:
        # Numbered by parameter, in the order of the buffers.
        asked = plain(*arguments, **options)
        for number, parameter in enumerate(
            parameter for buffer in part.buffers for parameter in buffer.param_index_map
        ):
            if parameter not in part.model_param_gbuf_map:
                del asked[number]
                continue
            for entry in asked[number].values():
                entry.data = torch.empty_like(entry.data, device="cpu")
        return asked

    part.get_parameter_state_dp_zero = without_memory
    part.sharded_param_state_fully_reshardable = of_own
