"""The options of LoRA: which layers, what they are multiplied by, what is refused."""

import pytest

from megatron.sft.options.lora import LoraConfig
from tests.unit_tests.sft.command_line import assert_refused, parse

GROUPED = "--group-query-attention --num-query-groups 2"
CONTRADICTIONS = [
    ("--lora-rank 8", 1, ["--lora-rank", "needs --lora"]),
    ("--lora-merge", 1, ["--lora-merge", "needs --lora"]),
    ("--lora --lora-merge", 1, ["--lora-merge", "needs --save-hf"]),
    ("--lora --lora-rank 0", 1, ["--lora-rank", "at least 1"]),
    ("--lora --lora-alpha -1", 1, ["--lora-alpha", "above 0"]),
    ("--lora --lora-dropout 1", 1, ["--lora-dropout", "below 1"]),
    (
        "--lora --lora-target-modules q_proj query",
        1,
        ["--lora-target-modules", "but has query", "q_proj"],
    ),
    (
        "--lora --lora-modules-to-save norm",
        1,
        ["--lora-modules-to-save", "but has norm", "embed_tokens"],
    ),
    ("--lora --mtp-num-layers 1 --position-embedding-type rope", 1, ["--mtp-num-layers"]),
    (
        f"--lora --lora-target-modules q_proj v_proj {GROUPED} --tensor-model-parallel-size 4",
        4,
        ["k_proj", "2 groups"],
    ),
    ("--lora --lora-adapter nowhere", 1, ["--lora-adapter nowhere", "adapter_config.json"]),
]


@pytest.mark.parametrize(("arguments", "world_size", "words"), CONTRADICTIONS)
def test_contradiction_is_refused_with_a_way_out(arguments, world_size, words):
    """An option that means nothing is forgotten in silence, and its user waits for what it says."""
    assert_refused(arguments, world_size, words)


@pytest.mark.parametrize(
    "layout", ["--tensor-model-parallel-size 2", "--tensor-model-parallel-size 4 --lora-rank 2"]
)
def test_layouts_that_share_adapters_evenly_are_taken(layout):
    """A refusal that is too wide takes layouts from those who could train in them."""
    modules = (
        "q_proj v_proj" if layout.endswith("2") and "4" not in layout else "q_proj k_proj v_proj"
    )
    assert parse(f"--lora {layout} {GROUPED} --lora-target-modules {modules}", 4).lora.lora


@pytest.mark.parametrize("given", [(), ("all-linear",), ("down_proj", "all-linear")])
def test_all_layers_by_default(given):
    """PEFT's word for them, or none."""
    lora = LoraConfig(lora=True, lora_target_modules=given)
    assert lora.targets == (
        "q_proj",
        "k_proj",
        "v_proj",
        "o_proj",
        "gate_proj",
        "up_proj",
        "down_proj",
        "in_proj_qkv",
        "in_proj_z",
        "in_proj_b",
        "in_proj_a",
        "out_proj",
        "q_a_proj",
        "q_b_proj",
        "kv_a_proj_with_mqa",
        "kv_b_proj",
    )
    assert [lora.targets_in(name) for name in ("qkv", "fc1", "router", "in_proj")] == [
        (0, 1, 2),
        (0, 1),
        (),
        (0, 1, 2, 3),
    ]


def test_names_of_phi_are_all_that_they_hold():
    """Its files have queries, keys and values in one, and gate and up."""
    lora = LoraConfig(lora=True, lora_target_modules=("qkv_proj", "gate_up_proj"))
    assert lora.targets == ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")


def test_names_of_mixtral_are_the_same_layers():
    """Its files call gate, down and up w1, w2 and w3."""
    lora = LoraConfig(lora=True, lora_target_modules=("w3", "v_proj", "w2"))
    assert lora.targets == ("v_proj", "up_proj", "down_proj")
    assert lora.targets_in("qkv") == (2,)
    assert lora.targets_in("fc1") == (1,)


def test_scale():
    """alpha / rank, or by the root of the rank."""
    assert LoraConfig(lora=True, lora_rank=16, lora_alpha=8).scale == 0.5
    assert LoraConfig(lora=True, lora_rank=16, lora_alpha=8, lora_rslora=True).scale == 2.0


def test_what_a_checkpoint_must_share():
    """Other ranks or layers have no place for its tensors; dropout may change."""
    one, other = (
        LoraConfig(lora=True, lora_dropout=d, lora_target_modules=("v_proj", "q_proj"))
        for d in (0.0, 0.5)
    )
    assert one.identity() == other.identity()
    assert one.identity()["lora_target_modules"] == ["q_proj", "v_proj"]
    assert LoraConfig().identity(parts=["delta_net"]) == {"lora": False}


def test_checkpoints_from_before_delta_nets_had_adapters_are_continued():
    """They name the seven modules of all linear layers, which are all of a model without."""
    every = LoraConfig(lora=True)
    assert "in_proj_qkv" in every.targets
    seven = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    assert every.identity()["lora_target_modules"] == seven
    assert "lora_delta_net_modules" not in every.identity()
    of_next = LoraConfig(lora=True, lora_target_modules=("in_proj_ba", "q_proj"))
    assert of_next.identity(parts=["delta_net"])["lora_delta_net_modules"] == [
        "in_proj_b",
        "in_proj_a",
    ]


def test_experts_that_are_left_out():
    """peft targets experts of one tensor apart from the shared ones, which are modules."""
    shared, routed = (LoraConfig(lora=True, lora_experts=kind) for kind in ("shared", "routed"))
    parts = ("experts.fc1.weight", "shared.fc1.weight", "mlp.fc1.weight", "attention.qkv.weight")
    assert [shared.covers(part) for part in parts] == [False, True, True, True]
    assert [routed.covers(part) for part in parts] == [True, False, True, True]
    assert all(map(LoraConfig(lora=True).covers, parts))


def test_a_checkpoint_names_the_experts_that_have_adapters():
    """Adapters beside attention alone would continue as ones beside all experts. Without shared
    experts, the routed ones are all.
    """
    every, shared = LoraConfig(lora=True), LoraConfig(lora=True, lora_experts="shared")
    routed = LoraConfig(lora=True, lora_experts="routed")
    assert "lora_experts" not in shared.identity()
    assert shared.identity(has_experts=True)["lora_experts"] == "shared"
    assert routed.identity(has_experts=True) == every.identity(has_experts=True)
    of_both = routed.identity(has_experts=True, has_shared_experts=True)
    assert of_both["lora_experts"] == "routed"
