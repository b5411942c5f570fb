"""mcore. Features of a GPTModel that its constructor has no argument for, added from outside."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import fields
from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megatron.packing.model.attention.rotary import LayerRotary
from megatron.packing.model.attention.self_attention import QueryScale
from megatron.packing.model.multipliers import LogitRule, adjust_logits, multiply_embeddings
from megatron.packing.model.parts import parts_in
from megatron.sft.model.rope import inverse_frequencies, plain_frequencies
from megatron.sft.options.model import ModelConfig
from megatron.sft.options.rope_scaling import factor_of_turns, parse_rope_scaling


def prepare_config(transformer_config: TransformerConfig, model: ModelConfig) -> None:
    """Sets fields of megatron-core's config that its constructor has no argument for, or refuses:
    the factor of cosines and sines of yarn and longrope, which it reads by name except in fused
    kernels, the softmax over one chosen expert, and the options of parts.
    """
    for part in parts_in(model):
        for option in fields(part):  # type: ignore[arg-type]
            if not hasattr(transformer_config, option.name):
                setattr(transformer_config, option.name, getattr(model, option.name))
    if len({kind.mixer for kind in model.layer_kinds()}) > 1:
        # Layers differ in the shapes of tensors of one name: checkpoints must number them.
        transformer_config.hetereogenous_dist_checkpoint = True
    scaling = None if model.rope_scaling is None else parse_rope_scaling(model.rope_scaling)
    if scaling is not None and scaling.rope_type in ("yarn", "longrope"):
        transformer_config.yarn_rotary_scaling_factor = scaling.factor  # type: ignore[attr-defined]
        if not scaling.raises_scores:  # equal factors, whose quotient multiplies cosines and sines
            transformer_config.yarn_mscale = 1.0  # type: ignore[attr-defined]
            transformer_config.yarn_mscale_all_dim = 1.0  # type: ignore[attr-defined]
        elif scaling.rope_type == "longrope" or scaling.attention_factor is not None:
            # The product is 0.1 * mscale * ln(scaling factor) + 1, over 1: the frequencies are
            # ours, so that nothing else reads the scaling factor.
            transformer_config.yarn_rotary_scaling_factor = math.exp(10.0)  # type: ignore[attr-defined]
            transformer_config.yarn_mscale = factor_of_turns(scaling) - 1.0  # type: ignore[attr-defined]
            transformer_config.yarn_mscale_all_dim = 0.0  # type: ignore[attr-defined]
        transformer_config.apply_rope_fusion = False
    if model.moe_router_topk == 1:
        # megatron-core's config refuses a softmax over one expert, its router computes it.
        transformer_config.moe_router_pre_softmax = model.moe_router_pre_softmax


def add_to_gpt(gpt: GPTModel, model: ModelConfig, vocab_size: int) -> None:
    """Scales rotary frequencies and embeddings, and keep the vocabulary's padding out of the
    softmax, as asked for.
    """
    if model.rope_scaling is not None and model.position_embedding_type == "rope":
        dim = int(model.resolved_kv_channels * model.rotary_percent)
        frequencies = inverse_frequencies(
            dim, model.rotary_base, parse_rope_scaling(model.rope_scaling), model.seq_length
        )
        gpt.rotary_pos_emb.inv_freq = frequencies.to(gpt.rotary_pos_emb.inv_freq.device)
    if model.scale_embeddings:  # rounded first, as Gemma's
        multiply_embeddings(gpt, model.hidden_size**0.5, is_rounded=True)
    multiply_embeddings(gpt, model.embedding_multiplier)
    adjust_logits(gpt, logit_rule(model))
    if model.mask_vocab_padding and gpt.post_process and gpt.vocab_size > vocab_size:
        gpt.output_layer.register_forward_hook(_Hide(vocab_size))


def logit_rule(model: ModelConfig) -> LogitRule:
    """Returns how logits are scaled and capped."""
    return LogitRule(scale=1.0 / model.logits_scaling, softcap=model.final_logit_softcapping)


def arguments_of_attention(model: ModelConfig) -> Callable[[int], dict[str, Any]]:
    """Returns the function from a layer, numbered over the whole model, to the arguments of its
    `PackedSelfAttention`.
    """
    shared: dict[str, Any] = {
        "has_proj_bias": model.add_proj_bias,
        "has_value_norm": model.value_layernorm,
    }
    if model.query_scale_beta is not None:
        assert model.rope_scaling is not None
        length = parse_rope_scaling(model.rope_scaling).original_max_position_embeddings
        shared["query_scale"] = QueryScale(model.query_scale_beta, int(length))
    rotary_of_layers = _rotary_of_layers(model)
    return lambda number: {**shared, "rotary": rotary_of_layers[number]}


def _rotary_of_layers(model: ModelConfig) -> tuple[LayerRotary | None, ...]:
    """Layers with a window may have a base of their own; layers without rotary embedding none.
    Parts that ask for one always have one, which layers of a kind share.
    """
    of_windows = None
    if model.window_rotary_base is not None:
        dim = int(model.resolved_kv_channels * model.rotary_percent)
        frequencies = plain_frequencies(dim, model.window_rotary_base)
        of_windows = LayerRotary(frequencies, is_interleaved=model.rotary_interleaved)
    kinds = model.layer_kinds()
    of_mixers = {
        mixer: _rotary_of_model(model, mixer.rotary_channels() or model.resolved_kv_channels)
        for mixer in {kind.mixer for kind in kinds}
        if mixer is not None and "rotary" in mixer.attention_arguments
    }
    skipped = model.no_rope_freq or (0,) * model.num_layers
    return tuple(
        of_mixers.get(kind.mixer)
        if kind.mixer is not None
        else (of_windows if kind.window is not None and not without else None)
        for kind, without in zip(kinds, skipped)
    )


def _rotary_of_model(model: ModelConfig, width: int) -> LayerRotary:
    """Returns the model's rotary embedding for heads of that width."""
    dim = int(width * model.rotary_percent)
    if model.rope is None:
        frequencies, scale = plain_frequencies(dim, model.rotary_base), 1.0
    else:
        frequencies = inverse_frequencies(dim, model.rotary_base, model.rope, model.seq_length)
        scale = factor_of_turns(model.rope)
    return LayerRotary(frequencies, is_interleaved=model.rotary_interleaved, scale=scale)


class _Hide:
    """Makes the logits of rows from `vocab_size` on minus infinity, in place."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size

    def __call__(self, layer: Any, inputs: object, output: tuple[Any, Any]) -> None:
        logits = output[0]
        if not isinstance(logits, Tensor):
            return  # `head` leaves the padding out itself
        num_real = max(self._vocab_size - layer.tp_group.rank() * logits.shape[-1], 0)
        if num_real < logits.shape[-1]:
            logits[..., num_real:] = -torch.inf
