"""The load-balancing loss of experts is one per pack, of its real tokens, in every layout."""

from __future__ import annotations

from functools import lru_cache

import pytest

from tests.functional_tests.layouts import MODELS, Layout
from tests.functional_tests.oracle import (
    RankStep,
    Step,
    assemble,
    assert_same,
    sequences,
    train_one_by_one,
    train_packed,
)
from tests.functional_tests.ranks import run_ranks

BALANCED = "--moe-aux-loss-coeff 0.5"
ALL_IN_ONE = "--max-seqlen-per-dp-cp-rank 128"
LAYOUTS = [
    Layout(),
    Layout(data=2, optimizer="overlapped"),
    Layout(pipeline=2, interleaved=True, optimizer="sharded"),
    Layout(context=3),
    Layout(tensor=2, sequence=True, context=2, pipeline=2),
]
LAYOUTS = [layout._replace(model="experts", scheduler="empty") for layout in LAYOUTS]
BATCHES = [sequences(5, (40, 1, 25)), sequences(6, (40, 1, 25))]
MAX_RANKS_OF_TWO_STEPS = 2
"""Of two steps the second starts from what the first left behind; larger layouts take one."""


@lru_cache(maxsize=4)
def alone(flags: str) -> list[Step]:
    return run_ranks(train_one_by_one, 1, f"{MODELS['experts']} {flags}", BATCHES)[0]


@lru_cache(maxsize=4)
def in_one_process(flags: str) -> list[Step]:
    return assemble(
        run_ranks(train_packed, 1, f"{LAYOUTS[0].flags} {flags}", BATCHES, "even", "packed")
    )


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_a_pack_is_balanced_alike_in_every_layout(layout: Layout) -> None:
    """Padding that counts, or a weight that depends on the number of ranks, trains the router to
    another balance.

    Packs of one sequence are balanced like the sequence alone; three leave an empty pack to one of
    two data-parallel ranks. In a pack of all sequences tokens are counted over all ranks of the
    pack.
    """
    num_steps = 2 if layout.world_size <= MAX_RANKS_OF_TWO_STEPS else 1
    flags, balanced = f"{layout.flags} {layout.depth}", f"{BALANCED} {layout.depth}"
    ranks = run_ranks(train_both, layout.world_size, flags, num_steps, layout.data == 1)
    of_one, of_all = ([steps for steps in found if steps] for found in zip(*ranks, strict=True))
    assert_same(assemble(of_one), alone(balanced)[:num_steps], relative=1e-12)
    if of_all:
        packed = in_one_process(f"{balanced} {ALL_IN_ONE}")[:num_steps]
        assert_same(assemble(of_all), packed, relative=1e-12)


def test_further_layers_are_balanced_as_each_sequence_alone() -> None:
    """Padding that the layer of multi-token prediction counts would be routed somewhere."""
    layout = Layout(tensor=2, sequence=True, pipeline=2, model="experts", scheduler="empty")
    flags = f"{BALANCED} --mtp-num-layers 1 {layout.depth}"
    ranks = run_ranks(train_both, layout.world_size, f"{layout.flags} {flags}", 1, False)
    assert_same(assemble([of_one for of_one, _ in ranks]), alone(flags)[:1], relative=1e-12)
    free = alone(flags.replace(BALANCED, ""))[0].gradients
    weighed = [
        (gradient - free[name]).abs().max() / free[name].abs().max()
        for name, gradient in alone(flags)[0].gradients.items()
        if name.startswith("mtp.") and name.endswith("router.weight")
    ]
    assert weighed
    assert min(weighed) > 0.1


def train_both(flags: str, num_steps: int, also_all: bool) -> tuple[list[RankStep], list[RankStep]]:
    """Steps with packs of one sequence, and, if asked for, with one pack of all."""
    batches = BATCHES[:num_steps]
    of_one = train_packed(f"{flags} {BALANCED}", batches)
    if not also_all:
        return of_one, []
    return of_one, train_packed(f"{flags} {BALANCED} {ALL_IN_ONE}", batches, "even", "packed")


def test_the_load_balancing_loss_shows_in_the_gradients() -> None:
    """Were it too weak to see, or one pack as balanced as many, the others would compare
    nothing."""
    name = "decoder.layers.0.mlp.router.weight"
    found = [
        alone(BALANCED),
        alone("--moe-aux-loss-coeff 0"),
        in_one_process(f"{BALANCED} {ALL_IN_ONE}"),
    ]
    balanced, free, packed = (steps[0].gradients[name] for steps in found)
    assert (balanced - free).abs().max() > 0.1 * free.abs().max()
    assert (balanced - packed).abs().max() > 0.1 * free.abs().max()
