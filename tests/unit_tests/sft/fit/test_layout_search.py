"""Layouts of the search as options of training."""

from __future__ import annotations

import pytest

from megatron.planner.layout.search import enumerated
from megatron.sft.arguments.parse import parse_config

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
