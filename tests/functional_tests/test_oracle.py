"""The reference itself: rounding stays rounding in it, and one wrong number in a batch or a step
shows.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np
import pytest

from tests.functional_tests.layouts import MODELS
from tests.functional_tests.oracle import (
    SEQ_LENGTH,
    VOCAB_SIZE,
    Numbers,
    Step,
    differences,
    sequences,
    train_one_by_one,
)
from tests.functional_tests.ranks import run_ranks
from tests.functional_tests.test_hostile_batches import batches_of, runs

BATCHES = [sequences(1, (5, 9, 30, 1, 16)), sequences(2, (12, 3, 40))]
TOLERANCE = 1e-12  # of the tests that compare with the reference


@lru_cache(maxsize=1)
def expected() -> list[Step]:
    return run_ranks(train_one_by_one, 1, MODELS["learned"], BATCHES)[0]


@pytest.mark.parametrize("model", ["experts"])
@pytest.mark.parametrize("names", runs()[:1], ids=" - ".join)
def test_rounding_stays_rounding(names: tuple[str, ...], model: str) -> None:
    """A comparison that amplifies rounding passes or fails by the brand of the processor: what Adam
    divides by itself, gradients that are zero in truth. Weights that are off by one rounding stand
    for another processor.
    """
    batches = batches_of(names)
    steps, rounded = (
        run_ranks(train_one_by_one, 1, MODELS[model], batches, Numbers(weights=weights))[0]
        for weights in ("random", "rounded")
    )
    found = [
        value
        for one, other in zip(rounded, steps, strict=True)
        for value in differences(one, other).values()
    ]
    assert 1e-17 < max(found) < TOLERANCE / 10


CHANGES: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "label": ("labels", lambda label: (label + 1) % VOCAB_SIZE),
    "position": ("position_ids", lambda position: (position + 1) % SEQ_LENGTH),
    "weight": ("loss_mask", lambda weight: weight * 1.001),
    "mask": ("loss_mask", lambda weight: 0),
}


@pytest.mark.parametrize("change", CHANGES)
def test_one_wrong_number_in_a_batch_shows(change: str) -> None:
    """Units that are too large would hide what is wrong in one token of one sequence."""
    field, changed = CHANGES[change]
    sample = BATCHES[0][2]
    values = getattr(sample, field).copy()
    token = np.flatnonzero(sample.loss_mask)[3]
    values[token] = changed(values[token])
    batches = [[*BATCHES[0][:2], sample._replace(**{field: values}), *BATCHES[0][3:]]]
    (step,) = run_ranks(train_one_by_one, 1, MODELS["learned"], batches)[0]
    assert max(differences(step, expected()[0]).values()) > 1e6 * TOLERANCE


@pytest.mark.parametrize(
    "flag", ["--adam-beta1 0.91", "--adam-beta2 0.99", "--weight-decay 0.02", "--adam-eps 9e-4"]
)
def test_a_wrong_step_of_the_optimizer_shows(flag: str) -> None:
    """The reference is torch's Adam: with an epsilon that drowned it, any optimizer would pass."""
    steps = run_ranks(train_one_by_one, 1, f"{MODELS['learned']} {flag}", BATCHES)[0]
    found = [
        max(value for what, value in differences(step, other).items() if what.startswith("weight"))
        for step, other in zip(steps, expected(), strict=True)
    ]
    assert max(found) > 1e6 * TOLERANCE
