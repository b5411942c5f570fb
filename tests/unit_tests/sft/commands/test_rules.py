"""megatron-sft rules: what is refused, from the rules that refuse it."""

import ast
from pathlib import Path

import pytest

from megatron.packing.rules import at_least, exclude
from megatron.sft.commands.rules import in_words, joined, main

MEGATRON = Path(__file__).parents[4] / "megatron"
RULED = (
    *sorted((MEGATRON / "sft/options").glob("*.py")),
    *(MEGATRON / f"packing/model/{name}.py" for name in ("shape", "options", "layout_rules")),
    *(MEGATRON / f"planner/{name}.py" for name in ("plan_options", "lengths")),
)
"""Files whose checks are rules."""
OTHERS = {
    "a text is read": "read_date read_variables split_shares parse_columns parse_rope_scaling "
    "rope_scaling_of _check_not_nested _scaling_of _attention_factor",
    "files are looked at": "_check_blend weighted_paths weight_schedule expanded one_of "
    "_data_files check_hub_name __post_init__",
    "a package is looked for": "_check_boards _check_png scheduler_of",
    "the longest sequence is known": "capacity",
    "words of rules become a FlagError": "check",
}
"""What has no rule, as more than options is needed -> the functions that refuse by themselves."""


def test_all_are_printed(capsys: pytest.CaptureFixture[str]):
    """A rule whose words name what it does not have would end in a KeyError here, and in a run."""
    main([], "megatron-sft rules")
    out = " ".join(capsys.readouterr().out.split())
    assert "- --expert-model-parallel-size N needs a model of experts; pass --num-experts" in out
    assert "--num-layers N must be a multiple of --pipeline-model-parallel-size N: stages" in out
    assert 'sequence packing needs TransformerConfig cuda_graph_impl="none": packs differ' in out
    assert "start RANKS of them" in out
    for title in (
        "Parallel layouts (training, fit, plan)",
        "Layers that are delta nets (training, fit, plan, plug-in)",
        "What a device must have (training)",
        "Conversation (chat)",
    ):
        assert title in out


def test_those_that_name_a_word(capsys: pytest.CaptureFixture[str]):
    """Whoever asks about LoRA is not shown 200 lines."""
    main(["lora"], "megatron-sft rules")
    lines = capsys.readouterr().out.split("\n- ")
    assert len(lines) > 5
    assert all("lora" in line for line in lines[1:])
    with pytest.raises(SystemExit, match="2"):
        main(["zebra"], "megatron-sft rules")
    assert "no rule names zebra" in capsys.readouterr().err


def test_neighbours_that_say_the_same_are_one_line():
    """Thirty lines of ranges would hide the rest; two sentences must not become one."""
    same = exclude("dp", "cp"), exclude("dp", "cp")
    rules = [*at_least(1, "lr", "seed"), *at_least(2, "tp"), *same]
    assert list(joined(map(in_words, rules))) == [
        "--lr, --seed must be at least 1, but is N",
        "--tp must be at least 2, but is N",
        "--dp and --cp exclude one another; drop one",
        "--dp and --cp exclude one another; drop one",
    ]


def test_checks_of_options_are_rules():
    """A check that is none is not asked by plan, fit and the plug-in, and not on the page."""
    found = {
        function.name
        for path in RULED
        for function in ast.walk(ast.parse(path.read_text()))
        if isinstance(function, ast.FunctionDef)
        and function.name != "__getattr__"
        and any(isinstance(node, ast.Raise) for node in ast.walk(function))
    }
    assert found == set(" ".join(OTHERS.values()).split())
