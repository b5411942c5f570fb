"""mcore. What the options ask of a GPTModel and its constructor has no argument for, added from
outside.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megatron.sft.model.rope import inverse_frequencies
from megatron.sft.options.model import ModelConfig
from megatron.sft.options.rope_scaling import parse_rope_scaling


def prepare_config(transformer_config: TransformerConfig, model: ModelConfig) -> None:
    """Tell megatron-core's attention by how much yarn raises scores; it reads that by name, but in
    fused kernels.
    """
    if (
        model.rope_scaling is not None
        and (scaling := parse_rope_scaling(model.rope_scaling)).rope_type == "yarn"
    ):
        transformer_config.yarn_rotary_scaling_factor = scaling.factor  # type: ignore[attr-defined]
        transformer_config.apply_rope_fusion = False


def add_to_gpt(gpt: GPTModel, model: ModelConfig, vocab_size: int) -> None:
    """Scale rotary frequencies and embeddings, and keep the vocabulary's padding out of the
    softmax, as asked for.
    """
    if model.rope_scaling is not None and model.position_embedding_type == "rope":
        dim = int(model.resolved_kv_channels * model.rotary_percent)
        frequencies = inverse_frequencies(
            dim, model.rotary_base, parse_rope_scaling(model.rope_scaling)
        )
        gpt.rotary_pos_emb.inv_freq = frequencies.to(gpt.rotary_pos_emb.inv_freq.device)
    if model.scale_embeddings and hasattr(
        gpt, "embedding"
    ):  # also where multi-token prediction has a copy
        gpt.embedding.word_embeddings.register_forward_hook(_scale_by_root_of_width)
    if model.mask_vocab_padding and gpt.post_process and gpt.vocab_size > vocab_size:
        gpt.output_layer.register_forward_hook(_Hide(vocab_size))


def _scale_by_root_of_width(module: object, inputs: object, output: Tensor) -> Tensor:
    return output * torch.tensor(
        output.shape[-1] ** 0.5, dtype=output.dtype
    )  # rounded first, as Gemma's


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
