"""Smaller runs that stand for larger ones have the layers of these."""

from dataclasses import dataclass, field, fields, replace
from typing import Any, get_type_hints

import pytest

from megatron.packing.layers import NUMBERED_LAYERS, options_by_layer
from megatron.sft.fit.stages import at_depth, depths_of, fullest_of, stages_of
from megatron.sft.options.config import SFTConfig
from megatron.sft.options.model import ModelConfig
from tests.unit_tests.sft.command_line import parse


@dataclass(frozen=True, kw_only=True)
class FrozenModel(ModelConfig):
    """Options with a property of numbered layers."""

    frozen_layers: tuple[int, ...] = field(default=(), metadata=NUMBERED_LAYERS)


def frozen(*layers: int, num_layers: int = 12, flags: str = "") -> SFTConfig:
    base = f"--num-layers {num_layers} --hidden-size 64 --num-attention-heads 8 --seq-length 128"
    steps = "--train-iters 10 --global-batch-size 16 --lr 1e-3 --mock-data"
    config = parse(flags, 2, f"{base} {steps}")
    options = {one.name: getattr(config.model, one.name) for one in fields(config.model)}
    return replace(config, model=FrozenModel(**options, frozen_layers=layers))


def test_numbered_layers_are_counted_where_they_are():
    """One of 80 frozen layers, traced at depths 1 to 4, was all of the first trace's layers."""
    config = frozen(0)
    (stage,) = stages_of(config, 1)
    assert depths_of(config, stage) == (2, 3, 4, 5)
    first: Any = at_depth(config, 3).model
    assert (first.num_layers, first.frozen_layers) == (3, (0,))
    assert depths_of(frozen(11), stage) == ()
    every_other = frozen(0, 2, 4, 6, 8, 10)
    assert options_by_layer(every_other.model)[:3] == [(True,), (False,), (True,)]
    assert depths_of(every_other, stage) == (2, 4, 6, 8)
    shallow: Any = at_depth(every_other, 4).model
    assert (shallow.num_layers, shallow.frozen_layers) == (4, (0, 2))
    halves = frozen(0, 1, 2, 3, 4, 5, flags="--pipeline-model-parallel-size 2")
    assert len(fullest_of(halves, stages_of(halves, 2))) == 2
    thirds = frozen(0, 1, 2, 3, flags="--pipeline-model-parallel-size 2")
    assert "frozen_layers" in thirds.model.identity()


@pytest.mark.parametrize(
    "name",
    [name for name, hint in get_type_hints(ModelConfig).items() if hint == tuple[int, ...]],
)
def test_options_of_several_numbers_say_what_they_say_of_layers(name):
    """A new one that says nothing would be taken for a property of no layer."""
    (found,) = (one for one in fields(ModelConfig) if one.name == name)
    assert found.metadata.get("layers") in ("each", "numbered", "none")
