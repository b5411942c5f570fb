"""The load-balancing loss of experts is one per pack, of its real tokens, in every layout."""

from __future__ import annotations

from functools import lru_cache

import pytest

from tests.functional_tests.layouts import MODELS, Layout
from tests.functional_tests.oracle import Step, assemble, assert_same, sequences, train_one_by_one, train_packed
from tests.functional_tests.ranks import run_ranks

BALANCED = "--moe-aux-loss-coeff 0.5"
LAYOUTS = [
    Layout(),
    Layout(data=2),
    Layout(data=2, optimizer="overlapped"),
    Layout(tensor=2, sequence=True),
    Layout(tensor=2, sequence=True, pipeline=2),
    Layout(tensor=2, sequence=True, pipeline=2, interleaved=True, optimizer="sharded"),
    Layout(tensor=4, sequence=True),
    Layout(context=2),
    Layout(context=3, pipeline=2),
    Layout(tensor=2, sequence=True, context=2, pipeline=2),
    Layout(tensor=2, sequence=True, pipeline=2, data=2),
]
LAYOUTS = [layout._replace(model="experts", scheduler="empty") for layout in LAYOUTS]
BATCHES = [sequences(5, (40, 3, 17, 64, 1, 25, 33)), sequences(6, (5, 31, 12, 9, 30, 2, 47))]


@lru_cache(maxsize=2)
def alone(flags: str) -> list[Step]:
    return run_ranks(train_one_by_one, 1, f"{MODELS['experts']} {flags}", BATCHES)[0]


@lru_cache(maxsize=2)
def in_one_process(flags: str) -> list[Step]:
    return assemble(run_ranks(train_packed, 1, f"{LAYOUTS[0].flags} {flags}", BATCHES, "even", "packed"))


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_a_pack_of_one_sequence_is_balanced_like_it_alone(layout: Layout) -> None:
    """Padding that counts, or a weight that depends on the number of ranks, trains the router to another balance.

    Seven sequences leave an empty pack to one of two data-parallel ranks.
    """
    steps = assemble(run_ranks(train_packed, layout.world_size, f"{layout.flags} {BALANCED}", BATCHES))
    assert_same(steps, alone(BALANCED), relative=1e-12)


@pytest.mark.parametrize("layout", [layout for layout in LAYOUTS if layout.data == 1], ids=str)
def test_a_pack_of_all_sequences_is_balanced_alike_in_every_layout(layout: Layout) -> None:
    """Tokens are counted over all ranks of a pack: each sequence's own balance would differ."""
    flags = f"{BALANCED} --max-seqlen-per-dp-cp-rank 256"
    steps = assemble(run_ranks(train_packed, layout.world_size, f"{layout.flags} {flags}", BATCHES, "even", "packed"))
    assert_same(steps, in_one_process(flags), relative=1e-12)


def test_the_load_balancing_loss_shows_in_the_gradients() -> None:
    """Were it too weak to see, or one pack as balanced as many, the others would compare nothing."""
    name = "decoder.layers.0.mlp.router.weight"
    found = [
        alone(BALANCED),
        alone("--moe-aux-loss-coeff 0"),
        in_one_process(f"{BALANCED} --max-seqlen-per-dp-cp-rank 256"),
    ]
    balanced, free, packed = (steps[0].gradients[name] for steps in found)
    assert (balanced - free).abs().max() > 0.1 * free.abs().max()
    assert (balanced - packed).abs().max() > 0.1 * free.abs().max()
