"""config.json and the options of the same model."""

import json
from itertools import product

import pytest

from megatron.packing.flags import FlagError
from megatron.sft.model.huggingface.config import config_of, identity_of, options_of, window_of
from megatron.sft.model.huggingface.families.registry import FAMILIES
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
        ('--rope-scaling {"rope_type":"linear","factor":2}', "--rope-scaling"),
        ("--mtp-num-layers 1", "--mtp-num-layers 1"),
    ],
)
def test_a_contradiction_names_both(tmp_path, arguments, named):
    """One of the two would be ignored."""
    with pytest.raises(FlagError) as failure:
        parse_with(tmp_path, LLAMA, arguments)
    assert named in str(failure.value)
    assert f"{tmp_path}/config.json" in str(failure.value)


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
        ({"model_type": "falcon"}, ["model_type 'falcon'", "llama"]),
        ({"model_type": None}, ["model_type None"]),
        (
            {"quantization_config": {"quant_method": "gptq"}},
            ["quantization_config", "before quantization"],
        ),
        ({"hidden_act": "relu"}, ["hidden_act 'relu'", "silu"]),
        ({"attention_bias": True}, ["attention_bias", "mlp_bias"]),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, ["rope_type 'dynamic'", "linear"]),
        ({"rope_scaling": {"rope_type": "longrope"}}, ["rope_type 'longrope'"]),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, ["without", "low_freq_factor"]),
        (
            {
                "rope_parameters": {"rope_type": "yarn", "factor": 4.0, "attention_factor": 1.5},
                "max_position_embeddings": 9,
            },
            ["attention_factor 1.5"],
        ),
        (
            {"rope_parameters": {"full_attention": {"rope_type": "default"}}},
            ["one rope per kind of layer"],
        ),
        ({"partial_rotary_factor": 0.5}, ["partial_rotary_factor"]),
        ({"num_hidden_layers": None}, ["num_hidden_layers"]),
        ({"model_type": "mistral", "sliding_window": 32}, ["window of 32", "--seq-length"]),
        ({"model_type": "mistral", "num_key_value_heads": 2, "sliding_window": 63}, ["63"]),
        ({"model_type": "gemma", "hidden_act": "gelu"}, ["'gelu'"]),
        ({"model_type": "qwen3", "attention_bias": True}, ["attention_bias"]),
    ],
)
def test_what_cannot_be_computed_exactly_is_refused(tmp_path, changes, words):
    """It would train another function than the weights were made for."""
    with pytest.raises(FlagError) as failure:
        parse_with(tmp_path, LLAMA | changes)
    assert "\n" not in str(failure.value)
    for word in words:
        assert word in str(failure.value)


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


@pytest.mark.parametrize(
    ("config", "window"),
    [
        ({"model_type": "mistral"}, 4096),
        ({"model_type": "mistral", "sliding_window": None}, None),
        ({"model_type": "qwen2", "sliding_window": 4096}, None),
        ({"model_type": "qwen2", "sliding_window": 4096, "use_sliding_window": True}, 4096),
        (
            {
                "model_type": "qwen3",
                "use_sliding_window": True,
                "sliding_window": 9,
                "layer_types": ["full_attention"],
            },
            None,
        ),
        ({"model_type": "mixtral"}, None),
    ],
)
def test_window(config, window):
    """Mistral's first model has one by default; Qwen's have a switch, which is off."""
    assert window_of(config) == window


@pytest.mark.parametrize("kind", FAMILIES)
def test_defaults_are_those_of_transformers(kind):
    """A config.json leaves out what is at its default."""
    transformers = pytest.importorskip("transformers")
    changes = EXPERTS | {"shared_expert_intermediate_size": 48} if "moe" in kind else {}
    missing = {
        "model_type": kind,
        **SMALL,
        **changes,
        **({"num_local_experts": 8} if kind == "mixtral" else {}),
    }
    filled = transformers.AutoConfig.for_model(**missing).to_dict()
    plain = {**missing, **({"num_experts_per_tok": 2} if kind == "mixtral" else {})}
    assert options_of(plain) == options_of(filled)
    assert window_of(plain) == window_of(filled)


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
