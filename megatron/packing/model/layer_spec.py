"""mcore. Layers of megatron-core that take packed sequences, with Transformer Engine where it is
installed and without.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
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

from megatron.packing.layers import Part
from megatron.packing.model.activation_options import ActivationOptions
from megatron.packing.model.attention.core_attention import PackedDotProductAttention
from megatron.packing.model.attention.self_attention import PackedSelfAttention
from megatron.packing.model.get_batch import transformer_engine_installed
from megatron.packing.model.layers.branches import branched_experts
from megatron.packing.model.layers.norms import TorchNorm, WholeWidthNorm
from megatron.packing.model.layers.residual import ResidualAdd
from megatron.packing.model.parts import part_in, parts_in
from megatron.packing.model.parts.attention import Engine, is_in_engine


def packed_block_spec(
    config: TransformerConfig,
    vp_stage: int | None = None,
    options: Any = None,
    of_attention: Callable[[int], dict[str, Any]] = lambda number: {},
) -> TransformerBlockSubmodules:
    """Returns the `transformer_layer_spec` for GPTModel that takes packs (and plain batches, also
    with context parallel).

    With Transformer Engine on CUDA it is megatron-core's own. Without, megatron-core's local one,
    in which the core attention and the norms are ours, since its own refuse packs, context parallel
    and sequence parallel. In both, rotary embeddings that no kernel fuses are applied to whole
    packs (see `rotary`). What Transformer Engine has no place for makes local layers, too (see
    `need_local_layers`).

    Args:
        options: the model's `Architecture`, for what megatron-core's config has no field for; None
            for a model without any of that.
        of_attention: function from a layer's number in the whole model to further arguments of its
            `PackedSelfAttention`.
    """
    options = options or config
    use_transformer_engine = transformer_engine_installed() and not need_local_layers(
        config, options
    )
    asked = copy.copy(config)
    if not use_transformer_engine:  # see `grouped_experts`: its own wants a library for it
        asked.moe_grouped_gemm = False
    spec = get_gpt_decoder_block_spec(
        asked, use_transformer_engine, normalization=config.normalization, vp_stage=vp_stage
    )
    layers = spec.layer_specs
    if not use_transformer_engine:
        layers = [_residual_form(_takes_packs(layer, options), config, options) for layer in layers]
    first = get_transformer_layer_offset(config, vp_stage)
    layers = [
        _mixes(layer, part_in(options, number), options, of_attention(number))
        for number, layer in enumerate(layers, first)
    ]
    if use_transformer_engine:
        return replace(spec, layer_specs=layers)
    return TransformerBlockSubmodules(layer_specs=layers, layer_norm=TorchNorm)


def need_local_layers(config: TransformerConfig, options: Any) -> bool:
    """Returns whether layers of Transformer Engine cannot compute the model: their norms are within
    attention's and the MLP's first products, and some of what attention may have is missing.
    """
    has_other_residuals = (
        getattr(options, "norm_position", "before") != "before"
        or getattr(options, "layer_scalar", False)
        or getattr(options, "residual_multiplier", 1.0) != 1.0
    )
    engine = Engine(config.context_parallel_size, is_te_min_version)
    # attributes that megatron-core's config has no field for
    by_groups = getattr(config, "query_groups_per_gather", None) is not None
    is_tiled = ActivationOptions.of(config) != ActivationOptions()
    return (
        has_other_residuals
        or by_groups
        or is_tiled
        or bool(parts_in(options))
        or not is_in_engine(options, engine)
    )


def packed_mtp_block_spec(
    config: TransformerConfig, block_spec: TransformerBlockSubmodules, vp_stage: int | None = None
) -> MultiTokenPredictionBlockSubmodules | None:
    """Returns the `mtp_block_spec` that goes with `block_spec`; None where this stage predicts no
    further tokens.

    Its layers are of the kind of the last one, which `config` then says in its lists by layer.
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
    for name in ("window_attn_skip_freq", "no_rope_freq"):
        flags = getattr(config, name)
        if isinstance(flags, list):
            # windows 0 1 0 1, and one further layer    ->    0 1 0 1 1
            further = [flags[last]] * config.mtp_num_layers  # type: ignore[operator]
            setattr(config, name, flags[: config.num_layers] + further)


def _takes_packs(layer: ModuleSpec, options: Any) -> ModuleSpec:
    """Returns a local layer with norms and a core attention that take packs."""
    attention = layer.submodules.self_attention
    softcap = getattr(options, "attn_logit_softcapping", None)
    inner: dict[str, Any] = {
        "core_attention": PackedDotProductAttention
        if softcap is None
        else ModuleSpec(module=PackedDotProductAttention, params={"softcap": softcap})
    }
    heads = {
        "q_layernorm": options.num_attention_heads,
        "k_layernorm": options.num_query_groups or options.num_attention_heads,
    }
    is_wide = getattr(options, "qk_layernorm_over_heads", False)
    for name, num_heads in heads.items():
        # megatron-core's latent attention has no such norm of keys
        if getattr(attention.submodules, name, None) not in (None, IdentityOp):
            wide = ModuleSpec(module=WholeWidthNorm, params={"num_heads": num_heads})
            inner[name] = wide if is_wide else TorchNorm
    attention = replace(attention, submodules=replace(attention.submodules, **inner))
    return replace(
        layer,
        submodules=replace(
            layer.submodules,
            self_attention=attention,
            input_layernorm=TorchNorm,
            pre_mlp_layernorm=TorchNorm,
        ),
    )


def _residual_form(layer: ModuleSpec, config: TransformerConfig, options: Any) -> ModuleSpec:
    """Returns a local layer with norms where the model has them, and a factor of what is added."""
    position = getattr(options, "norm_position", "before")
    factor = getattr(options, "residual_multiplier", 1.0)
    has_scalar = getattr(options, "layer_scalar", False)
    changes: dict[str, Any] = {}
    if position == "behind":
        changes |= {"input_layernorm": IdentityOp, "pre_mlp_layernorm": IdentityOp}
    if position != "before" or factor != 1.0 or has_scalar:
        params = {"config": config, "has_norm": position != "before", "factor": factor}
        changes["self_attn_bda"] = ModuleSpec(module=ResidualAdd, params=params)
        params = {**params, "has_scalar": has_scalar}
        changes["mlp_bda"] = ModuleSpec(module=ResidualAdd, params=params)
    if getattr(options, "moe_branch_norms", False):
        changes |= {"pre_mlp_layernorm": IdentityOp, "mlp": branched_experts(layer.submodules.mlp)}
    return replace(layer, submodules=replace(layer.submodules, **changes))


def _mixes(
    layer: ModuleSpec, part: type[Part] | None, options: Any, arguments: dict[str, Any]
) -> ModuleSpec:
    """Returns a layer with the part that mixes its tokens, or with attention of packs."""
    mixer = layer.submodules.self_attention
    if part is not None:
        mixer = ModuleSpec(module=part.module(), params=part.module_arguments(options, arguments))
    # megatron-core's latent attention applies its own rotary embedding, to a part of each head.
    elif mixer.module is SelfAttention:
        params = {**(mixer.params or {}), **arguments}
        mixer = replace(mixer, module=PackedSelfAttention, params=params)
    return replace(layer, submodules=replace(layer.submodules, self_attention=mixer))
