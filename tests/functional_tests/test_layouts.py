"""Any parallel layout and any packing give the same loss and gradients as each sequence alone in one process."""

from __future__ import annotations

import os
from functools import lru_cache

import pytest

from tests.functional_tests.layouts import COVERING, MATRIX, MODELS, Layout
from tests.functional_tests.oracle import (
    Step,
    assemble,
    assert_same,
    sequences,
    train_one_by_one,
    train_packed,
)
from tests.functional_tests.ranks import run_ranks

LENGTHS = (
    (40, 3, 17, 64, 1, 25, 8, 33, 11, 29, 5, 2),
    (5, 64, 12, 9, 30, 2, 47, 21, 13, 13, 60, 1),
    (64, 64, 7, 7, 19, 50, 3, 11, 22, 8, 31, 4),
)
BATCHES = [sequences(step, lengths) for step, lengths in enumerate(LENGTHS)]
ALL = os.environ.get("LAYOUTS") == "all"


@lru_cache(maxsize=8)
def reference(model: str) -> tuple[Step, ...]:
    return tuple(run_ranks(train_one_by_one, 1, MODELS[model], BATCHES)[0])


@pytest.mark.parametrize("layout", MATRIX if ALL else COVERING, ids=str)
def test_layout_trains_like_each_sequence_alone(layout: Layout) -> None:
    """A wrong group, shard, mask or scale would train on, only worse: nothing else notices."""
    steps = assemble(run_ranks(train_packed, layout.world_size, layout.flags, BATCHES))
    assert_same(steps, reference(layout.model), relative=1e-12)


def test_the_matrix_is_as_large_as_promised() -> None:
    """A filter that became too strict would leave layouts untested without a sign."""
    assert len(MATRIX) >= 80
    assert {layout.world_size for layout in MATRIX} >= {1, 2, 3, 4, 6, 8, 9, 12, 16}
    assert set(COVERING) <= set(MATRIX)
