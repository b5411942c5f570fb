"""Layouts of the search as options of training."""

from __future__ import annotations

import pytest

from megatron.planner.layout.search import enumerated
from megatron.sft.arguments.parse import parse_config
from megatron.sft.fit.stages import fullest_of, stages_of

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")
MODEL = (
    "--num-layers 14 --hidden-size 48 --num-attention-heads 12 --bf16 --mock-data --seq-length 64 "
    "--vocab-size 96 --train-iters 1 --global-batch-size 48 --lr 1e-3"
)


def test_flags_make_the_layout_whose_memory_was_traced() -> None:
    """A run by the printed flags would hold something else. Stages of unequal layers are among
    them."""
    from megatron.sft.fit.layout_search import config_of, is_valid

    base = parse_config(MODEL.split(), 1)
    layouts = enumerated(12, num_layers=14, num_experts=None, capacities=lambda tp, cp: [64])
    # One of each division of the layers: parsing takes 20 ms.
    found = {one.stage_layers: one for one in layouts if is_valid(base, one)}.values()
    assert {one.pp for one in found} == {1, 2, 3, 4, 6}
    assert any(one.first_layers for one in found)
    assert any(one.vpp > 1 for one in found)
    for one in found:
        config = parse_config(f"{MODEL} {one.flags(14)}".split(), 12)
        expected = config_of(base, one)
        assert (config.parallel, config.packing, config.model) == (
            expected.parallel,
            expected.packing,
            expected.model,
        )
        assert config.layers_of_parts == one.stage_layers.of_parts(14)


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("", [0, 3]),  # 3 3 3 3
        ("--decoder-last-pipeline-num-layers 2", [0, 3]),
        ("--account-for-embedding-in-pipeline-split", [0, 1, 3]),  # 2 3 3 3
    ],
)
def test_stages_that_hold_less_than_another_are_not_traced(flags: str, expected: list[int]) -> None:
    """Each interleaved stage takes seconds: of sixteen two are enough."""
    num_layers = 12 - ("last" in flags) - ("embedding" in flags)
    model = MODEL.replace("--num-layers 14", f"--num-layers {num_layers}")
    config = parse_config(f"{model} --pipeline-model-parallel-size 4 {flags}".split(), 4)
    found = fullest_of(config, stages_of(config, 4))
    assert [stage.number for stage in found] == expected
