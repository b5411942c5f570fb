"""The table of tensors: what each tensor-parallel rank holds, together, is everything, once."""

import pytest
import torch

from megatron.sft.model.huggingface.families.registry import FAMILIES
from megatron.sft.model.huggingface.tensors import copies
from megatron.sft.model.huggingface.weights import Weights
from megatron.sft.model.lora.names import AdapterWeights
from megatron.sft.options.lora import LoraConfig
from megatron.sft.options.model import ModelConfig

VOCAB_SIZE = 37
BIASES = {"disable_bias_linear": False}
EXPERTS = {
    "num_experts": 4,
    "moe_ffn_hidden_size": 16,
    "moe_layer_freq": (0, 1),
    "moe_shared_expert_intermediate_size": 24,
    "moe_shared_expert_gate": True,
}
DELTA_NET = {
    "linear_attention_freq": (1, 0),
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 6,
    "attention_output_gate": True,
    "add_qkv_bias": False,
    "apply_layernorm_1p": True,
}


def model(**changes):
    options = {
        "num_layers": 2,
        "hidden_size": 16,
        "num_attention_heads": 8,
        "kv_channels": 4,
        "group_query_attention": True,
        "num_query_groups": 2,
        "ffn_hidden_size": 24,
        "swiglu": True,
        "qk_layernorm": True,
        "add_qkv_bias": True,
        "disable_bias_linear": True,
        "position_embedding_type": "rope",
        "normalization": "RMSNorm",
        "seq_length": 8,
    }
    return ModelConfig(**{**options, **changes})


@pytest.mark.parametrize("size", [1, 2, 4, 8])
@pytest.mark.parametrize("changes", [{}, BIASES, EXPERTS], ids=["plain", "biases", "experts"])
def test_ranks_hold_everything_once(changes, size):
    """A row that two ranks hold, or none, would be trained twice or not be written."""
    weights = Weights(model(**changes), VOCAB_SIZE, FAMILIES["qwen2_moe"])
    for weight in weights.all():
        counts = [torch.zeros(part.shape) for part in weight.parts]
        ranks = 1 if weight.is_expert else size
        rows = sum(part.shape[0] for part in weight.parts)
        if weight.sharding in ("heads", "sections"):
            rows //= ranks
        if weight.sharding == "vocabulary":
            rows = 40 // ranks
        for rank in range(ranks):
            seen = torch.zeros(rows)
            for copy in copies(weight, rank, ranks, rows):
                block = counts[copy.part][copy.rows]
                block = block[:, copy.columns] if block.dim() == 2 else block
                block += 1
                seen[copy.row : copy.row + len(block)] += 1
            assert seen.max() == 1
            assert weight.sharding == "vocabulary" or seen.min() == 1
        expected = ranks if weight.sharding == "whole" else 1
        assert all((count == expected).all() for count in counts), weight


def test_heads_are_ordered_by_group():
    """[queries of a group, its key, its value], one group after the other, as megatron-core splits
    them.
    """
    weights = Weights(model(), VOCAB_SIZE, FAMILIES["qwen2_moe"])
    weight = weights.of_parameter("decoder.layers.1.self_attention.linear_qkv.bias")
    assert [part.name for part in weight.parts] == [
        f"model.layers.1.self_attn.{p}_proj.bias" for p in "qkv"
    ]
    query, key, value = torch.arange(32), 100 + torch.arange(8), 200 + torch.arange(8)
    fused = torch.zeros(48, dtype=torch.int64)
    for copy in copies(weight, 0, 1, 48):
        block = (query, key, value)[copy.part][copy.rows]
        fused[copy.row : copy.row + len(block)] = block
    groups = [
        torch.cat((query[g * 16 :][:16], key[g * 4 :][:4], value[g * 4 :][:4])) for g in (0, 1)
    ]
    assert torch.equal(fused, torch.cat(groups))
    of_third = [  # of four ranks, with two groups: rank 2 has the first half of the second group
        (copy.part, copy.rows.start, copy.rows.stop) for copy in copies(weight, 2, 4, 12)
    ]
    assert of_third == [(0, 16, 28)]


def test_gate_and_up_are_cut_apart():
    """A plain cut gives one rank all gates; shapes would fit all the same."""
    weights = Weights(model(), VOCAB_SIZE, FAMILIES["qwen2_moe"])
    weight = weights.of_parameter("decoder.layers.0.mlp.linear_fc1.weight")
    assert [part.name for part in weight.parts] == [
        f"model.layers.0.mlp.{p}_proj.weight" for p in ("gate", "up")
    ]
    of_second = [(c.part, c.rows, c.row) for c in copies(weight, 1, 2, 24)]
    assert of_second == [(0, slice(12, 24), 0), (1, slice(12, 24), 12)]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        (
            "decoder.layers.1.self_attention.linear_qkv.layer_norm_weight",
            "model.layers.1.input_layernorm.weight",
        ),
        (
            "decoder.layers.0.mlp.linear_fc1.layer_norm_weight",
            "model.layers.0.post_attention_layernorm.weight",
        ),
        (
            "decoder.layers.1.pre_mlp_layernorm.weight",
            "model.layers.1.post_attention_layernorm.weight",
        ),
        (
            "decoder.layers.1.mlp.experts.linear_fc2.weight3",
            "model.layers.1.mlp.experts.3.down_proj.weight",
        ),
        (
            "decoder.layers.1.mlp.experts.local_experts.3.linear_fc2.weight",
            "model.layers.1.mlp.experts.3.down_proj.weight",
        ),
        (
            "decoder.layers.1.mlp.shared_experts.gate_weight",
            "model.layers.1.mlp.shared_expert_gate.weight",
        ),
        ("decoder.final_layernorm.weight", "model.norm.weight"),
    ],
)
def test_names_of_both_kinds_of_layers(name, expected):
    """Transformer Engine has norms inside the layers behind them, and experts as one module."""
    assert (
        Weights(model(**EXPERTS), VOCAB_SIZE, FAMILIES["qwen2_moe"])
        .of_parameter(name)
        .parts[0]
        .name
        == expected
    )


def test_mixtral_calls_them_otherwise():
    """Its files are older than the names of the others."""
    weights = Weights(model(**EXPERTS), VOCAB_SIZE, FAMILIES["mixtral"])
    fc1 = weights.of_parameter("decoder.layers.1.mlp.experts.local_experts.2.linear_fc1.weight")
    prefix = "model.layers.1.block_sparse_moe."
    assert [part.name for part in fc1.parts] == [
        f"{prefix}experts.2.{w}.weight" for w in ("w1", "w3")
    ]
    assert (
        weights.of_parameter("decoder.layers.1.mlp.router.weight").parts[0].name
        == f"{prefix}gate.weight"
    )


@pytest.mark.parametrize(
    "name",
    [
        "output_layer.weight",
        "decoder.layers.0.mlp.linear_fc1.bias",
        "decoder.layers.0.mlp.router.weight",
        "decoder.layers.1.mlp.linear_fc1.weight",
        "mtp.layers.0.eh_proj.weight",
    ],
)
def test_what_the_model_lacks_has_no_place(name):
    """A parameter that is not in the table would stay as it was initialised."""
    with pytest.raises(KeyError):
        Weights(model(**EXPERTS), VOCAB_SIZE, FAMILIES["qwen2_moe"]).of_parameter(name)


def test_fused_tensors_have_one_adapter():
    """Rows of a layer that HuggingFace has as one share an A, as PEFT makes it."""
    lora = LoraConfig(lora=True, lora_rank=3, lora_target_modules=("qkv_proj", "down_proj"))
    fused = Weights(model(qk_layernorm=False, add_qkv_bias=False), VOCAB_SIZE, FAMILIES["phi3"])
    names = AdapterWeights(fused, lora)
    assert names.target_modules() == ["down_proj", "qkv_proj"]
    a, b = (
        names.of_parameter(f"decoder.layers.0.self_attention.linear_qkv.adapter.lora_{which}")
        for which in "AB"
    )
    (part,) = a.parts
    assert part.name.endswith("layers.0.self_attn.qkv_proj.lora_A.weight")
    whole = fused.of_parameter("decoder.layers.0.self_attention.linear_qkv.weight")
    assert {one.stored for one in b.parts} == {(whole.parts[0].stored[0], 3)}
    assert [one.view for one in b.parts] == [one.view for one in whole.parts]
    assert [one.shape[0] for one in b.parts] == [one.shape[0] for one in whole.parts]


def test_a_part_of_a_fused_tensor_has_no_adapter():
    """PEFT could not load what it has no layer for."""
    lora = LoraConfig(lora=True, lora_target_modules=("q_proj", "down_proj"))
    fused = Weights(model(qk_layernorm=False, add_qkv_bias=False), VOCAB_SIZE, FAMILIES["phi3"])
    with pytest.raises(ValueError, match=r"all of q_proj k_proj v_proj, .*; pass qkv_proj"):
        list(AdapterWeights(fused, lora).all())


@pytest.mark.parametrize(
    ("kind", "modules", "sizes"),
    [
        ("qwen3_5_text", ("in_proj_qkv", "in_proj_a"), [8, 8, 12, 2]),
        ("qwen3_next", ("in_proj_ba",), [2, 2]),
        ("qwen3_next", ("in_proj_qkvz",), [8, 8, 12, 12]),
    ],
)
def test_projections_of_a_delta_net_have_an_adapter_each(kind, modules, sizes):
    """Those that HuggingFace has in one tensor share an A; B stands in our rows' order."""
    net = model(**DELTA_NET)
    lora = LoraConfig(lora=True, lora_rank=3, lora_target_modules=modules)
    names = AdapterWeights(Weights(net, VOCAB_SIZE, FAMILIES[kind]), lora)
    assert names.target_modules() == sorted(modules)
    a, b = (
        names.of_parameter(f"decoder.layers.0.self_attention.in_proj.adapter.lora_{which}")
        for which in "AB"
    )
    layer = "base_model.model.model.layers.0.linear_attn"
    assert [part.name for part in a.parts] == [f"{layer}.{m}.lora_A.weight" for m in modules]
    assert (a.sharding, b.sharding) == ("whole", "sections")
    assert [part.shape for part in b.parts] == [(size, 3) for size in sizes]


def test_half_of_a_fused_projection_has_no_adapter():
    """Qwen3-Next holds betas and alphas as one layer."""
    lora = LoraConfig(lora=True, lora_target_modules=("in_proj_b",))
    names = AdapterWeights(Weights(model(**DELTA_NET), VOCAB_SIZE, FAMILIES["qwen3_next"]), lora)
    with pytest.raises(ValueError, match=r"all of in_proj_b in_proj_a, .*; pass in_proj_ba"):
        list(names.all())


def test_rows_that_alternate():
    """Qwen3.5's queries and gates: [query, gate] of each head in the file, all queries of a group
    and then its gates in ours.
    """
    options = {"attention_output_gate": True, "add_qkv_bias": False, "apply_layernorm_1p": True}
    gated = Weights(model(**options), VOCAB_SIZE, FAMILIES["qwen3_5_text"])
    weight = gated.of_parameter("decoder.layers.0.self_attention.linear_qkv.weight")
    query, gate, key, _ = weight.parts
    assert query.name == gate.name == "model.layers.0.self_attn.q_proj.weight"
    assert (query.stored_shape, key.stored_shape) == ((64, 16), (8, 16))
    assert query.view.rows(slice(2, 6)) == [2, 3, 8, 9]
    assert gate.view.rows(slice(2, 6)) == [6, 7, 12, 13]
    first = list(copies(weight, 0, 1, 80))[:4]
    assert [(copy.part, copy.rows, copy.row) for copy in first] == [
        (0, slice(0, 16), 0),
        (1, slice(0, 16), 16),
        (2, slice(0, 4), 32),
        (3, slice(0, 4), 36),
    ]


def test_a_reward_model_has_a_score_in_place_of_the_output_layer():
    """A score that is split like a vocabulary, or an output layer that is asked for besides, would
    refuse every such folder.
    """
    tied = model(untie_embeddings_and_output_weights=False)
    scored = Weights(tied, VOCAB_SIZE, FAMILIES["qwen3"], head="score")
    names = {part.name: part.shape for weight in scored.all() for part in weight.parts}
    assert names["score.weight"] == (1, 16)
    assert "lm_head.weight" not in names
    assert scored.tied is None
    assert scored.of_parameter("output_layer.weight").sharding == "whole"
    begun = Weights(tied, VOCAB_SIZE, FAMILIES["qwen3"], head="none")
    assert not begun.concerns("output_layer.weight")
    assert begun.concerns("embedding.word_embeddings.weight")
