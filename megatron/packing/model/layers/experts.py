"""mcore. Experts with biases: what megatron-core's own add gets wrong is mended from outside.

Four things stand in the way of biases:

- an expert adds the bias of its second layer in place onto a view, which the backward pass refuses;
- under sequence parallel that bias is marked as one whose gradient is summed over tensor parallel,
  as if these ranks had the same expert for different tokens. They have other experts, or (with one
  expert-parallel rank) are summed with all data-parallel ranks already;
- the norm of all gradients counts that bias on the first tensor-parallel rank alone, for the same
  reason, and clips too little;
- biases cut over tensor parallel would be added once per rank, so experts must be whole on each
  rank: `expert_tensor_parallel_size` 1.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.tensor_parallel.layers import (
    RowParallelLinear,
    set_tensor_model_parallel_attributes,
)
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.moe.experts import SequentialMLP
from torch import Tensor


def mend_expert_biases(model: torch.nn.Module) -> None:
    """Mends every expert of `model` that has biases; before it is wrapped for data parallel.

    Costs a copy of the output of each expert's second layer.
    """
    for name, module in model.named_modules():
        if not isinstance(module, MLP) or ".local_experts." not in f".{name}.":
            continue
        if module.linear_fc2.bias is None:
            continue
        if (module.config.expert_tensor_parallel_size or 1) > 1:
            raise ValueError("experts with biases need expert_tensor_parallel_size=1; set it")
        module.linear_fc2.register_forward_hook(_copied)
        for layer in (module.linear_fc1, module.linear_fc2):
            layer.bias.sequence_parallel = False
        if not hasattr(module.linear_fc2.bias, "tensor_model_parallel"):
            set_tensor_model_parallel_attributes(module.linear_fc2.bias, True, 0, 1)


def needs_mending(module: torch.nn.Module) -> bool:
    """Returns whether `module` has plain experts with biases that `mend_expert_biases` must see.

    Experts that run together (`group_experts`) add their biases otherwise, so that only the mark
    for sequence parallel is wrong.
    """
    if not isinstance(module, SequentialMLP):
        return False
    layers: list[Any] = [expert.linear_fc2 for expert in module.local_experts]
    return any(
        isinstance(layer, RowParallelLinear)
        and layer.bias is not None
        and _copied not in layer._forward_hooks.values()
        and (type(module) is SequentialMLP or layer.bias.sequence_parallel)
        for layer in layers
    )


def _copied(layer: object, inputs: object, output: tuple[Tensor, Any]) -> tuple[Tensor, Any]:
    return output[0].clone(), output[1]
