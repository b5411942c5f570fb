"""mcore. Bytes on the host of what a run writes; on the device it takes none beside.

Described, not run: in a fake world the device and the host are both the CPU. Each rank writes its
share of a checkpoint: the ranges of a sharded optimizer that it updates, and an equal part of what
data-parallel replicas have alike (see `checkpoints.shares`). One tensor at a time is copied to the
host, with --async-save all of the share at once. The first replica writes --save-hf, each stage and
each expert-parallel rank its part: one parameter at a time (see `huggingface.gather`).
"""

from __future__ import annotations

from typing import Any, NamedTuple

from megatron.core import parallel_state
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.utils import unwrap_model
from torch import Tensor

from megatron.packing.model.names import layer_prefix
from megatron.sft.model.build import Training
from megatron.sft.options.optimizer import ADAM_STATE

_FLOAT32 = 4
_STATES = 1 + len(ADAM_STATE)
"""Tensors of each weight, its main parameter among them."""


class SaveBytes(NamedTuple):
    """Bytes on the host of a rank that writes."""

    checkpoint: int
    """While a checkpoint is written before training goes on."""
    in_background: int
    """With --async-save, until the checkpoint is written."""
    huggingface: int
    """While --save-hf is written."""


def save_bytes(training: Training) -> SaveBytes:
    """Returns the bytes on the host of the rank that `training` is of.

    Pretrained weights take nothing on the device when they are read: they are copied into the model
    block by block.
    """
    parameters = [p for chunk in training.model for p in chunk.parameters()]
    share = sum(p.nbytes // _num_replicas(p) for p in parameters)
    largest = max((p.nbytes for p in parameters), default=0)
    converted = 0
    optimizer: Any = training.optimizer
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        if isinstance(part, DistributedOptimizer):
            sizes = [
                places["param"].size
                for ranges in part.gbuf_ranges
                for buckets in ranges.values()
                for bucket in buckets
                for places in bucket["param_map"].values()
            ]
            share += _FLOAT32 * _STATES * sum(sizes)
            largest = max(largest, _FLOAT32 * max(sizes, default=0))
            if part.config.use_precision_aware_optimizer_no_fp8_or_ds_fp8:
                # States in other types are written in float32, into which all are converted first.
                converted += _FLOAT32 * _STATES * sum(sizes)
        else:
            tensors = [p for group in part.optimizer.param_groups for p in group["params"]]
            for state in part.optimizer.state.values():
                tensors += [value for value in state.values() if isinstance(value, Tensor)]
            share += sum(tensor.nbytes for tensor in tensors) // _num_replicas(None)
            largest = max([largest, *(tensor.nbytes for tensor in tensors)])
    return SaveBytes(max(largest, converted), max(share, converted), _huggingface_bytes(training))


def _huggingface_bytes(training: Training) -> int:
    """Returns the bytes of two copies of the largest parameter, whole over tensor parallel: the
    tensors that it is made of, and those it is put together from. Of a layer's experts, which a
    folder may hold in one stack, those of all ranks count as one.
    """
    sizes: dict[str, int] = {}
    for number, chunk in enumerate(training.model):
        for name, parameter in unwrap_model(chunk).named_parameters():
            size = parameter.nbytes * parallel_state.get_tensor_model_parallel_world_size()
            if not getattr(parameter, "allreduce", True):
                size = parameter.nbytes * parallel_state.get_expert_model_parallel_world_size()
                name = layer_prefix(name) or name
            key = f"{number}.{name}"
            sizes[key] = sizes.get(key, 0) + size
    return 2 * max(sizes.values(), default=0)


def _num_replicas(parameter: Tensor | None) -> int:
    if getattr(parameter, "allreduce", True):
        return parallel_state.get_data_parallel_world_size(with_context_parallel=True)
    return parallel_state.get_expert_data_parallel_world_size()
