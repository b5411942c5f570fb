"""In float32 and bfloat16 a layout adds no more rounding than the sequences have when each runs alone."""

from __future__ import annotations

from functools import lru_cache

import pytest
import torch

from tests.functional_tests.layouts import MODELS, Layout
from tests.functional_tests.oracle import (
    Step,
    assemble,
    largest_difference,
    sequences,
    train_one_by_one,
    train_packed,
)
from tests.functional_tests.ranks import run_ranks

LAYOUTS = [
    Layout(),
    Layout(tensor=2),
    Layout(tensor=2, sequence=True, pipeline=2, model="grouped"),
    Layout(pipeline=2, interleaved=True, data=2, model="grouped"),
    Layout(context=2, data=2, model="tied"),
    Layout(pipeline=4, model="tied"),
    Layout(data=2, model="further", optimizer="sharded"),
]
BATCHES = [sequences(3, (40, 3, 17, 64, 1, 25, 8, 33))]
TIMES_ALONE = 3.0
"""Other orders of adding round differently; more than this would be a cast in the wrong place."""


@lru_cache(maxsize=16)
def alone(model: str, flags: str = "", dtype: torch.dtype = torch.float64) -> list[Step]:
    return run_ranks(train_one_by_one, 1, f"{MODELS[model]} {flags}", BATCHES, dtype)[0]


@pytest.mark.parametrize("flags", ["", "--bf16"], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_lower_precision_differs_by_its_rounding(layout: Layout, flags: str) -> None:
    """In float64 a cast in the wrong place is invisible. Experts are left out: rounding sends tokens to other ones."""
    exact = alone(layout.model)
    rounding = largest_difference(alone(layout.model, flags, torch.float32), exact)
    ranks = run_ranks(
        train_packed, layout.world_size, f"{layout.flags} {flags}", BATCHES, "even", "plain", torch.float32
    )
    difference = largest_difference(assemble(ranks, rounding), exact)
    assert difference <= TIMES_ALONE * rounding, f"{difference:.1e}, but alone {rounding:.1e}"
    assert rounding < (0.2 if flags else 1e-4)
