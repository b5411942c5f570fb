"""config.json and the options of the same model."""

import json
from dataclasses import replace
from itertools import product
from typing import Any

import pytest

from megatron.packing.flags import FlagError
from megatron.sft.model.huggingface.config import (
    config_of,
    identity_of,
    options_of,
    with_rope_scaling,
)
from megatron.sft.model.huggingface.families.latent import LATENT_ROWS
from megatron.sft.model.huggingface.families.registry import FAMILIES
from megatron.sft.model.huggingface.families.unsupported import _NEEDS
from megatron.sft.options.model import ModelConfig
from tests.unit_tests.sft.command_line import parse

SMALL = {
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
}
LLAMA = {"model_type": "llama", **SMALL}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
LATENT = {
    "num_key_value_heads": 8,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "q_lora_rank": 12,
    "kv_lora_rank": 10,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
}
DELTA_NET = {
    "full_attention_interval": 2,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
GEMMA4 = {
    "attention_k_eq_v": True,
    "hidden_size_per_layer_input": 0,
    "head_dim": 16,
    "sliding_window": 9,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
}
GLM_EXPERTS = {"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
LOCAL_EXPERTS = {"num_local_experts": 8, "num_experts_per_tok": 2}
YARN = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 32}
YARN_FLOAT = YARN | {"original_max_position_embeddings": 32.0}
MINISTRAL_ROPE = YARN | {"mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1}
LONG_ROPE = {
    "rope_type": "longrope",
    "factor": 4.0,
    "short_factor": [1.0, 1.25, 2.0, 3.0],
    "long_factor": [1.0, 2.5, 4.0, 8.0],
    "original_max_position_embeddings": 8,
}
STEPS = "--train-iters 2 --global-batch-size 4 --lr 1e-3 --seq-length 64 --mock-data"
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def parse_with(folder, config, arguments=""):
    (folder / "config.json").write_text(json.dumps(config))
    return parse(f"{STEPS} --pretrained-checkpoint {folder} {arguments}", base="")


def test_the_folder_says_what_is_computed(tmp_path):
    """A user who had to repeat it would get it wrong."""
    config = parse_with(
        tmp_path, LLAMA | {"rope_theta": 5e5, "rope_scaling": LLAMA3, "rms_norm_eps": 1e-5}
    )
    model = config.model
    assert (
        model.num_layers,
        model.hidden_size,
        model.num_attention_heads,
        model.num_query_groups,
    ) == (4, 64, 8, 2)
    assert (model.kv_channels, model.ffn_hidden_size, model.swiglu, model.disable_bias_linear) == (
        8,
        96,
        True,
        True,
    )
    assert (model.normalization, model.norm_epsilon, model.position_embedding_type) == (
        "RMSNorm",
        1e-5,
        "rope",
    )
    assert (model.rotary_base, json.loads(model.rope_scaling)) == (5e5, LLAMA3)
    assert model.untie_embeddings_and_output_weights
    assert config.data.vocab_size == 300
    assert (config.data.resolved_tokenizer_type, config.data.tokenizer_model) == (
        "HuggingFaceTokenizer",
        str(tmp_path),
    )


@pytest.mark.parametrize(
    ("odd", "fault"),
    [
        ({"rope_theta": 10**400}, "has rope_theta 1000.*, but it must fit 64 bits"),
        ({"sliding_window": 10**30}, "has sliding_window 1000.*, but it must fit 64 bits"),
        (
            {"num_key_value_heads": 10**30},
            "has num_key_value_heads 1000.*, but it must fit 64 bits",
        ),
        ({"rope_scaling": LLAMA3 | {"factor": 10**400}}, "numbers above 0, but factor is 1000"),
        (
            {"rope_scaling": {"rope_type": "yarn", "factor": 2.0, "attention_factor": 10**400}},
            "numbers above 0, but attention_factor is 1000",
        ),
        (
            {"rope_parameters": {"rope_theta": 10**400}},
            "has rope_theta 1000.*, but it must be a number above 0",
        ),
        (
            {"rope_parameters": {"rope_theta": [1]}},
            r"has rope_theta \[1\], but it must be a number above 0",
        ),
    ],
)
def test_numbers_that_cannot_be_computed_with_are_refused(tmp_path, odd, fault):
    """An OverflowError somewhere else names neither file nor key; where nobody computes with one,
    it is kept.
    """
    with pytest.raises(FlagError, match=f"config.json.*{fault}"):
        parse_with(tmp_path, LLAMA | {"max_position_embeddings": 8} | odd)
    assert (
        parse_with(tmp_path, LLAMA | {"model_max_length": 10**30, "rare": 1e30}).model.num_layers
        == 4
    )


def test_an_own_tokenizer_wins(tmp_path):
    """The folder's is a default only."""
    data = parse_with(tmp_path, LLAMA, "--tokenizer-model other --attention-dropout 0.1").data
    assert data.tokenizer_model == "other"
    data = parse_with(tmp_path, LLAMA, "--tokenizer-type ByteLevelTokenizer").data
    assert (data.resolved_tokenizer_type, data.tokenizer_model) == ("ByteLevelTokenizer", None)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ("--num-layers 5", "--num-layers 5"),
        ("--vocab-size 299", "--vocab-size 299"),
        ("--no-swiglu", "--swiglu False"),
        ("--rotary-base 9999", "--rotary-base 9999.0"),
        ("--mtp-num-layers 1", "--mtp-num-layers 1"),
    ],
)
def test_a_contradiction_names_both(tmp_path, arguments, named):
    """One of the two would be ignored."""
    with pytest.raises(FlagError) as failure:
        parse_with(tmp_path, LLAMA, arguments)
    assert named in str(failure.value)
    assert f"{tmp_path}/config.json" in str(failure.value)


STRETCH = '{"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8.0}'


@pytest.mark.parametrize(
    "rope", [{}, {"rope_scaling": None}, {"rope_parameters": {"rope_theta": 1e4}}]
)
def test_plain_rotary_embeddings_may_be_stretched(tmp_path, rope):
    """The folder that is saved must say so: served without, the model would be another one."""
    source = LLAMA | rope
    given = f"--rope-scaling {STRETCH.replace(' ', '')}"
    scaling = parse_with(tmp_path, source, given).model.rope
    assert scaling.to_json() == STRETCH
    stretched = with_rope_scaling(source, STRETCH)
    assert stretched is not None
    assert options_of(stretched) == options_of(source) | {"rope_scaling": STRETCH}
    assert with_rope_scaling(stretched, STRETCH) is None
    with pytest.raises(FlagError, match=r"--rope-scaling .* contradicts"):
        parse_with(tmp_path, stretched, given.replace("4.0", "2.0"))


def test_the_same_again_is_no_contradiction(tmp_path):
    """A command line that spells the architecture out goes on working."""
    parse_with(
        tmp_path,
        LLAMA,
        "--num-layers 4 --hidden-size 64 --swiglu --rotary-base 10000 --kv-channels 8",
    )


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model_type": "falcon"}, ["model_type 'falcon'", "side by side", "llama"]),
        ({"model_type": None}, ["model_type None", "llama, mistral", "are supported"]),
        (
            {"model_type": "deepseek_v32"},
            ["sparse or hybrid forms of latent attention", "the nearest that is: deepseek_v3"],
        ),
        (
            {"model_type": "dots1"},
            ["no mechanism that is not here", "the nearest that is: glm4_moe"],
        ),
        ({"model_type": "qwen4"}, ["are supported, of which qwen", "has the nearest name"]),
        (
            {"quantization_config": {"quant_method": "gptq"}},
            ["quantization_config", "before quantization"],
        ),
        ({"hidden_act": "relu"}, ["hidden_act 'relu'", "silu"]),
        ({"mlp_bias": True}, ["mlp_bias without attention_bias"]),
        ({"per_layer_config": {"1": {"hidden_size": 32}}}, ["per_layer_config"]),
        ({"is_causal": None}, ["is_causal None"]),
        ({"rope_scaling": {"type": "ntk", "factor": 2.0}}, ["rope_type 'ntk'", "linear"]),
        (
            {"rope_scaling": {"type": "dynamic", "factor": 2.0}, "max_position_embeddings": None},
            ["max_position_embeddings"],
        ),
        (
            {"rope_scaling": {"type": "dynamic", "factor": 2.0}, "max_position_embeddings": 8},
            ["--seq-length 64", "the 8 positions", "'dynamic'", "pass --seq-length 8 or less"],
        ),
        ({"rope_scaling": {"rope_type": "longrope"}}, ["longrope", "without factor, short_factor"]),
        (
            {"rope_scaling": LONG_ROPE | {"short_factor": [1.0, -2.0]}},
            ["short_factor", "[1.0, -2.0]"],
        ),
        (
            {"rope_scaling": LONG_ROPE, "head_dim": 16},
            ["a short_factor of 4 numbers, but 8 pairs", "give one for each"],
        ),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, ["without", "low_freq_factor"]),
        (
            {
                "rope_parameters": {"rope_type": "yarn", "factor": 4.0, "attention_factor": -1.5},
                "max_position_embeddings": 9,
            },
            ["attention_factor is -1.5"],
        ),
        (
            {"rope_parameters": {"full_attention": {"rope_type": "default"}}},
            ["one rope per kind of layer"],
        ),
        (
            {
                "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
                "rope_scaling": {"rope_type": "yarn", "factor": 4.0},
            },
            ["rope_parameters and rope_scaling", "write one rope_parameters"],
        ),
        (
            {
                "rope_parameters": {"rope_type": "yarn", "factor": 4.0},
                "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "beta_fast": 16},
                "max_position_embeddings": 9,
            },
            ["rope_parameters and rope_scaling"],
        ),
        (
            {
                "model_type": "ministral3",
                "rope_parameters": MINISTRAL_ROPE,
                "rope_scaling": MINISTRAL_ROPE | {"llama_4_scaling_beta": 0.2},
            },
            ["rope_parameters and rope_scaling"],
        ),
        (
            {"partial_rotary_factor": 0.5, "rope_scaling": {"type": "linear", "factor": 2.0}},
            ["partial_rotary_factor"],
        ),
        ({"num_hidden_layers": None}, ["num_hidden_layers"]),
        ({"model_type": "mistral", "sliding_window": 0}, ["sliding_window 0", "at least 1"]),
        (
            {"model_type": "phi3", "rope_scaling": {"type": "linear", "factor": 2.0}},
            ["rope_scaling of type 'linear'", "longrope"],
        ),
        ({"model_type": "seed_oss", "mlp_bias": True}, ["attention_out_bias None"]),
        (
            {
                "model_type": "smollm3",
                "sliding_window": 8,
                "layer_types": ["sliding_attention"] * 4,
            },
            ["sliding_attention in layer_types", "use_sliding_window"],
        ),
        ({"model_type": "smollm3", "no_rope_layers": [1]}, ["no_rope_layers of 1 layers"]),
        (
            {"model_type": "exaone4", "sliding_window": 8, "sliding_window_pattern": "LLLG"},
            ["sliding_window_pattern 'LLLG'"],
        ),
        (
            {
                "model_type": "gemma3_text",
                "rope_parameters": {"sliding_attention": {"rope_type": "linear", "factor": 2.0}},
            },
            ["layers with a window", "'linear'"],
        ),
        (
            {"model_type": "glm4_moe", **GLM_EXPERTS, "norm_topk_prob": False},
            ["norm_topk_prob False"],
        ),
        (
            {"model_type": "glm4_moe", **GLM_EXPERTS, "n_group": 4, "topk_group": 2},
            ["topk_group 2", "two per group"],
        ),
        ({"model_type": "gemma3_text", "hidden_activation": "gelu"}, ["hidden_activation 'gelu'"]),
        ({"model_type": "qwen3_5_text", "attention_bias": True}, ["attention_bias"]),
        ({"model_type": "gemma2", "use_bidirectional_attention": True}, ["bidirectional"]),
        (
            {
                "model_type": "olmo3",
                "rope_parameters": {
                    "full_attention": YARN,
                    "sliding_attention": {"rope_type": "yarn", "factor": 2.0},
                },
            },
            ["layers with a window", "'yarn'"],
        ),
        ({"model_type": "olmo3", "rope_parameters": YARN}, ["for all layers"]),
        (
            {"model_type": "gemma3_text", "rope_scaling": {"type": "linear", "factor": 8.0}},
            ["type 'linear'", "write rope_type"],
        ),
        ({"model_type": "phi3", "resid_pdrop": 0.1}, ["resid_pdrop 0.1", "--hidden-dropout"]),
        (
            {"model_type": "seed_oss", "attention_dropout": 0.0},
            ["residual_dropout 0.1", "--hidden-dropout"],
        ),
        (
            {"model_type": "mixtral", "output_router_logits": True, **LOCAL_EXPERTS},
            ["load-balancing loss", "0.001", "--moe-aux-loss-coeff"],
        ),
    ],
)
def test_what_cannot_be_computed_exactly_is_refused(tmp_path, changes, words):
    """It would train another function than the weights were made for."""
    with pytest.raises(FlagError) as failure:
        parse_with(tmp_path, LLAMA | changes)
    assert "\n" not in str(failure.value)
    for word in words:
        assert word in str(failure.value)


@pytest.mark.parametrize(
    ("model_type", "new", "old"),
    [
        ("llama", {"attention_factor": None}, {}),
        ("llama", {"original_max_position_embeddings": None}, {}),
        ("llama", {}, {"original_max_position_embeddings": 32}),
        ("llama", {"beta_fast": 32}, {"beta_slow": 1.0, "truncate": True}),
        ("llama", {"rope_theta": 1e4}, {"type": "yarn", "rope_type": None}),
        ("llama", {"type": "yarn", "rope_type": None}, {}),
        ("ministral3", {"llama_4_scaling_beta": 0.1}, {"llama_4_scaling_beta": 0.1}),
    ],
)
def test_two_ropes_that_say_the_same_are_read(tmp_path, model_type, new, old):
    """Whoever adds what a model card says to a folder of transformers 5 writes it in other words:
    without nulls and defaults, or with them.
    """
    yarn = {"rope_type": "yarn", "factor": 2.0}
    ropes = {"rope_parameters": yarn | new, "rope_scaling": yarn | old}
    changes = {"model_type": model_type, "max_position_embeddings": 32, **ropes}
    model = parse_with(tmp_path, LLAMA | changes).model
    assert json.loads(model.rope_scaling) == YARN


@pytest.mark.parametrize("content", ["", "[1]", "{"])
def test_a_broken_config_is_refused(tmp_path, content):
    """In a line, with the file."""
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(FlagError, match=r"config\.json must"):
        parse(f"{STEPS} --pretrained-checkpoint {tmp_path}", base="")


def test_no_config_is_refused(tmp_path):
    """A folder of checkpoints, say."""
    with pytest.raises(FlagError, match=r"no config\.json"):
        parse(f"{STEPS} --pretrained-checkpoint {tmp_path}", base="")


MOE_WINDOWS = {
    "num_experts": 8,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "use_sliding_window": True,
    "sliding_window": 9,
    "max_window_layers": 2,
}


@pytest.mark.parametrize(
    ("config", "windows"),
    [
        ({"model_type": "mistral"}, [4096] * 4),
        ({"model_type": "mistral", "sliding_window": None}, [None] * 4),
        (
            {"model_type": "mistral", "layer_types": ["sliding_attention", "full_attention"] * 2},
            [4096, None, 4096, None],
        ),
        ({"model_type": "qwen2", "sliding_window": 4096}, [None] * 4),
        (
            {
                "model_type": "qwen2",
                "sliding_window": 9,
                "use_sliding_window": True,
                "max_window_layers": 3,
            },
            [None, None, None, 9],
        ),
        (
            {
                "model_type": "qwen3",
                "use_sliding_window": True,
                "sliding_window": 9,
                "layer_types": ["full_attention"] * 4,
            },
            [None] * 4,
        ),
        ({"model_type": "gemma2", "sliding_window": 9}, [9, None, 9, None]),
        ({"model_type": "olmo3", "sliding_window": 9}, [9, 9, 9, None]),
        ({"model_type": "exaone4", "sliding_window": 9}, [9, 9, 9, None]),
        ({"model_type": "mixtral"}, [None] * 4),
        ({"model_type": "mixtral", "sliding_window": 9}, [9] * 4),
        ({"model_type": "qwen3_moe", **MOE_WINDOWS}, [9] * 4),
        ({"model_type": "qwen2_moe", **MOE_WINDOWS}, [9, None, None, None]),
    ],
)
def test_windows(tmp_path, config, windows):
    """Which layers have one is written as a list, as an interval, behind a switch, or not at all;
    `sliding_window` counts the token itself.
    """
    experts = {"num_local_experts": 8, "num_experts_per_tok": 2}
    model = parse_with(tmp_path, {**SMALL, **experts, **config}).model
    assert [kind.window for kind in model.layer_kinds()] == windows


SOFTCAP = {"final_logit_softcapping": 30.0}
SIGMOIDS = {"model_type": "glm4_moe", **GLM_EXPERTS, "num_experts_per_tok": 1}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"attention_bias": True}, {"add_qkv_bias": True, "add_proj_bias": True}),
        ({"model_type": "olmo2", "attention_bias": True}, {"add_proj_bias": True}),
        ({"model_type": "mistral", "attention_bias": True}, {"add_qkv_bias": False}),
        ({"model_type": "seed_oss", "attention_out_bias": True}, {"add_proj_bias": True}),
        ({"partial_rotary_factor": 0.5}, {"rotary_percent": 1.0}),
        ({"model_type": "gemma", "hidden_act": "gelu"}, {"geglu": True}),
        (
            {"model_type": "gemma3_text", "attn_logit_softcapping": 50.0},
            {"attn_logit_softcapping": None},
        ),
        (
            {
                "model_type": "gemma3",
                "text_config": LLAMA | {"model_type": "gemma3_text"} | SOFTCAP,
            },
            {"final_logit_softcapping": None},
        ),
        ({"model_type": "gemma3_text"} | SOFTCAP, {"final_logit_softcapping": 30.0}),
        (
            {"model_type": "minimax_m2", "routed_scaling_factor": 2.0, "n_group": 4}
            | LOCAL_EXPERTS,
            {"moe_router_topk_scaling_factor": None, "moe_router_num_groups": None},
        ),
        (
            {"model_type": "olmo3", "rope_theta": 1e6},
            {"rotary_base": 1e6, "window_rotary_base": 5e5},
        ),
        (SIGMOIDS, {"moe_router_topk": 1, "moe_router_pre_softmax": False}),
        (SIGMOIDS | {"norm_topk_prob": False}, {"moe_router_pre_softmax": True}),
        (
            {"rope_scaling": YARN, "original_max_position_embeddings": 16},
            {"rope_scaling": json.dumps(YARN | {"original_max_position_embeddings": 16.0})},
        ),
        (
            {"rope_scaling": YARN | {"attention_factor": 1.07}},
            {"rope_scaling": json.dumps(YARN_FLOAT | {"attention_factor": 1.07})},
        ),
        (
            {"rope_scaling": YARN | {"mscale": 0.0, "mscale_all_dim": 1.0, "beta_fast": 0}},
            {"rope_scaling": json.dumps(YARN_FLOAT)},
        ),
        (
            {"rope_scaling": YARN | {"truncate": None}},
            {"rope_scaling": json.dumps(YARN_FLOAT | {"truncate": False})},
        ),
        (
            {"rope_scaling": YARN | {"factor": None}, "max_position_embeddings": 64},
            {"rope_scaling": json.dumps(YARN_FLOAT)},
        ),
    ],
)
def test_fields_mean_what_they_mean_in_transformers(changes, expected):
    """A field that is ignored, or that is applied where transformers does not read it, trains
    another model in silence.
    """
    options = options_of(LLAMA | changes)
    assert {name: options[name] for name in expected} == expected


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"attention_bias": True}, "attention_bias"),
        ({"num_key_value_heads": 2}, "num_key_value_heads 2"),
        ({"norm_topk_prob": False}, "norm_topk_prob False"),
        ({"norm_topk_prob": None}, "norm_topk_prob None"),
        (
            {"model_type": "glm4_moe_lite", "partial_rotary_factor": 0.5},
            "partial_rotary_factor 0.5",
        ),
        ({"model_type": "mistral4", "norm_topk_prob": None}, "norm_topk_prob None"),
        ({"model_type": "deepseek_v2", "topk_method": "group_limited_greedy"}, "topk_method"),
        ({"model_type": "mistral4", "n_group": 2}, "n_group 2"),
        ({"model_type": "mistral4", "head_dim": 10}, "head_dim and a partial_rotary_factor"),
    ],
)
def test_latent_attention_that_would_be_another_is_refused(changes, named):
    """Biases, fewer keys than queries or other routers would be left out in silence."""
    config = {"model_type": "deepseek_v3", **SMALL, **LATENT, **changes}
    with pytest.raises(ValueError, match=named):
        options_of(config)


def test_a_share_of_a_proportional_rope_is_refused():
    """The share would be taken twice: of the channels, and of their frequencies."""
    rope = {"rope_type": "proportional", "partial_rotary_factor": 0.5}
    config = {"model_type": "glm4", **SMALL, "rope_parameters": rope}
    with pytest.raises(ValueError, match=r"'proportional' and partial_rotary_factor 0\.5"):
        options_of(config)
    rope["partial_rotary_factor"] = 1
    assert options_of(config)["rotary_percent"] == 1.0


def test_a_release_with_the_code_of_another_is_read_as_that():
    """Kimi K2's own model_type is unknown to transformers, which loads it as its maker's code."""
    config = {**SMALL, **LATENT}
    assert options_of({"model_type": "kimi_k2", **config}) == options_of(
        {"model_type": "deepseek_v3", **config}
    )


@pytest.mark.parametrize("kind", FAMILIES)
def test_defaults_are_those_of_transformers(kind):
    """A config.json leaves out what is at its default."""
    transformers = pytest.importorskip("transformers")
    changes: dict[str, Any] = (
        EXPERTS | {"shared_expert_intermediate_size": 48}
        if "moe" in kind or kind == "qwen3_next"
        else {}
    )
    if kind == "qwen3_5_moe_text":
        changes = changes | {"intermediate_size": None}
    if kind == "glm4_moe":
        changes = dict(GLM_EXPERTS)
    if kind in ("mixtral", "minimax_m2", "gpt_oss"):
        changes = {"num_local_experts": 8, "num_experts_per_tok": 2}
    if FAMILIES[kind].rows[: len(LATENT_ROWS)] == LATENT_ROWS:
        changes = {"num_key_value_heads": SMALL["num_attention_heads"], "num_experts_per_tok": 8}
    if kind.startswith("gemma4"):
        changes = {"attention_k_eq_v": True, "hidden_size_per_layer_input": 0}
    missing: dict[str, Any] = {"model_type": kind, **SMALL, **changes}
    if "_vl_" in kind:  # nobody has the text part alone
        missing = {"model_type": kind.removesuffix("_text"), "text_config": missing}
    filled = transformers.AutoConfig.for_model(**missing).to_dict()
    found = options_of(filled)
    assert options_of(missing) == found


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("llama", {}),
        ("llama", {"attention_bias": True, "mlp_bias": True, "rope_scaling": LLAMA3}),
        ("mistral", {"head_dim": 16, "sliding_window": None}),
        ("qwen2", {"tie_word_embeddings": True}),
        ("qwen3", {"head_dim": 16}),
        ("gemma", {"head_dim": 16}),
        ("mixtral", {"num_local_experts": 8, "num_experts_per_tok": 2}),
        ("qwen2_moe", EXPERTS | {"shared_expert_intermediate_size": 48, "mlp_only_layers": [1, 2]}),
        ("qwen3_moe", EXPERTS | {"norm_topk_prob": True, "head_dim": 16}),
        ("qwen3_moe", EXPERTS | {"decoder_sparse_step": 2, "head_dim": 16}),
        ("mistral", {"sliding_window": 9}),
        (
            "mistral",
            {"sliding_window": 9, "layer_types": ["full_attention", "sliding_attention"] * 2},
        ),
        ("qwen2", {"sliding_window": 9, "use_sliding_window": True, "max_window_layers": 2}),
        ("smollm3", {"no_rope_layer_interval": 2}),
        ("ernie4_5", {"head_dim": 16}),
        ("glm4_moe", GLM_EXPERTS | {"use_qk_norm": True, "routed_scaling_factor": 2.5}),
        ("phi3", {"partial_rotary_factor": 0.5, "sliding_window": 9}),
        ("phi3", {"rope_scaling": LONG_ROPE, "original_max_position_embeddings": 8}),
        ("granite", {"attention_multiplier": 0.25, "logits_scaling": 8.0}),
        ("olmo2", {}),
        ("olmo3", {"sliding_window": 9, "rope_scaling": YARN}),
        ("glm4", {"head_dim": 16}),
        ("gemma2", {"head_dim": 16, "query_pre_attn_scalar": 24, "sliding_window": 9}),
        ("gemma3_text", {"head_dim": 16, "sliding_window": 9, "sliding_window_pattern": 2}),
        ("exaone4", {"sliding_window": 9}),
        ("ministral3", {"head_dim": 16, "rope_parameters": MINISTRAL_ROPE}),
        ("gpt_oss", {"num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": 9}),
        ("qwen3_5_text", DELTA_NET),
        ("qwen3_5_moe_text", DELTA_NET | EXPERTS | {"shared_expert_intermediate_size": 48}),
        ("qwen3_next", DELTA_NET | EXPERTS | {"shared_expert_intermediate_size": 48}),
        ("minimax_m2", {"num_local_experts": 8, "num_experts_per_tok": 2, "rotary_dim": 8}),
        ("deepseek_v3", LATENT | {"rope_scaling": YARN | {"mscale": 0.7, "mscale_all_dim": 0.7}}),
        ("deepseek_v2", LATENT | {"q_lora_rank": None, "n_shared_experts": 2}),
        ("glm4_moe_lite", LATENT | {"mlp_layer_types": ["dense", "sparse"] * 2}),
        ("mistral4", LATENT | {"rope_parameters": MINISTRAL_ROPE}),
        ("gemma4_text", GEMMA4 | {"global_head_dim": 24}),
        (
            "gemma4_text",
            GEMMA4
            | {"num_global_key_value_heads": 1, "enable_moe_block": True, "top_k_experts": 2}
            | EXPERTS,
        ),
    ],
)
def test_options_and_config_say_the_same(tmp_path, kind, changes):
    """What a run without a folder writes, a run with that folder reads."""
    config = {"model_type": kind, **SMALL, **changes}
    model = parse_with(tmp_path, config).model
    assert identity_of(model, 300) == options_of(config)
    assert options_of(config_of(model, 300)) == options_of(config)


@pytest.mark.parametrize(
    ("normalization", "position"),
    [*product(["LayerNorm", "RMSNorm"], ["learned_absolute", "rope"])],
)
def test_a_model_of_no_family_is_refused(normalization, position):
    """Its weights would be written under names that mean something else."""
    model = ModelConfig(
        num_layers=2,
        hidden_size=64,
        num_attention_heads=4,
        seq_length=8,
        normalization=normalization,
        position_embedding_type=position,
        swiglu=normalization == "LayerNorm",
    )
    with pytest.raises(ValueError, match=r"no HuggingFace family computes .* differs in .*--"):
        config_of(model, 100)


def test_a_width_that_no_layer_has_does_not_count():
    """With experts of another width than --ffn-hidden-size, which no layer has, the model was
    refused for it, without the value that helps.
    """
    model = ModelConfig(
        num_layers=2,
        hidden_size=64,
        num_attention_heads=4,
        seq_length=8,
        normalization="RMSNorm",
        position_embedding_type="rope",
        swiglu=True,
        disable_bias_linear=True,
        num_experts=4,
        moe_ffn_hidden_size=32,
    )
    config = config_of(model, 100)
    assert (config["model_type"], config["intermediate_size"]) == ("mixtral", 32)
    with pytest.raises(ValueError, match=r"qwen3_moe, differs in --qk-layernorm \(there True\)$"):
        config_of(replace(model, moe_layer_freq=(0, 1)), 100)


WIDE = {"head_dim": 24, "num_key_value_heads": 1}


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"hidden_size_per_layer_input": 256}, "embeddings of each layer.*gemma4_text without"),
        ({"num_kv_shared_layers": 2}, "keys and values of earlier ones"),
        ({"attention_k_eq_v": False}, "attention_k_eq_v False"),
        ({"use_bidirectional_attention": "all"}, "use_bidirectional_attention 'all'"),
        ({"per_layer_config": {"1": WIDE}}, "per_layer_config .* each layer without a window"),
        ({"per_layer_config": {"1": WIDE, "3": {}}}, "per_layer_config"),
        ({"per_layer_config": {"0": WIDE, "1": WIDE, "3": WIDE}}, "per_layer_config"),
    ],
)
def test_layers_of_gemma4_that_would_be_others_are_refused(changes, named):
    """Edge models and other widths would be trained as what is left of them, in silence."""
    with pytest.raises(ValueError, match=named):
        options_of({"model_type": "gemma4_text", **SMALL, **GEMMA4, **changes})


def test_widths_by_layer_are_read_as_releases_have_them():
    """transformers 5 writes them for each layer, and reads them before the two keys of releases;
    its last layer has no window, whatever is written.
    """
    common = {"model_type": "gemma4_text", **SMALL, **GEMMA4}
    of_release = {"global_head_dim": 24, "num_global_key_value_heads": 1}
    written = {"per_layer_config": {"1": WIDE, "3": WIDE}, "global_head_dim": 40}
    assert options_of(common | of_release) == options_of(common | written)
    windows = {"layer_types": ["sliding_attention"] * 4}
    assert options_of(common | windows)["window_attn_skip_freq"] == (1, 1, 1, 0)


@pytest.mark.parametrize(("changes", "expected"), [({}, True), ({"rope_interleave": None}, False)])
def test_a_null_switch_is_off(changes, expected):
    """As in transformers, where it is no missing key: other channels would be rotated together."""
    config = {"model_type": "deepseek_v3", **SMALL, **LATENT, **changes}
    assert options_of(config)["rotary_interleaved"] is expected


def test_models_that_are_near_to_others_are_supported():
    """Advice to take a model that is refused, too, or a refusal of one that is read."""
    for _, nearest, kinds in _NEEDS:
        assert nearest in FAMILIES
        assert not FAMILIES.keys() & set(kinds.split())
    known = [kind for _, _, kinds in _NEEDS for kind in kinds.split()]
    assert len(known) == len(set(known))
