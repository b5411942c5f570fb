"""Preference losses in parallel layouts, with the reference's passes, trained for two steps beside
answers that are computed one by one.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest

from megatron.sft.training.passes import ImitationObjective
from tests.functional_tests.layouts import MODELS, Layout
from tests.functional_tests.oracle import (
    RankStep,
    assemble,
    assert_same,
    train_one_by_one,
    train_packed,
)
from tests.functional_tests.preference import (
    CASES,
    OneByOne,
    PreferencePasses,
    batches_of,
    encoded,
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


@pytest.mark.parametrize("name", ["sigmoid", "reward"])
def test_balancing_losses_of_experts_keep_their_scale(name: str) -> None:
    """Their gradients are divided by what a loss counts: where pairs are, they are as many times
    too strong as a pair has tokens, which no preference loss shows.
    """
    case, layout = CASES[name], Layout(model="experts")
    batches = batches_of(case, num_steps=1, count=4)
    found = run_ranks(balanced_steps, 1, f"{layout.flags} {scores_of(case)}", name, batches)
    steps = [assemble(of_ranks)[0].gradients for of_ranks in zip(*found, strict=True)]
    router = "decoder.layers.0.mlp.router.weight"
    pairs, imitated = (steps[i][router] - steps[i + 1][router] for i in (0, 2))
    fields = [encoded(record, case.options).fields for record in batches[0]]
    num_tokens = sum(int(one["path_answer_tokens"].sum()) for one in fields)
    # Of reward models supervised fine-tuning would count the scored tokens, one of each answer.
    num_imitated = 2 * len(fields) if name == "reward" else num_tokens
    expected = imitated * num_imitated / num_tokens
    assert expected.abs().max() > 1e-6
    assert (pairs - expected).abs().max() <= 1e-12 * expected.abs().max()


def balanced_steps(flags: str, name: str, batches: Sequence[Sequence[Any]]) -> list[list[RankStep]]:
    """A step of a preference loss with a balancing loss and without, and then of supervised
    fine-tuning on the same packs.
    """
    of_pairs = partial(PreferencePasses, CASES[name].options)
    imitated = partial(of_pairs, objective=ImitationObjective())
    return [
        train_packed(f"{flags} --moe-aux-loss-coeff {coefficient}", batches, passes=passes)
        for passes in (of_pairs, imitated)
        for coefficient in (0.5, 0)
    ]
