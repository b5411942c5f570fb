"""Layout options beside `plan --auto-layout`."""

import pytest

from megatron.planner.layout.search import enumerated
from megatron.sft.commands.layout_flags import FixedLayout
from tests.unit_tests.sft.command_line import BASE, parse

LAYOUTS = list(
    enumerated(4, num_layers=8, num_experts=None, capacities=lambda tensor, context: [128, 256])
)


def read(arguments: str, in_file: str = "") -> FixedLayout:
    config = parse(f"--sequence-packing {arguments} {in_file}", 8)
    return FixedLayout.read(config, [*BASE.split(), *arguments.split()])


@pytest.mark.parametrize(
    ("arguments", "is_kept"),
    [
        ("--tensor-model-parallel-size=2", lambda one: one.tp == 2),
        ("--no-sequence-parallel", lambda one: one.tp == 1),
        ("--recompute-granularity full", lambda one: one.recompute == "full"),
        ("--max-seqlen-per-dp-cp-rank 256", lambda one: one.capacity == 256),
        ("--no-use-distributed-optimizer", lambda one: not one.shards_optimizer),
        (
            "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 2",
            lambda one: (one.pp, one.vpp) == (2, 2),
        ),
        ("--context-parallel-size 1", lambda one: one.cp == 1),
    ],
)
def test_layouts_have_what_the_command_line_says(arguments, is_kept):
    """The search took its own sizes in silence, and the fastest were for another cluster."""
    kept = list(read(arguments).matching(LAYOUTS, num_layers=8))
    assert kept == list(filter(is_kept, LAYOUTS))
    assert 0 < len(kept) < len(LAYOUTS)


def test_a_layout_that_no_search_has_is_refused():
    """An empty list would be taken for "nothing fits"."""
    with pytest.raises(ValueError, match="no layout with --tensor-model-parallel-size 8; change"):
        list(read("--tensor-model-parallel-size 8").matching(LAYOUTS, num_layers=8))


def test_the_layout_of_a_run_file_is_searched_for_and_said():
    """It is the run whose layout is asked for: kept, nothing would be left to search."""
    fixed = read("--lr 1e-4", in_file="--tensor-model-parallel-size 2 --sequence-parallel")
    assert fixed.values == {}
    assert fixed.notes() == [
        "note: --tensor-model-parallel-size, --sequence-parallel of --config are searched for; "
        "pass them as flags to keep them"
    ]
    assert read("--lr 1e-4").notes() == []
