"""pure. Gemma 1."""

from __future__ import annotations

from typing import Any

from megatron.sft.model.huggingface.families.family import Family

GEMMA_OPTIONS: dict[str, Any] = {
    "swiglu": False,
    "geglu": True,
    "apply_layernorm_1p": True,
    "scale_embeddings": True,
}
"""Gated GeLU; norms that multiply by one plus their weight; embeddings times sqrt(hidden size)."""


GEMMA = Family(
    model_type="gemma",
    architecture="GemmaForCausalLM",
    head_dim=256,
    ties_embeddings=True,
    activation="gelu_pytorch_tanh",
    options=lambda _: GEMMA_OPTIONS,
)
