"""Batches that break packers: each trains like its sequences alone, in several layouts, and none
hangs. Those that are drawn alike are steps of one run.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import pytest

from tests.functional_tests.layouts import MODELS, Layout
from tests.functional_tests.oracle import (
    Placement,
    Sample,
    Shape,
    Step,
    assemble,
    assert_same,
    draws_of,
    sequences,
    train_one_by_one,
    train_packed,
)
from tests.functional_tests.ranks import run_ranks

LAYOUTS = [
    Layout(data=3, model="grouped"),
    Layout(data=2, optimizer="sharded"),
    Layout(context=2, data=2, model="tied"),
    Layout(tensor=2, sequence=True, pipeline=2, model="grouped"),
    Layout(data=2, model="experts"),
]


class Case(NamedTuple):
    """Lengths of a batch, where its samples are, and which tokens count."""

    lengths: Sequence[int]
    placement: Placement = "even"
    shape: Shape = "plain"
    mask: str = "random"
    scheduler: str = "default"


CASES = {
    "fewer sequences than ranks": Case((9, 30)),
    "one sequence": Case((23,)),
    "all of length one": Case((1,) * 7),
    "all equal": Case((16,) * 8),
    "one giant": Case((64, 1, 1, 2, 3)),
    "lengths divisible by nothing": Case((7, 11, 13, 17, 19, 23, 29)),
    "all samples on one rank": Case((5, 30, 64, 2, 17), placement="last rank"),
    "packed samples with repeated cu_seqlens": Case((5, 30, 9, 2, 17), shape="packed"),
    "padded samples": Case((5, 30, 64, 2, 17), shape="padded"),
    "duplicates": Case((21, 21, 21, 21), mask="same sample"),
    "one rank and its packs masked": Case(
        (20, 21, 22, 23, 24, 25), mask="first half masked", scheduler="empty"
    ),
    "one shard of each sequence counts": Case((20, 40, 64, 8), mask="first tokens only"),
    "all masked": Case((12, 40, 3, 25), mask="none"),
}


def batch_of(case: Case) -> list[Sample]:
    samples = sequences(7, case.lengths)
    if case.mask == "same sample":
        return [samples[0]] * len(samples)
    for number, sample in enumerate(samples):
        keep = np.ones(len(sample.tokens), dtype=bool)
        if case.mask == "none" or (case.mask == "first half masked" and number < len(samples) // 2):
            keep[:] = False
        if case.mask == "first tokens only":
            keep[2:] = False
        samples[number] = sample._replace(loss_mask=sample.loss_mask * keep)
    return samples


def runs() -> list[tuple[str, ...]]:
    """The names of the cases that a run can go through one after the other."""
    found: dict[tuple[str, ...], list[str]] = {}
    for name, case in CASES.items():
        found.setdefault((case.placement, case.shape, case.scheduler), []).append(name)
    return [tuple(names) for names in found.values()]


def batches_of(names: Sequence[str]) -> list[list[Sample]]:
    """The hostile ones and a plain one, so that the step after each trains as well."""
    return [batch_of(CASES[name]) for name in names] + [sequences(8, (30, 5, 12, 40, 9, 22))]


@lru_cache(maxsize=len(CASES) * len(MODELS))
def reference(names: tuple[str, ...], model: str) -> list[Step]:
    return run_ranks(train_one_by_one, 1, model, batches_of(names))[0]


# Which shape samples have, and who draws them, is over before anything depends on more of the
# layout.
CHOSEN = [
    (names, layout)
    for number, names in enumerate(runs())
    for layout in (LAYOUTS[1:3] if number else LAYOUTS)
]


@pytest.mark.parametrize(("names", "layout"), CHOSEN, ids=str)
def test_hostile_batches(names: tuple[str, ...], layout: Layout) -> None:
    """NaN from an empty mean, an idle rank that others wait for, a pad that is attended to: all of
    them seen in the field.
    """
    case, batches = CASES[names[0]], batches_of(names)
    layout = layout._replace(scheduler=case.scheduler)  # `empty` leaves samples where they are
    if case.mask == "first half masked":
        first_share = draws_of(batches[0], case.placement, case.shape, 0, max(layout.data, 2))
        assert not any(sample["loss_mask"].any() for draw in first_share for sample in draw)
    steps = assemble(
        run_ranks(
            train_packed,
            layout.world_size,
            f"{layout.flags} {layout.depth}",
            batches,
            case.placement,
            case.shape,
        )
    )
    assert_same(steps, reference(names, f"{MODELS[layout.model]} {layout.depth}"), relative=1e-12)
    for name, step in zip(names, steps[:-1], strict=True):
        if CASES[name].mask == "none":
            assert step.loss == 0
            assert all(not gradient.any() for gradient in step.gradients.values())
