"""mcore. A model's options as fields of megatron-core's config: what training builds, `calibrate`
measures.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from functools import partial
from typing import Any

import torch
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.nn.functional import gelu, silu

from megatron.packing.layers import options_of_each_layer
from megatron.packing.model.get_batch import transformer_engine_installed
from megatron.packing.model.options import Architecture


def architecture(options: Architecture) -> dict[str, Any]:
    """Returns the arguments of `TransformerConfig` that `options` stand for; nothing of the layout.

    An option that TransformerConfig has under the same name is passed on as it is; the others are
    written out.
    """
    known = {field.name for field in fields(TransformerConfig)}
    recomputes_layers = options.recompute_granularity == "full"
    return {
        **{
            field.name: getattr(options, field.name)
            for field in fields(options)
            if field.name in known
        },
        **{
            name: list(getattr(options, name)) or None
            for name in options_of_each_layer(options)
            if name in known
        },
        "ffn_hidden_size": options.resolved_ffn_hidden_size,
        "kv_channels": options.resolved_kv_channels,
        "gated_linear_unit": options.is_gated,
        "activation_func": _activation_func(options),
        "bias_activation_fusion": False,
        "add_bias_linear": not options.disable_bias_linear,
        "layernorm_zero_centered_gamma": options.apply_layernorm_1p,
        "num_moe_experts": options.num_experts,
        "moe_router_pre_softmax": options.moe_router_pre_softmax or options.moe_router_topk == 1,
        "moe_layer_freq": list(options.moe_layer_freq) if 0 in options.moe_layer_freq else 1,
        "window_size": options.window_size or None,
        "moe_router_bias_update_rate": 0.0,  # transformers never moves it; 1e-3 would, every step
        # megatron-core demands it of variable lengths, of dense models too
        "moe_token_dispatcher_type": "alltoall",
        "recompute_modules": list(options.recompute_modules),
        "recompute_method": "uniform" if recomputes_layers else None,
        "recompute_num_layers": 1 if recomputes_layers else None,
        "calculate_per_token_loss": True,
        "gradient_accumulation_fusion": False,
        "masked_softmax_fusion": False,
        "apply_rope_fusion": transformer_engine_installed()
        and options.position_embedding_type == "rope"
        and not options.rotary_interleaved,
    }


def _activation_func(options: Architecture) -> Callable[[Tensor], Tensor]:
    if options.geglu:
        return partial(gelu, approximate="tanh")
    if options.quick_geglu:
        return quick_gelu
    return silu if options.swiglu else gelu


def quick_gelu(x: Tensor) -> Tensor:
    """Returns x * sigmoid(1.702 x); megatron-core's own compiles itself, for 20 s on a CPU."""
    return x * torch.sigmoid(1.702 * x)
