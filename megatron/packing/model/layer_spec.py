"""mcore. Layers of megatron-core that take packed sequences, with Transformer Engine where it is
installed and without.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_decoder_block_spec,
    get_gpt_mtp_block_spec,
)
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.multi_token_prediction import MultiTokenPredictionBlockSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from megatron.core.utils import is_te_min_version

from megatron.packing.model.attention.core_attention import PackedDotProductAttention
from megatron.packing.model.attention.delta_net import GatedDeltaNet
from megatron.packing.model.attention.rotary import PackedSelfAttention
from megatron.packing.model.get_batch import transformer_engine_installed
from megatron.packing.model.layers.norms import TorchNorm
from megatron.packing.model.layers.parts import PLAIN, Parts


def packed_block_spec(
    config: TransformerConfig, vp_stage: int | None = None, parts: Parts = PLAIN
) -> TransformerBlockSubmodules:
    """Returns the `transformer_layer_spec` for GPTModel that takes packs (and plain batches, also
    with context parallel).

    With Transformer Engine on CUDA it is megatron-core's own. Without, megatron-core's local one,
    in which the core attention and the norms are ours, since its own refuse packs, context parallel
    and sequence parallel. In both, rotary embeddings that no kernel fuses are applied to whole
    packs (see `rotary`). What Transformer Engine has no place for makes local layers, too (see
    `need_local_layers`).
    """
    use_transformer_engine = transformer_engine_installed() and not need_local_layers(config, parts)
    asked = copy.copy(config)
    if not use_transformer_engine:  # see `grouped_experts`: its own wants a library for it
        asked.moe_grouped_gemm = False
    spec = get_gpt_decoder_block_spec(
        asked, use_transformer_engine, normalization=config.normalization, vp_stage=vp_stage
    )
    layers = spec.layer_specs
    if not use_transformer_engine:
        layers = [parts.in_layer(_takes_packs(layer), config) for layer in layers]
    first = get_transformer_layer_offset(config, vp_stage)
    layers = [
        _turns_packs(_mixes_linearly(layer, config, number), parts.of_attention(number))
        for number, layer in enumerate(layers, first)
    ]
    if use_transformer_engine:
        return replace(spec, layer_specs=layers)
    return TransformerBlockSubmodules(layer_specs=layers, layer_norm=TorchNorm)


def need_local_layers(config: TransformerConfig, parts: Parts) -> bool:
    """Returns whether layers of Transformer Engine cannot compute the model: parts of ours, gated
    delta nets, windows and sinks over context parallel, and sinks before its release 2.8.
    """
    has_sinks = config.softmax_type != "vanilla"
    is_cut = config.context_parallel_size > 1
    return (
        parts.need_local_layers
        or bool(config.linear_attention_freq)
        or (is_cut and (has_sinks or config.window_size is not None))
        or (has_sinks and not is_te_min_version("2.8.0"))
    )


def packed_mtp_block_spec(
    config: TransformerConfig, block_spec: TransformerBlockSubmodules, vp_stage: int | None = None
) -> MultiTokenPredictionBlockSubmodules | None:
    """Returns the `mtp_block_spec` that goes with `block_spec`; None where this stage predicts no
    further tokens.

    Its layers are of the kind of the last one, which `config` then says in its lists by layer.
    Raises ValueError where that one is a gated delta net.
    """
    if config.mtp_num_layers is None:
        return None
    _list_further_layers(config)
    use_transformer_engine = transformer_engine_installed()
    spec = get_gpt_mtp_block_spec(config, block_spec, use_transformer_engine, vp_stage=vp_stage)
    if spec is None or use_transformer_engine:
        return spec
    norms = {"enorm": TorchNorm, "hnorm": TorchNorm, "layer_norm": TorchNorm}
    layers = [
        replace(layer, submodules=replace(layer.submodules, **norms)) for layer in spec.layer_specs
    ]
    return replace(spec, layer_specs=layers)


def _list_further_layers(config: TransformerConfig) -> None:
    """Adds layers that predict further to the lists by layer, in which they look themselves up."""
    last = config.num_layers - 1
    if config.linear_attention_freq and config.linear_attention_freq[last]:
        raise ValueError(
            "multi-token prediction needs attention in the last layer, as its layers are of the "
            "same kind, but linear_attention_freq puts a gated delta net there; end it in 0"
        )
    for name in ("window_attn_skip_freq", "no_rope_freq"):
        flags = getattr(config, name)
        if isinstance(flags, list):
            # windows 0 1 0 1, and one further layer    ->    0 1 0 1 1
            further = [flags[last]] * config.mtp_num_layers  # type: ignore[operator]
            setattr(config, name, flags[: config.num_layers] + further)


def _takes_packs(layer: ModuleSpec) -> ModuleSpec:
    attention = layer.submodules.self_attention
    parts = attention.submodules
    norms = {
        name: TorchNorm
        for name in ("q_layernorm", "k_layernorm")
        if getattr(parts, name) not in (None, IdentityOp)
    }
    attention = replace(
        attention, submodules=replace(parts, core_attention=PackedDotProductAttention, **norms)
    )
    return replace(
        layer,
        submodules=replace(
            layer.submodules,
            self_attention=attention,
            input_layernorm=TorchNorm,
            pre_mlp_layernorm=TorchNorm,
        ),
    )


def _mixes_linearly(layer: ModuleSpec, config: TransformerConfig, number: int) -> ModuleSpec:
    """Puts a gated delta net in the place of attention where `linear_attention_freq` has a 1."""
    if not config.linear_attention_freq or not config.linear_attention_freq[number]:
        return layer
    net = ModuleSpec(module=GatedDeltaNet)
    return replace(layer, submodules=replace(layer.submodules, self_attention=net))


def _turns_packs(layer: ModuleSpec, arguments: dict[str, Any]) -> ModuleSpec:
    attention = layer.submodules.self_attention
    # Latent attention applies its own rotary embedding, to a part of each head.
    if attention.module is not SelfAttention:
        return layer
    params = {**(attention.params or {}), **arguments}
    turning = replace(attention, module=PackedSelfAttention, params=params)
    return replace(layer, submodules=replace(layer.submodules, self_attention=turning))
