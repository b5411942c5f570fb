"""pure. What families that are not supported would need, and which supported one is nearest."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches

_NEEDS = (
    (
        "sparse or hybrid forms of latent attention",
        "deepseek_v3",
        "deepseek_v32 deepseek_v4 kimi_k25 kimi_linear glm_moe_dsa minicpm3 longcat_flash",
    ),
    (
        "embeddings of each layer, and layers that take keys and values of earlier ones",
        "gemma4_text",
        "gemma3n gemma3n_text",
    ),
    (
        "a model that drafts for another, or answers by diffusion",
        "gemma4_text",
        "gemma4_assistant gemma4_unified_assistant diffusion_gemma",
    ),
    ("short convolutions", "qwen3", "lfm2 lfm2_moe lfm2_vl"),
    (
        "Mamba layers",
        "qwen3_next",
        "mamba mamba2 falcon_mamba falcon_h1 jamba bamba zamba zamba2 nemotron_h granitemoehybrid "
        "plamo2",
    ),
    (
        "another recurrence",
        "qwen3_next",
        "rwkv rwkv7 xlstm recurrent_gemma minimax minimax_text_01",
    ),
    (
        "attention and MLP side by side",
        "llama",
        "cohere cohere2 cohere2_moe gpt_neox phi falcon gptj",
    ),
    (
        "routers without a plain softmax or sigmoid",
        "mixtral",
        "phimoe llama4 llama4_text dbrx jetmoe",
    ),
    (
        "norms over all heads beside experts",
        "olmo2",
        "olmoe flex_olmo",
    ),
    (
        "no mechanism that is not here, but a table of its fields and tensors",
        "glm4_moe",
        "dots1 solar_open bailing_moe bailing_moe_v2",
    ),
    (
        "windows and layers without positions beside experts",
        "exaone4",
        "exaone_moe afmoe",
    ),
    ("multipliers beside experts", "granite", "granitemoe granitemoeshared"),
    (
        "a softmax router that adds a bias for the choice of experts",
        "glm4_moe",
        "ernie4_5_moe ernie4_5_vl_moe",
    ),
    (
        "norms of queries and keys behind their rotation",
        "qwen3",
        "hunyuan_v1_dense hunyuan_v1_moe",
    ),
    ("text parts with rotations by three axes in other pairs", "glm4", "glm4v glm4v_text"),
    (
        "text parts with rotations by three axes in other pairs",
        "glm4_moe",
        "glm4v_moe glm4v_moe_text",
    ),
    ("other activations in its MLP", "llama", "nemotron arcee apertus"),
    ("a table for the text part of a model of speech", "qwen3_moe", "qwen3_omni_moe"),
    ("a table for the text part of a model of speech", "qwen2", "qwen2_5_omni"),
    (
        "no mechanism that is not here, but a table of its fields and tensors",
        "gemma2",
        "vaultgemma",
    ),
    (
        "code from outside transformers, with fields and names of its own",
        "llama",
        "internlm2 internlm3 baichuan minicpm",
    ),
    (
        "code from outside transformers, with fields and names of its own",
        "qwen2",
        "qwen mimo mimo_v2_flash step3",
    ),
    ("code from outside transformers, with fields and names of its own", "glm4", "chatglm"),
    (
        "code from outside transformers around its language model",
        "deepseek_v3",
        "kimi_vl",
    ),
    ("adapters for images and sound within its layers", "phi3", "phi4mm phi4_multimodal"),
    (
        "learned positions and LayerNorm",
        "llama",
        "gpt2 gpt_bigcode gpt_neo opt bloom mpt starcoder2 stablelm persimmon",
    ),
)
"""(what is needed, nearest family, values of `model_type`)"""


def why_unsupported(kind: str, supported: Iterable[str]) -> str:
    """Returns what a model of another `model_type` would need and the nearest supported one, as the
    end of a sentence; all supported ones where nothing is known of it.
    """
    for need, nearest, kinds in _NEEDS:
        if kind in kinds.split():
            return (
                f"which needs {need}, and that is not supported; the nearest that is: {nearest}; "
                "all: docs/reference/models.md"
            )
    supported = list(supported)
    close = get_close_matches(kind, supported, n=1, cutoff=0.5)
    hint = f", of which {close[0]} has the nearest name" if close else ""
    return f"but only {', '.join(supported)} are supported{hint}"
