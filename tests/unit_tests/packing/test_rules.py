"""Refusals as data: one evaluator, and one wording for every program."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from megatron.packing.flags import FlagError
from megatron.packing.plugin_checks import check_config
from megatron.packing.rules import Layout, Rule, at_least, check_rules, needs
from megatron.planner.layout.search import Candidate
from megatron.planner.plan_options import LayoutOptions, ModelOptions
from megatron.sft.fit.layout_search import is_valid
from tests.unit_tests.packing.plugged import make_config
from tests.unit_tests.sft.command_line import parse

HEADS = Rule(
    lambda options, layout: options.heads % layout.tensor,
    "{heads} must be a multiple of {tensor}, not {tensor.value}",
    "lower {tensor.flag}",
)
DELTA_NET: dict[str, Any] = {
    "num_layers": 2,
    "hidden_size": 8,
    "num_attention_heads": 4,
    "linear_attention_freq": (1, 0),
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
FLAGS = " ".join(
    f"--{name.replace('_', '-')} {' '.join(map(str, value)) if type(value) is tuple else value}"
    for name, value in DELTA_NET.items()
)


def test_a_rule_waits_for_all_its_facts():
    """A rule of a layout, asked where only options are known, would read nothing."""
    options: Any = SimpleNamespace(heads=3, rows=(1, 2))
    check_rules([HEADS], options=options)
    check_rules([HEADS], options=options, layout=Layout(tensor=3))
    words = "--heads 3 must be a multiple of --tensor-model-parallel-size 2, not 2; lower --tensor"
    with pytest.raises(ValueError, match=words):
        check_rules([HEADS], options=options, layout=Layout(tensor=2))


def test_rules_of_single_options():
    """0 is below 1 as -1 is; what is absent is not."""
    for heads, is_refused in ((None, False), (1, False), (0, True)):
        options = SimpleNamespace(heads=heads)
        (rule,) = at_least(1, "heads")
        assert (rule.refusal({"options": options}) is not None) == is_refused
    given: Any = SimpleNamespace(heads=(1, 0), width=None, depth=2)
    rules = list(needs("heads", "depth", "width"))
    refusals = [rule.refusal({"options": given}) for rule in rules]
    assert refusals == [None, "--heads needs --width; pass it"]
    given.heads = ()
    assert not any(rule.refusal({"options": given}) for rule in rules)


WHY = "--linear-num-key-heads 2 must be a multiple of {} times {}, whose ranks share the heads"
MEGATRON = WHY.format("--tensor-model-parallel-size 2", "--context-parallel-size 2")


def test_each_program_refuses_a_part_in_the_same_words():
    """Training would end minutes later, while it builds; `plan` and the search for layouts would
    recommend what no run starts.
    """
    layout = "--tensor-model-parallel-size 2 --context-parallel-size 2"
    base = f"{FLAGS} --seq-length 64 --train-iters 1 --global-batch-size 8 --lr 1 --mock-data"
    with pytest.raises(FlagError, match=MEGATRON):  # also fit
        parse(layout, 4, base)
    with pytest.raises(ValueError, match=WHY.format("--tp 2", "--cp 2")):
        LayoutOptions(tp=2, cp=2).check(ModelOptions(**DELTA_NET))
    config = make_config(
        **DELTA_NET, tensor_model_parallel_size=2, context_parallel_size=2, num_moe_experts=None
    )
    config.sequence_packing_scheduler = "default"
    with pytest.raises(ValueError, match=MEGATRON):  # the plug-in
        check_config(config)
    whole = Candidate(dp=2, tp=2, capacity=64)
    run = parse("", 1, base)
    assert is_valid(run, whole)
    assert not is_valid(run, replace(whole, dp=1, cp=2))


def test_multi_token_prediction_behind_a_delta_net_is_refused():
    """megatron-core ends in an assertion about masks, after all weights are made."""
    with pytest.raises(
        FlagError, match=r"--mtp-num-layers 1 repeats the last layer, .*; drop --mtp"
    ):
        parse(
            "--mtp-num-layers 1 --position-embedding-type rope",
            base=f"{FLAGS.replace('1 0', '0 1')} --seq-length 64 --train-iters 1 "
            "--global-batch-size 8 --lr 1 --mock-data",
        )
