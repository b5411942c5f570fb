"""mcore. Experts: what megatron-core gets wrong is mended from outside.

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

import zlib
from functools import partial
from typing import Any

import torch
from megatron.core.tensor_parallel.layers import (
    RowParallelLinear,
    set_tensor_model_parallel_attributes,
)
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.transformer_layer import TransformerLayer
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


def draw_own_experts(model: torch.nn.Module, seed: int) -> None:
    """Draws the experts of expert-parallel ranks above 0 again, from generators of their own.

    On a CPU megatron-core draws weights from one generator with one seed on all ranks, so that
    tensor-parallel shards fit together, and experts too: with two ranks, experts 0 and 2 of four
    are the same bits. Rank 0 keeps its experts.
    """
    for name, layer in model.named_modules():
        number = getattr(layer, "layer_number", None)
        for part, experts in layer.named_modules() if isinstance(layer, TransformerLayer) else ():
            if not isinstance(experts, SequentialMLP) or experts.ep_group.rank() == 0:
                continue
            config = experts.config
            starts = {
                "linear_fc1": config.init_method,
                "linear_fc2": config.output_layer_init_method,
            }
            for place, weight in experts.named_parameters():
                if not place.endswith(".weight"):
                    continue
                key = f"{seed} {experts.ep_group.rank()} {number} {name} {part} {place}"
                with torch.random.fork_rng(devices=[]), torch.no_grad():
                    torch.manual_seed(zlib.crc32(key.encode()))
                    starts[place.split(".")[-2]](weight)


def share_whole(model: torch.nn.Module) -> None:
    """Gives the one expert of a token the whole share where sigmoids are to be normalised over the
    chosen experts (no `moe_router_pre_softmax`), which megatron-core leaves out for one.
    """
    for module in model.modules():
        if isinstance(module, TopKRouter) and (
            module.config.moe_router_topk == 1
            and module.config.moe_router_score_function == "sigmoid"
            and not module.config.moe_router_pre_softmax
        ):
            module.routing = partial(_whole_shares, module.routing, module.config)  # type: ignore[method-assign]


def _whole_shares(routing: Any, config: Any, *arguments: Any, **options: Any) -> Any:
    shares, routing_map = routing(*arguments, **options)
    # Divided, not replaced: losses of the router hang on the shares.
    whole = shares / (shares.sum(-1, keepdim=True) + 1e-20)
    return whole * (config.moe_router_topk_scaling_factor or 1.0), routing_map


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
