"""Preference losses in parallel layouts, with the reference's passes, trained for two steps beside
answers that are computed one by one.
"""

from __future__ import annotations

from functools import partial

import pytest

from tests.functional_tests.layouts import MODELS, Layout
from tests.functional_tests.oracle import assemble, assert_same, train_one_by_one, train_packed
from tests.functional_tests.preference import (
    CASES,
    OneByOne,
    PreferencePasses,
    batches_of,
    losses_of,
    scores_of,
)
from tests.functional_tests.ranks import run_ranks

SMALL = [
    (
        Layout(data=2, model="grouped", scheduler="empty"),  # packs without any pair
        "sigmoid, bco_pair, sft",
        "--lora --lora-rank 4",
    ),
    (Layout(context=2, model="grouped"), "orpo", ""),
    (Layout(tensor=2, sequence=True, pipeline=2, model="grouped"), "kto", ""),
    (Layout(tensor=2, sequence=True, model="tied"), "reward", ""),
]


@pytest.mark.parametrize(("layout", "name", "more"), SMALL, ids=str)
def test_a_layout_trains_pairs_as_one_process_does(layout: Layout, name: str, more: str) -> None:
    """Means over a rank's pairs, references of other rows, sums that lack another rank's tokens:
    losses would fall all the same.
    """
    case = CASES[name]
    # With four records each rank's packs have some.
    count, steps = (7 if layout.scheduler == "empty" else 4), (1 if name == "reward" else 2)
    batches = batches_of(case, steps, count)
    model = f"{MODELS[layout.model]} {layout.depth} {more}"
    model, alone = f"{model} {scores_of(case)}", losses_of(case)
    run = partial(train_one_by_one, objective=OneByOne(case, batches), losses_alone=alone)
    reference = run_ranks(run, 1, model, batches)
    flags = f"{layout.flags} {layout.depth} {more} --max-seqlen-per-dp-cp-rank 96 {scores_of(case)}"
    passes = partial(PreferencePasses, case.options)
    ranks = run_ranks(partial(train_packed, passes=passes), layout.world_size, flags, batches)
    assert_same(assemble(ranks), reference[0], relative=1e-12)
