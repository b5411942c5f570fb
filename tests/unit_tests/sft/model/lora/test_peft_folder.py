"""The folder of a PEFT adapter: what it decides, and what is refused in it."""

import json
import re
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from megatron.packing.flags import FlagError
from megatron.sft.model.huggingface.families.registry import FAMILIES, language_model
from megatron.sft.model.huggingface.folder import check_folder
from megatron.sft.model.huggingface.names import naming
from megatron.sft.model.huggingface.weights import Weights
from megatron.sft.model.lora.names import PREFIX, AdapterWeights, note_for_peft
from megatron.sft.model.lora.peft_folder import (
    CONFIG,
    WEIGHTS,
    notes_on_adapter,
    open_adapter,
    options_of_adapter,
    write_adapter_config,
)
from megatron.sft.options.lora import LoraConfig
from tests.unit_tests.sft.command_line import parse
from tests.unit_tests.sft.model.huggingface.test_folder import VOCAB_SIZE, weights

LORA = LoraConfig(
    lora=True, lora_rank=3, lora_alpha=6, lora_target_modules=("q_proj", "v_proj", "down_proj")
)


@pytest.fixture
def adapter(tmp_path):
    """A folder as PEFT writes it, for the model of `weights`."""
    names = AdapterWeights(weights(), LORA)
    write_adapter_config(tmp_path, LORA, names, "base")
    save_file(
        {p.name: torch.ones(p.shape) for w in names.all() for p in w.parts}, tmp_path / WEIGHTS
    )
    return tmp_path


def test_buffers_of_the_base_are_no_adapters():
    """A router's bias (GLM-4.5, MiniMax) ended a run as its adapters were written, after the last
    step.
    """
    with pytest.raises(KeyError):
        AdapterWeights(weights(), LORA).of_parameter("decoder.layers.1.mlp.router.expert_bias")


def change(folder, **changes):
    config = json.loads((folder / CONFIG).read_text())
    (folder / CONFIG).write_text(json.dumps(config | changes))


def test_it_decides_the_options(adapter):
    """A rank or factor of the command line's would scale what was trained with another one."""
    lora = parse(f"--lora --lora-adapter {adapter}").lora
    assert (lora.lora_rank, lora.scale, lora.targets) == (3, 2.0, ("q_proj", "v_proj", "down_proj"))
    check_folder(open_adapter(adapter), AdapterWeights(weights(), lora), CONFIG)
    with pytest.raises(
        FlagError, match=r"--lora-rank 4 contradicts .*adapter_config.json, which says 3"
    ):
        parse(f"--lora --lora-adapter {adapter} --lora-rank 4")
    with pytest.raises(FlagError, match="--lora-adapter needs --lora"):
        parse(f"--lora-adapter {adapter}")


def test_the_dropout_of_an_adapter_goes_on(adapter):
    """An adapter that was trained with dropout would go on without, in silence; another is no
    contradiction, as it changes no weights.
    """
    change(adapter, lora_dropout=0.1)
    assert parse(f"--lora --lora-adapter {adapter}").lora.lora_dropout == 0.1
    options = f"--lora --lora-adapter {adapter} --lora-dropout 0"
    assert parse(options).lora.lora_dropout == 0.0
    change(adapter, lora_dropout=1.5)
    with pytest.raises(FlagError, match=r"adapter_config.json has lora_dropout 1\.5"):
        parse(f"--lora --lora-adapter {adapter}")


def test_modules_may_be_a_pattern_or_whole_names(adapter):
    """PEFT takes a regular expression there; the names of the tensors say what it matched."""
    change(
        adapter,
        target_modules=".*(q_proj|v_proj|down_proj)",
        modules_to_save=["lm_head", "model.lm_head"],
    )
    found = options_of_adapter(adapter)
    assert found["lora_target_modules"] == ["down_proj", "q_proj", "v_proj"]
    assert found["lora_modules_to_save"] == ["lm_head"]


@pytest.mark.parametrize(
    "changes",
    [
        {"peft_type": "IA3"},
        {"use_dora": True},
        {"bias": "all"},
        {"alpha_pattern": {"q_proj": 8}},
        {"alpha_pattern": {"self_attn.q_proj": 8}},
        {"alpha_pattern": {".*": 8}},
        {"rank_pattern": ["q_proj"]},
        {"target_parameters": ["7.mlp.experts.gate_up_proj"]},
        {"layer_replication": [[0, 2]]},
        {"init_lora_weights": "pissa"},
    ],
    ids=str,
)
def test_what_is_computed_otherwise_is_refused(adapter, changes):
    """It would be read, and trained on as something else."""
    change(adapter, **changes)
    with pytest.raises(
        ValueError, match=rf"adapter_config.json has {next(iter(changes))} .* (is|are) supported"
    ):
        options_of_adapter(adapter)


@pytest.mark.parametrize(
    ("name", "pattern"),
    [
        ("rank_pattern", {"attn.q_proj": 8}),
        ("alpha_pattern", {"attn.q_proj": 8, "q_proj": 6}),
        ("rank_pattern", {".*": 8}),
    ],
)
def test_patterns_that_change_no_module_are_noted(adapter, name, pattern):
    """peft 0.21.2 ignores attn.q_proj, as names match from a point on, and its folder then has one
    rank: it was refused, though it is plain.
    """
    change(adapter, **{name: pattern})
    assert options_of_adapter(adapter)["lora_rank"] == 3
    (note,) = notes_on_adapter(adapter)
    assert f"{name} {pattern} has no effect: all adapters have r 3 and lora_alpha 6, as" in note


def test_patterns_that_change_a_module_are_refused_by_its_name(adapter):
    """Its updates would be scaled by the rank of the others."""
    change(adapter, r=2, rank_pattern={"q_proj": 3})
    with pytest.raises(
        ValueError, match=r"by which model.layers.0.mlp.down_proj has rank 3, but only"
    ):
        options_of_adapter(adapter)
    change(adapter, r=3, rank_pattern={})
    assert notes_on_adapter(adapter) == []


def save_stacks(folder):
    """Writes an adapter of a layer's stacked experts and of its router."""
    stacked = f"{PREFIX}model.layers.0.mlp.experts"
    sizes = {"lora_A.weight": (6, 4), "lora_B.weight": (4, 6)}
    tensors = {
        f"{stacked}{inner}.{part}": torch.zeros(size)
        for inner in ("", ".base_layer")
        for part, size in sizes.items()
    }
    tensors[f"{PREFIX}model.layers.0.mlp.gate.lora_A.weight"] = torch.zeros(3, 4)
    save_file(tensors, folder / WEIGHTS)


@pytest.mark.parametrize(
    "key", ["down_proj", "layers.0.mlp.experts.down_proj", "experts.down_proj"]
)
def test_patterns_of_stacked_experts_are_refused(adapter, key):
    """peft 0.21.2 warns that down_proj was ignored, and takes it: it was noted as without effect,
    and the update was scaled by the alpha of the others.
    """
    save_stacks(adapter)
    change(adapter, target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"])
    change(adapter, alpha_pattern={key: 8})
    with pytest.raises(
        ValueError, match=r"by which model\.layers\.0\.mlp\.experts\.down_proj has a"
    ):
        options_of_adapter(adapter)
    change(adapter, alpha_pattern={"up_proj": 8})
    assert len(notes_on_adapter(adapter)) == 1


@pytest.mark.parametrize("name", ["rank_pattern", "alpha_pattern"])
@pytest.mark.parametrize(
    ("pattern", "is_plain"),
    [
        ({"^model.layers.7.mlp.experts.down_proj": 9}, True),
        ({r"model\.layers\.[7-9]\..*": 9}, False),
        ({r"model\.layers\.\d+\.mlp\.experts\.gate_up_proj": 9}, True),
        ({r".*\.experts\..*": 9}, False),
        ({".*vision.*": 9}, True),
        ({"(a+)+": 9}, False),
        ({"experts.down_proj": "usual", "down_proj": 9}, True),
        ({"down_proj": 9, "experts.down_proj": "usual"}, False),
        ({"mlp.experts.gate_up_proj": 9}, True),
    ],
)
def test_patterns_beside_stacked_experts_are_read_as_peft_reads_them(
    adapter, name, pattern, is_plain
):
    """peft 0.21.2 gives all of those that are plain one rank and one alpha; 219 of 1,160 adapters
    that it wrote were refused.
    """
    save_stacks(adapter)
    usual = {"rank_pattern": 3, "alpha_pattern": 6}[name]
    pattern = {key: usual if value == "usual" else value for key, value in pattern.items()}
    change(adapter, target_parameters=["mlp.experts.down_proj"], **{name: pattern})
    if is_plain:
        assert options_of_adapter(adapter)["lora_rank"] == 3
        assert len(notes_on_adapter(adapter)) == 1
    else:
        with pytest.raises(ValueError, match="merge it into its model with peft"):
            options_of_adapter(adapter)


def test_patterns_of_routers_name_their_parameter(adapter):
    """peft 0.21.2 matches mlp.gate.weight: that alpha was noted as without effect, and `gate`,
    which has none, was refused.
    """
    save_stacks(adapter)
    change(adapter, target_parameters=["mlp.experts.down_proj", "mlp.gate.weight"])
    change(adapter, alpha_pattern={"gate": 8})
    assert len(notes_on_adapter(adapter)) == 1
    change(adapter, alpha_pattern={"gate.weight": 8})
    with pytest.raises(ValueError, match=r"model\.layers\.0\.mlp\.gate\.weight has alpha 8"):
        options_of_adapter(adapter)


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("modules_to_save", True, "modules_to_save True, but it must be of type list"),
        ("modules_to_save", [1], "modules_to_save with 1, but it must be text"),
        ("r", "16", "r '16', but it must be of type int"),
        ("lora_alpha", "x", "lora_alpha 'x', but it must be of type float"),
        ("use_rslora", "x" * 3000, "use_rslora 'x"),
    ],
)
def test_values_of_a_wrong_type_name_file_and_key(adapter, key, value, said):
    """`modules_to_save: true` was a traceback, and "lm_head" its letters."""
    change(adapter, **{key: value})
    with pytest.raises(ValueError, match=f"adapter_config.json has {re.escape(said)}") as end:
        options_of_adapter(adapter)
    assert len(str(end.value)) < 600


def test_tensors_that_are_missing_or_left_over_are_refused(adapter):
    """Layers without adapter, or with a magnitude beside it, are another model."""
    names = AdapterWeights(weights(), LORA)
    tensors = {p.name: torch.ones(p.shape) for w in names.all() for p in w.parts}
    first = next(iter(tensors))
    assert first == "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
    save_file(
        {name: tensor for name, tensor in tensors.items() if name != first}, adapter / WEIGHTS
    )
    with pytest.raises(
        ValueError, match=r"lacks .*layers.0.*q_proj.lora_A.weight, which its adapter_config.json"
    ):
        check_folder(open_adapter(adapter), names, CONFIG)
    save_file(
        tensors | {first.replace("lora_A", "lora_magnitude_vector"): torch.ones(3)},
        adapter / WEIGHTS,
    )
    with pytest.raises(ValueError, match=r"holds .*lora_magnitude_vector"):
        check_folder(open_adapter(adapter), names, CONFIG)


def test_a_pickle_is_refused(adapter):
    """Reading one can run any code."""
    (adapter / WEIGHTS).rename(adapter / "adapter_model.bin")
    with pytest.raises(ValueError, match=r"must hold adapter_model.safetensors, .* pickle"):
        open_adapter(adapter)


def test_shapes_are_those_of_peft():
    """A [rank, in] and B [out, rank] of each module on its own; what is trained whole keeps its
    shape.
    """
    lora = LoraConfig(
        lora=True,
        lora_rank=3,
        lora_target_modules=("v_proj", "o_proj"),
        lora_modules_to_save=("lm_head",),
    )
    names = AdapterWeights(weights(num_layers=1), lora)
    layer = "base_model.model.model.layers.0.self_attn"
    assert {part.name: part.shape for weight in names.all() for part in weight.parts} == {
        "base_model.model.lm_head.weight": (40, 16),
        f"{layer}.v_proj.lora_A.weight": (3, 16),
        f"{layer}.v_proj.lora_B.weight": (8, 3),
        f"{layer}.o_proj.lora_A.weight": (3, 16),
        f"{layer}.o_proj.lora_B.weight": (16, 3),
    }


def test_tied_embeddings_are_trained_by_both_names(tmp_path):
    """With one alone, peft would compute with the trained embedding at one end and the base's at
    the other.
    """
    lora = LoraConfig(lora=True, lora_rank=3, lora_modules_to_save=("embed_tokens",))
    names = AdapterWeights(weights(untie_embeddings_and_output_weights=False), lora)
    write_adapter_config(tmp_path, lora, names, "base")
    assert json.loads((tmp_path / CONFIG).read_text())["modules_to_save"] == [
        "embed_tokens",
        "lm_head",
    ]
    tensors = {p.name: torch.ones(p.shape) for w in names.all() for p in w.parts}
    head = "base_model.model.lm_head.weight"
    assert names.tied == (head, "base_model.model.model.embed_tokens.weight")
    for change, message in (
        ({}, None),
        ({head: torch.zeros(40, 16)}, "that differ"),
        ({head: None}, f"lacks {head}"),
    ):
        save_file(
            {n: t for n, t in (tensors | change).items() if t is not None}, tmp_path / WEIGHTS
        )
        if message is None:
            check_folder(open_adapter(tmp_path), names, CONFIG)
        else:
            with pytest.raises(ValueError, match=message):
                check_folder(open_adapter(tmp_path), names, CONFIG)


def gpt_oss(**changes):
    """The tensors of a gpt-oss of one layer with three experts, and an adapter's of rank 2."""
    config = parse(
        "--num-layers 1 --hidden-size 8 --num-attention-heads 2 --num-experts 3 "
        "--moe-ffn-hidden-size 6 --ffn-hidden-size 6 --softmax-type learnable"
    ).model
    lora = LoraConfig(lora=True, lora_rank=2, **changes)
    return AdapterWeights(Weights(config, 64, FAMILIES["gpt_oss"]), lora), lora


def test_experts_of_one_tensor_have_adapters_of_one_tensor(tmp_path):
    """PEFT wraps the module that holds the experts, once for each parameter: names in another order
    would load the adapter of one beside the other.
    """
    names, lora = gpt_oss()
    shapes = {part.name: part.stored_shape for weight in names.all() for part in weight.parts}
    experts = "base_model.model.model.layers.0.mlp.experts"
    assert {name: shape for name, shape in shapes.items() if experts in name} == {
        f"{experts}.base_layer.lora_A.weight": (3 * 2, 8),
        f"{experts}.base_layer.lora_B.weight": (12, 2 * 3),
        f"{experts}.lora_A.weight": (3 * 2, 6),
        f"{experts}.lora_B.weight": (8, 2 * 3),
    }
    write_adapter_config(tmp_path, lora, names, "base")
    told = json.loads((tmp_path / CONFIG).read_text())
    assert told["target_parameters"] == ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    assert told["target_modules"] == ["k_proj", "o_proj", "q_proj", "v_proj"]
    save_file({name: torch.ones(shape) for name, shape in shapes.items()}, tmp_path / WEIGHTS)
    found = options_of_adapter(tmp_path)["lora_target_modules"]
    again = LoraConfig(lora=True, lora_rank=2, lora_target_modules=tuple(found))
    assert again.identity() == lora.identity()
    gates, _ = gpt_oss(lora_target_modules=("gate_up_proj",))
    assert gates.target_parameters() == ["mlp.experts.gate_up_proj"]
    assert {part.name for weight in gates.all() for part in weight.parts} == {
        f"{experts}.lora_{which}.weight" for which in "AB"
    }


def qwen_moe(**changes):
    """The tensors of a Qwen2-MoE of one layer with two experts and a shared one, and its
    adapter's.
    """
    model = parse(
        "--num-layers 1 --hidden-size 8 --num-attention-heads 2 --num-experts 2 --swiglu "
        "--moe-ffn-hidden-size 6 --ffn-hidden-size 6 --moe-shared-expert-gate "
        "--moe-shared-expert-intermediate-size 10 --position-embedding-type rope "
        "--normalization RMSNorm --disable-bias-linear --add-qkv-bias "
        "--untie-embeddings-and-output-weights"
    ).model
    lora = LoraConfig(lora=True, lora_rank=2, lora_target_modules=("up_proj",), **changes)
    return AdapterWeights(Weights(model, 64, FAMILIES["qwen2_moe"]), lora)


@pytest.mark.parametrize(
    ("kind", "numbers"), [("shared", [10]), ("routed-only", [6, 6]), ("all", [10, 6, 6])]
)
def test_an_adapter_may_leave_out_experts_of_a_kind(tmp_path, kind, numbers):
    """peft's all-linear leaves out experts of one tensor; said to lack them, no such adapter could
    be continued.
    """
    names = qwen_moe(lora_experts=kind)
    shapes = {part.name: part.shape for weight in names.all() for part in weight.parts}
    assert sorted(shape[0] for name, shape in shapes.items() if "lora_B" in name) == sorted(numbers)
    write_adapter_config(tmp_path, LORA, names, "base")
    save_file({name: torch.ones(shape) for name, shape in shapes.items()}, tmp_path / WEIGHTS)
    assert options_of_adapter(tmp_path)["lora_experts"] == kind
    check_folder(open_adapter(tmp_path), names, CONFIG)


def test_an_adapter_beside_another_layer_is_refused_by_its_name(adapter):
    """An encoder's, for example."""
    name = "base_model.model.model.layers.0.mlp.dense_h_to_4h"
    save_file({f"{name}.lora_{x}.weight": torch.ones(3, 3) for x in "AB"}, adapter / WEIGHTS)
    with pytest.raises(ValueError, match=r"an adapter beside 'dense_h_to_4h', but .* merge"):
        options_of_adapter(adapter)


ALL_LINEAR: dict[str, Any] = {
    "lora_rank": 3,
    "lora_alpha": 5,
    "lora_target_modules": (
        *("q_proj", "k_proj", "v_proj", "o_proj"),
        *("gate", "gate_up_proj", "down_proj"),
    ),
    "lora_experts": "routed-only",
    "lora_gate_up": "doubled",
}


def test_all_linear_of_a_mixture_is_that_of_peft(tmp_path):
    """Names, ranks and patterns are those that peft 0.21.2 writes for a Qwen3-MoE; read again, the
    options are the same.
    """
    model = parse(
        "--num-layers 1 --hidden-size 8 --num-attention-heads 2 --num-experts 4 --swiglu "
        "--moe-ffn-hidden-size 6 --ffn-hidden-size 6 --qk-layernorm --normalization RMSNorm "
        "--position-embedding-type rope --disable-bias-linear"
    ).model
    lora = LoraConfig(lora=True, **ALL_LINEAR)
    names = AdapterWeights(Weights(model, 64, FAMILIES["qwen3_moe"]), lora)
    shapes = {part.name: part.stored_shape for weight in names.all() for part in weight.parts}
    mlp = "base_model.model.model.layers.0.mlp"
    assert {name: shape for name, shape in shapes.items() if mlp in name} == {
        f"{mlp}.gate.lora_A.weight": (3, 8),
        f"{mlp}.gate.lora_B.weight": (4, 3),
        f"{mlp}.experts.base_layer.lora_A.weight": (4 * 6, 8),
        f"{mlp}.experts.base_layer.lora_B.weight": (12, 6 * 4),
        f"{mlp}.experts.lora_A.weight": (4 * 3, 6),
        f"{mlp}.experts.lora_B.weight": (8, 3 * 4),
    }
    write_adapter_config(tmp_path, lora, names, "base")
    told = json.loads((tmp_path / CONFIG).read_text())
    assert told["target_modules"] == ["k_proj", "o_proj", "q_proj", "v_proj"]
    assert told["target_parameters"] == ["gate_up_proj", "down_proj", "gate.weight"]
    assert told["rank_pattern"] == {r".*\.gate_up_proj": 6}
    assert told["alpha_pattern"] == {r".*\.gate_up_proj": 10}
    save_file({name: torch.ones(shape) for name, shape in shapes.items()}, tmp_path / WEIGHTS)
    again = LoraConfig(lora=True, **options_of_adapter(tmp_path))
    assert again.targets == lora.targets
    assert again.identity(has_experts=True) == lora.identity(has_experts=True)
    assert notes_on_adapter(tmp_path) == []
    change(tmp_path, alpha_pattern={r".*\.gate_up_proj": 5})
    with pytest.raises(ValueError, match=r"rank_pattern .* merge it into its model with peft"):
        options_of_adapter(tmp_path)


def test_dropout_beside_a_router_is_refused():
    """PEFT loads no such adapter: it adds the product of A and B to the weights."""
    base = Weights(qwen_moe()._weights._model, VOCAB_SIZE, FAMILIES["qwen3_moe"])
    lora = LoraConfig(lora=True, lora_target_modules=("gate",), lora_dropout=0.1)
    names = AdapterWeights(base, lora)
    with pytest.raises(ValueError, match="--lora-dropout must be 0 with adapters of a router"):
        list(names.all())


@pytest.mark.parametrize(
    ("family", "kind", "way_out"),
    [
        ("qwen2_moe", "all", "--lora-experts shared"),
        ("qwen2_moe", "shared", ""),
        ("deepseek_v3", "all", "--lora-experts routed-only"),
        ("deepseek_v3", "routed-only", ""),
    ],
)
def test_adapters_that_peft_leaves_out_are_noted(family, kind, way_out):
    """Served by it, a model would lack them, in silence."""
    base = Weights(qwen_moe()._weights._model, 64, FAMILIES[family])
    lora = LoraConfig(lora=True, lora_target_modules=("up_proj",), lora_experts=kind)
    note = note_for_peft(base, lora)
    assert way_out in note
    assert bool(note) == bool(way_out)


def test_dropout_beside_experts_of_one_tensor_is_refused():
    """PEFT loads no such adapter: it adds the product of A and B to the tensor."""
    names, _ = gpt_oss(lora_dropout=0.1)
    with pytest.raises(ValueError, match="--lora-dropout must be 0"):
        list(names.all())
    names, _ = gpt_oss(lora_dropout=0.1, lora_target_modules=("q_proj",))
    assert len(list(names.all())) == 2


@pytest.mark.parametrize(
    ("outer", "text", "released"),
    [
        ("mistral3", "mistral", "language_model.model."),
        ("qwen2_5_vl", "qwen2_5_vl_text", "model."),
        ("qwen3_vl", "qwen3_vl_text", "language_model."),
    ],
)
def test_adapters_of_multimodal_models_have_their_names_in_memory(tmp_path, outer, text, released):
    """peft raises for whole embeddings by the names of released files; it was written so once."""
    config = {"model_type": outer, "text_config": {"model_type": text}}
    family, _, prefix = language_model(config)
    lora = LoraConfig(**{**vars(LORA), "lora_modules_to_save": ("lm_head",)})
    names = AdapterWeights(Weights(weights()._model, VOCAB_SIZE, family, prefix), lora)
    tensors = {p.name: torch.ones(p.shape) for w in names.all() for p in w.parts}
    begins = {name.split(".layers.")[0] for name in tensors}
    assert begins == {
        "base_model.model.model.language_model",
        "base_model.model.lm_head.weight",
    }
    excluded = names.excluded_modules()
    assert excluded is not None
    assert re.fullmatch(excluded, "model.visual.blocks.0.mlp.up_proj")
    assert not re.fullmatch(excluded, "model.language_model.layers.0.mlp.up_proj")
    as_released = {
        name.replace("model.model.language_model.", f"model.{released}"): tensor
        for name, tensor in tensors.items()
    }
    for spelling in (tensors, as_released):
        save_file(spelling, tmp_path / WEIGHTS)
        check_folder(open_adapter(tmp_path, naming(config, ()).in_memory), names, CONFIG)
