"""mcore. Parts of a model in words, as estimates and messages on memory name them."""

from __future__ import annotations

from megatron.core.models.common.embeddings.language_model_embedding import LanguageModelEmbedding
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.attention import Attention
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.moe.moe_layer import BaseMoELayer
from megatron.core.transformer.moe.shared_experts import SharedExpertMLP
from megatron.core.transformer.transformer_layer import TransformerLayer

from megatron.packing.model.parts import known_parts
from megatron.packing.model.shared_tower import SharedTower

_PARTS: tuple[tuple[type, str], ...] = (
    (Attention, "attention"),
    (SharedExpertMLP, "experts"),
    (MLP, "MLP"),
    (BaseMoELayer, "experts"),
    (LanguageModelEmbedding, "embedding"),
    (SharedTower, "vision tower"),
    (TransformerLayer, "norms and residuals"),
    (GPTModel, "output layer and loss"),
)
"""Kind of module -> the part that its storages count for, but those of modules within it."""


def part_of_module(module: object) -> str | None:
    """Returns the part that a module's storages count for; None for what is none of these kinds."""
    if isinstance(module, MLP) and getattr(module.linear_fc1, "is_expert", False):
        return "experts"
    kinds = (*((part.module(), part.title) for part in known_parts()), *_PARTS)
    return next((title for kind, title in kinds if isinstance(module, kind)), None)
