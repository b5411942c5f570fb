"""mcore. Bytes that a checkpoint takes on the host while it is made; on the device it takes none.

Described, not run: in a fake world the device and the host are both the CPU. Of a sharded optimizer
one rank of each data-parallel group gathers the whole state of its weights, bucket by bucket over
gloo (`DistributedOptimizer.get_parameter_state_dp_zero`). A bucket is all weights of the rank,
unless --overlap-grad-reduce cuts them into buckets of 40 million.
"""

from __future__ import annotations

from typing import Any

from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch import Tensor

from megatron.sft.model.build import Training
from megatron.sft.options.optimizer import ADAM_STATE

_FLOAT32 = 4
_STATES = 1 + len(ADAM_STATE)
"""Tensors of each weight, its main parameter among them."""


def save_bytes(training: Training) -> int:
    """Returns the bytes on the host of the rank that writes: the state of all its weights, buffers
    of a bucket, and a copy of the weights.

    Pretrained weights take nothing on the device when they are read: they are copied into the model
    block by block.
    """
    optimizer: Any = training.optimizer
    host = buckets = 0
    for one in getattr(optimizer, "chained_optimizers", [optimizer]):
        if not isinstance(one, DistributedOptimizer):
            tensors = [p for group in one.optimizer.param_groups for p in group["params"]]
            for state in one.optimizer.state.values():
                tensors += [value for value in state.values() if isinstance(value, Tensor)]
            host += sum(tensor.nbytes for tensor in tensors)
            continue
        replicas = one.data_parallel_group.size()
        for buffer in one.buffers:
            host += _FLOAT32 * _STATES * buffer.numel_unpadded
            for bucket in buffer.buckets:
                size = bucket.grad_data.numel()
                # Shards of all states; the gathered bucket in parts, in one, and the one before.
                buckets = max(buckets, _FLOAT32 * (_STATES * (size // replicas) + 3 * size))
    weights = sum(p.nbytes for chunk in training.model for p in chunk.parameters())
    return host + buckets + weights
