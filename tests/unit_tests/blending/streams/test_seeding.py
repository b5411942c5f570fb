"""Random numbers of `@stateless(restore_seeds=True)`: wherever the function is used, and whatever
its samples carry.
"""

import random

import pytest

from megatron.blending import (
    BatchDataset,
    FilterDataset,
    GroupBatchDataset,
    MapDataset,
    PackingDataset,
)
from megatron.blending.energon import AugmentTaskEncoder
from megatron.blending.energon._encoding.cooking import Cooker, choose_cook, cooker
from megatron.blending.energon._encoding.default_encoder import DefaultTaskEncoder
from megatron.blending.streams.seeding import mark_of, stateless
from tests.unit_tests.blending.number_streams import drawn, endless, loaders, source_of

DRAWN: list[float] = []


@stateless(restore_seeds=True)
def note(value):
    DRAWN.append(random.random())
    return value


@stateless(restore_seeds=True)
def one_pack(samples):
    DRAWN.append(random.random())
    return [samples]


@stateless(restore_seeds=True)
def group(sample):
    DRAWN.append(random.random())
    return 0, 2


@stateless(restore_seeds=True)
def keep(sample):
    DRAWN.append(random.random())
    return True


def load(record, key):
    return note(record)


load = stateless(restore_seeds=True)(load)

PLACES = {
    "MapDataset": lambda: MapDataset(endless(), note),
    "a map of batches": lambda: MapDataset(BatchDataset(endless(), 2), note),
    "FilterDataset": lambda: FilterDataset(endless(), keep),
    "BatchDataset": lambda: BatchDataset(endless(), 2, note),
    "select_samples_to_pack": lambda: PackingDataset(endless(), 3, one_pack, list),
    "sample encoder": lambda: PackingDataset(
        endless(), 3, lambda held: [held], list, sample_encoder=note
    ),
    "pack_selected_samples": lambda: PackingDataset(endless(), 3, lambda held: [held], note),
    "batch_group_criterion": lambda: GroupBatchDataset(endless(), 2, group, list),
    "batches of groups": lambda: GroupBatchDataset(endless(), 2, lambda sample: (0, 2), note),
    "a source": lambda: endless(load=load),
}


def numbers(tree, **options):
    DRAWN.clear()
    drawn(loaders(tree, **options), 12)
    return list(DRAWN)


@pytest.mark.parametrize("name", PLACES)
def test_seeded_wherever_a_function_is_used(name):
    """Masks, crops and dropouts of a batch were those of every other, or different after each
    restart.
    """
    tree = PLACES[name]()
    first = numbers(tree)
    assert len(set(first)) == len(first) >= 4
    random.seed(len(name))
    assert numbers(tree) == first
    assert not set(numbers(tree, seed=2)) & set(first)


@pytest.mark.parametrize("name", PLACES)
def test_seeds_are_the_same_after_a_restore(name):
    """A resumed run would augment its samples in another way than the one that was never
    interrupted.
    """
    tree = PLACES[name]()
    whole = set(numbers(tree))
    _, states = drawn(loaders(tree), 5)
    DRAWN.clear()
    drawn(loaders(tree, states=states), 7)
    assert DRAWN
    assert set(DRAWN) <= whole


def test_every_epoch_draws_numbers_of_its_own():
    DRAWN.clear()
    loader = loaders(MapDataset(source_of("a", 5), note))[0]
    assert len([*loader, *loader]) == 10
    assert len(set(DRAWN)) == 10


def test_marks_are_seen_through_what_wraps_a_function():
    """A cooker that reads other stores lost its tolerance of failures; an augmented encoder was
    seeded by the key.
    """

    @cooker(need_primary=True)
    @stateless(restore_seeds=True, failure_tolerance=7)
    def cook(sample, primary):
        return sample

    chosen = choose_cook([Cooker(cook)], {}, {}, "primary", "")
    assert (mark_of(chosen, "__restore_seeds__"), mark_of(chosen, "__failure_tolerance__")) == (
        True,
        7,
    )

    class Inner(DefaultTaskEncoder):
        @stateless(restore_seeds=True)
        def encode_sample(self, sample):
            return sample

    class Outer(AugmentTaskEncoder):
        def batch(self, samples):
            return [self.encode_sample(sample) for sample in samples]

    assert mark_of(Outer(Inner()).encode_sample, "__restore_seeds__")
    assert Outer(Inner()).batch([3]) == [3]
