"""In float32 and bfloat16 a layout adds no more rounding than the sequences have when each runs
alone.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Literal

import pytest
import torch

from tests.functional_tests.layouts import CHOSEN, MATRIX, MODELS, Layout
from tests.functional_tests.oracle import (
    Numbers,
    RankStep,
    Step,
    assemble,
    largest_difference,
    sequences,
    train_one_by_one,
    train_packed,
)
from tests.functional_tests.ranks import run_ranks

LAYOUTS = [  # where a cast is wrong it is so with one feature already
    Layout(tensor=2, sequence=True, pipeline=2, model="grouped"),
    Layout(data=2, model="experts", optimizer="overlapped"),
    Layout(context=2, model="further", optimizer="sharded"),
    Layout(pipeline=2, interleaved=True, model="tied"),
]
CASES = MATRIX if CHOSEN is MATRIX else LAYOUTS
PRECISIONS = {"float32": "", "bfloat16": "--bf16"}
BATCHES = [sequences(3, (40, 3, 17, 64, 1, 25, 8, 33))]
TIMES_ALONE = 2.0
"""Other orders of adding round differently (at most 1.4 times as much was seen); more would be a
cast in the wrong place.
"""
LARGEST = {"": (1e-4, 1e-6), "--bf16": (0.2, 1e-3)}
"""By precision: what the sequences' own rounding must stay below, and the loss of a layout,
relative to the exact.
"""
MARGIN = 10.0
"""Times the rounding of router logits by which the experts of a token must lead."""


@lru_cache(maxsize=16)
def alone(model: str, flags: str = "", dtype: torch.dtype = torch.float64) -> Step:
    numbers = Numbers(dtype, weights_of(model))
    return run_ranks(train_one_by_one, 1, f"{MODELS[model]} {flags}", BATCHES, numbers)[0][0]


@lru_cache
def rounding_alone(flags: str) -> float:
    """The worst of all models. That of one is luck: 4.7e-7 to 9.5e-7 in float32, by model and
    instruction set.
    """
    models = {layout.model for layout in CASES}
    return max(
        largest_difference([alone(model, flags, torch.float32)], [alone(model)]) for model in models
    )


def weights_of(model: str) -> Literal["random", "routed"]:
    return "routed" if model == "experts" else "random"


@pytest.mark.parametrize("layout", CASES, ids=str)
def test_lower_precision_differs_by_its_rounding(layout: Layout) -> None:
    """In float64 a cast in the wrong place is invisible.

    Loss and gradients of a step stay within twice the worst rounding that sequences have when each
    runs alone (that is below 1e-4 in float32, 0.2 in bfloat16, relative to a gradient's largest
    entry), and the loss alone within 1e-6 and 1e-3.
    """
    exact = alone(layout.model)
    ranks = run_ranks(
        train_in_each_precision, layout.world_size, layout.flags, weights_of(layout.model)
    )
    for flags, steps_of_ranks in zip(PRECISIONS.values(), zip(*ranks, strict=True), strict=True):
        rounding = rounding_alone(flags)
        steps = assemble(steps_of_ranks, rounding)
        difference = largest_difference(steps, [exact])
        assert difference <= TIMES_ALONE * rounding, (
            f"{flags}: {difference:.1e}, but alone {rounding:.1e}"
        )
        largest, largest_of_loss = LARGEST[flags]
        assert rounding < largest
        assert abs(steps[0].loss - exact.loss) <= largest_of_loss * exact.loss


def train_in_each_precision(
    flags: str, weights: Literal["random", "routed"]
) -> list[list[RankStep]]:
    numbers = Numbers(torch.float32, weights)
    return [
        train_packed(f"{flags} {more}", BATCHES, "even", "plain", numbers)
        for more in PRECISIONS.values()
    ]


@pytest.mark.parametrize("flags", PRECISIONS.values(), ids=PRECISIONS)
def test_rounding_sends_no_token_to_another_expert(flags: str) -> None:
    """With random weights some tokens have experts of almost equal logits; their gradients would
    differ wholly.
    """
    exact, rounded = (
        alone("experts").router_logits,
        alone("experts", flags, torch.float32).router_logits,
    )
    in_order = exact.sort(dim=-1, descending=True).values
    margin = (
        in_order[:, 1] - in_order[:, 2]
    ).min()  # of the second, the last that is chosen, over the third
    assert margin > MARGIN * (rounded - exact).abs().max()
    chosen = exact.topk(2).indices.flatten().bincount()
    assert len(exact) == 4 * sum(len(sample.tokens) for sample in BATCHES[0])
    assert len(chosen) == 4
    assert chosen.min() > 0.1 * len(exact)
