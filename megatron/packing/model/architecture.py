"""mcore. A model's options as fields of megatron-core's config: what training builds, `calibrate` measures."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch.nn.functional import gelu, silu

from megatron.packing.model.get_batch import transformer_engine_installed
from megatron.packing.model.widths import ffn_hidden_size

_SAME_NAMES = (
    *("num_layers", "hidden_size", "num_attention_heads", "num_query_groups", "kv_channels", "normalization"),
    *("add_qkv_bias", "qk_layernorm", "mtp_num_layers", "recompute_granularity"),
    *("moe_router_topk", "moe_router_pre_softmax", "moe_ffn_hidden_size"),
)


def architecture(options: Any) -> dict[str, Any]:
    """Arguments of `TransformerConfig` that say what is computed for a token, and how; nothing of rates and layout.

    `options` have Megatron's names: `sft.options.model.ModelConfig`, or what `calibrate_options` parsed, which knows
    fewer of them.
    """
    recomputes_layers = options.recompute_granularity == "full"
    geglu = getattr(options, "geglu", False)
    gated = options.swiglu or geglu
    return {
        **{name: getattr(options, name) for name in _SAME_NAMES},
        "ffn_hidden_size": options.ffn_hidden_size or ffn_hidden_size(options.hidden_size, gated),
        "gated_linear_unit": gated,
        "activation_func": silu if options.swiglu else partial(gelu, approximate="tanh") if geglu else gelu,
        "bias_activation_fusion": False,
        "add_bias_linear": not options.disable_bias_linear,
        "layernorm_zero_centered_gamma": getattr(options, "apply_layernorm_1p", False),
        "num_moe_experts": options.num_experts,
        "moe_layer_freq": list(getattr(options, "moe_layer_freq", ())) or 1,
        "moe_shared_expert_intermediate_size": getattr(options, "moe_shared_expert_intermediate_size", None),
        "moe_shared_expert_gate": getattr(options, "moe_shared_expert_gate", False),
        "moe_token_dispatcher_type": "alltoall",  # megatron-core demands it of variable lengths, of dense models too
        "recompute_method": "uniform" if recomputes_layers else None,
        "recompute_num_layers": 1 if recomputes_layers else None,
        "calculate_per_token_loss": True,
        "gradient_accumulation_fusion": False,
        "masked_softmax_fusion": False,
        "apply_rope_fusion": transformer_engine_installed() and options.position_embedding_type == "rope",
    }
