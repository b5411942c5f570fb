"""What tests run of each HuggingFace family beside transformers and peft, for them and for
docs/reference/models.md.
"""

from __future__ import annotations

from typing import Any

STEPS = (
    ("llama3", "TP2"),
    ("mixtral", "DP2"),
    ("qwen3.5", "CP2"),
)
"""Model and layout of twenty steps of AdamW; `MORE_STEPS` with FAMILIES=all."""
MORE_STEPS = (
    ("qwen2", "PP2"),
    ("qwen3", "CP2"),
    ("gemma", "DP2"),
    ("qwen2-moe", "TP2"),
    ("gemma2", "CP2"),
    ("gpt-oss", "TP2"),
    ("gemma3", "PP2"),
    ("olmo3", "TP2"),
    ("minimax-m2", "TP2"),
    ("ministral3", "CP2"),
    ("ministral3", "PP2"),
    ("deepseek-v3", "TP2"),
    ("deepseek-v3", "CP2"),
    ("glm4-moe-lite", "PP2"),
    ("mistral4", "CP2"),
    ("mistral4", "DP2"),
    ("gemma4", "PP2"),
    ("gemma4", "CP2"),
    ("gemma4-moe", "TP2"),
    ("gemma4-moe", "DP2"),
)
_ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
_TIED = {"modules_to_save": ["embed_tokens", "lm_head"], "ensure_weight_tying": True}
_DELTA_NET = ["in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj"]
_LATENT = ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"]
_PARTS = ["q_proj", "v_proj", "up_proj"]
_EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
_GEMMA_EXPERTS = ["experts.gate_up_proj", "experts.down_proj"]
PEFT_CASES: tuple[tuple[str, str, int, dict[str, Any]], ...] = (
    ("llama3", "tp2-sp", 2, {"target_modules": "all-linear", **_TIED}),
    (
        "qwen2",
        "pp2",
        5,
        {"target_modules": _PARTS, "use_rslora": True, "modules_to_save": ["lm_head"]},
    ),
    ("qwen3-moe", "ep2", 1, {"target_modules": "all-linear"}),
    ("qwen3.5", "tp2-sp", 2, {"target_modules": [*_ATTENTION, *_DELTA_NET]}),
    (
        "gpt-oss",
        "ep2",
        2,
        {"target_modules": ["q_proj", "o_proj"], "target_parameters": _EXPERTS},
    ),
)
"""Model, layout, steps and options of peft's; `MORE_PEFT_CASES` with FAMILIES=all."""
MORE_PEFT_CASES: tuple[tuple[str, str, int, dict[str, Any]], ...] = (
    ("qwen2-yarn-tied", "tp4-sp-two-groups", 1, {"target_modules": [*_ATTENTION, "up_proj"]}),
    ("phi3", "tp2-sp", 2, {"target_modules": ["qkv_proj", "gate_up_proj", "down_proj"]}),
    ("gemma2", "pp2", 2, {"target_modules": _PARTS}),
    (
        "qwen2.5-vl",
        "tp2-sp",
        2,
        {
            "target_modules": _PARTS,
            "exclude_modules": "model.visual.*",
            "modules_to_save": ["lm_head"],
        },
    ),
    ("olmo3", "tp2-sp", 2, {"target_modules": _PARTS}),
    ("qwen3.5", "tp2-sp", 2, {"target_modules": "all-linear"}),
    ("qwen3.5", "pp2", 2, {"target_modules": ["in_proj_z", "in_proj_a", "q_proj"]}),
    (
        "qwen3-next",
        "ep2",
        1,
        {"target_modules": ["q_proj", "in_proj_qkvz", "in_proj_ba", "out_proj"]},
    ),
    ("gemma4", "tp2-sp", 2, {"target_modules": "all-linear"}),
    ("gemma4", "pp2", 2, {"target_modules": ["q_proj", "v_proj", "down_proj"]}),
    ("gemma4-moe", "ep2", 1, {"target_modules": [*_ATTENTION, "up_proj"]}),
    (
        "gemma4-moe",
        "ep2",
        1,
        {"target_modules": ["o_proj"], "target_parameters": _GEMMA_EXPERTS},
    ),
    *(
        (model, layout, num_steps, {"target_modules": "all-linear", **more})
        for model, layout, num_steps, more in (
            ("mixtral", "ep2", 2, {}),
            ("qwen2-moe", "tp2-pp2-ep2-sp", 1, {}),
            ("qwen3-moe", "tp2-ep4-dp2-sp", 1, {"use_rslora": True}),
            ("glm4-moe", "pp2", 2, {}),
            ("minimax-m2", "ep2", 1, {}),
            ("gemma4-moe", "tp2-pp2-ep2-sp", 1, {}),
            ("deepseek-v3", "tp2-pp2-ep2-sp", 1, {}),
            ("deepseek-v2", "ep2", 1, {}),
            ("glm4-moe-lite", "ep2", 1, {}),
            ("mistral4", "pp2", 1, {}),
            ("qwen3-next", "tp2-pp2-ep2-sp", 1, {}),
        )
    ),
    *(
        (model, "ep2", 1, {"target_modules": ["o_proj"], "target_parameters": parameters})
        for model, parameters in (
            ("qwen3-moe", ["gate.weight", *_EXPERTS]),
            ("glm4-moe", _EXPERTS),
            ("gpt-oss", ["router.weight", *_EXPERTS]),
        )
    ),
    ("glm4", "pp2", 2, {"target_modules": ["q_proj", "gate_up_proj"]}),
    ("deepseek-v3", "tp2-pp2-ep2-sp", 2, {"target_modules": _LATENT}),
    ("glm4-moe-lite", "pp2", 2, {"target_modules": ["q_proj", *_LATENT[2:]]}),
    (  # its folder holds experts as one tensor, which is not transposed
        "qwen3.5-moe",
        "ep2",
        1,
        {
            "target_modules": ["o_proj", "gate_proj", "up_proj", "down_proj"],
            "target_parameters": _EXPERTS,
        },
    ),
)
# peft targets experts of one tensor apart from the shared ones, which are modules.
MORE_PEFT_CASES += (
    ("qwen3.5-moe", "ep2", 1, {"target_modules": ["q_proj", "up_proj", "down_proj"]}),
    ("qwen3.5-moe", "tp2-ep4-dp2-sp", 1, {"target_modules": [], "target_parameters": _EXPERTS}),
)
MORE_PEFT_CASES += tuple(
    (model, "pp2", 1, {"target_modules": _PARTS})
    for model in (
        *("mistral", "qwen3", "gemma", "seed-oss", "smollm3", "ernie4.5", "granite", "olmo2"),
        *("gemma3", "gemma4-unified", "olmo3", "exaone4", "ministral3", "qwen3.5-moe"),
    )
)
MORE_PEFT_CASES += (
    ("phi3", "pp2", 1, {"target_modules": ["qkv_proj", "down_proj"]}),
    *(
        (model, "pp2", 1, {"target_modules": ["q_proj", "o_proj"]})
        for model in ("minimax-m2", "qwen3-moe", "gpt-oss")
    ),
    ("deepseek-v2", "pp2", 1, {"target_modules": _LATENT[2:]}),
)
GROWING_PEFT_CASE = ("qwen3.5", {"target_modules": [*_ATTENTION, "up_proj"]})
"""Model and options of peft's in which one rounding of a weight moves gradients by 1e-11."""
ALONE = ("ministral3",)
"""Families with a mechanism that no model of `layouts.MECHANISMS` has."""
WITH_EXPERTS = (
    *("mixtral", "qwen2_moe", "qwen3_moe", "glm4_moe", "minimax_m2"),
    "gemma4_text",
    *("deepseek_v3", "deepseek_v2", "glm4_moe_lite", "mistral4"),
    *("qwen3_5_moe_text", "qwen3_next", "gpt_oss", "qwen3_vl_moe_text"),
)
TEMPLATE_OF = {
    "llama": "LLAMA3",
    "mistral": "MISTRAL3",
    "qwen2": "QWEN25",
    "qwen3": "QWEN3",
    "gemma": "GEMMA",
    "mixtral": "MISTRAL",
    "qwen2_moe": "CHATML",
    "qwen3_moe": "QWEN3",
    "glm4_moe": "GLM",
    "phi3": "PHI",
    "gemma2": "GEMMA",
    "gemma3_text": "GEMMA",
    "exaone4": "EXAONE",
    "gemma4_text": "GEMMA4",
    "gemma4_unified_text": "GEMMA4",
    "deepseek_v2": "DEEPSEEK2",
    "deepseek_v3": "DEEPSEEK3_SERVED",
    "glm4_moe_lite": "GLM",
    "qwen3_5_text": "QWEN3",
    "qwen3_5_moe_text": "QWEN3",
    "qwen3_next": "QWEN25",
    "gpt_oss": "GPT_OSS",
    "seed_oss": "SEED_OSS",
    "smollm3": "SMOLLM3",
    "ernie4_5": "ERNIE",
    "granite": "GRANITE",
    "olmo2": "OLMO2",
    "glm4": "GLM4",
    "olmo3": "OLMO3",
    "ministral3": "MINISTRAL3",
    "mistral4": "MISTRAL4",
    "minimax_m2": "MINIMAX",
    "qwen2_5_vl_text": "CHATML",
    "qwen3_vl_text": "QWEN25",
    "qwen3_vl_moe_text": "QWEN25",
}
"""Family -> the structure of its released template, in tests/unit_tests/sft/data/templates."""
EXAMPLES = {
    "llama": "Llama 2 to 3.3",
    "mistral": "Mistral 7B to Small 3",
    "qwen2": "Qwen 1.5 to 2.5",
    "qwen3": "Qwen3",
    "gemma": "Gemma 1",
    "mixtral": "Mixtral",
    "qwen2_moe": "Qwen 1.5 and 2 MoE",
    "qwen3_moe": "Qwen3 MoE",
    "seed_oss": "Seed-OSS 36B",
    "smollm3": "SmolLM3",
    "ernie4_5": "ERNIE 4.5, dense",
    "glm4_moe": "GLM-4.5 to 4.7, Air",
    "phi3": "Phi-3, 3.5 mini, Phi-4, 4-mini",
    "granite": "Granite 3, dense",
    "olmo2": "OLMo 2",
    "glm4": "GLM-4-0414, Z1",
    "gemma2": "Gemma 2",
    "gemma3_text": "Gemma 3",
    "gemma4_text": "Gemma 4 31B, 26B-A4B",
    "gemma4_unified_text": "Gemma 4 12B",
    "olmo3": "OLMo 3",
    "exaone4": "EXAONE 4",
    "ministral3": "Ministral 3",
    "minimax_m2": "MiniMax-M2 to 2.7",
    "qwen3_5_text": "Qwen3.5, 3.6, dense",
    "qwen3_5_moe_text": "Qwen3.5, 3.6 MoE",
    "qwen3_next": "Qwen3-Next, Qwen3-Coder-Next",
    "gpt_oss": "gpt-oss",
    "deepseek_v3": "DeepSeek-V3, V3.1, R1, Kimi K2, Moonlight",
    "deepseek_v2": "DeepSeek-V2-Lite",
    "glm4_moe_lite": "GLM-4.7-Flash",
    "mistral4": "Mistral Small 4",
    "qwen2_5_vl_text": "Qwen2.5-VL, on text",
    "qwen3_vl_text": "Qwen3-VL",
    "qwen3_vl_moe_text": "Qwen3-VL MoE",
}
