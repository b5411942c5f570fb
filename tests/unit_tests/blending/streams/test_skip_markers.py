"""What stands at each position: an output, a hole, or several; whatever is asked for before, and of
others.
"""

import numpy as np

from megatron.blending import BatchDataset, FilterDataset, MapDataset, PackingDataset
from megatron.blending.streams.failures import SkipSample
from megatron.blending.streams.items import Leftover, MultiOutput, SkipMarker
from megatron.blending.streams.node import Binding, PlanBatch
from tests.unit_tests.blending.number_streams import endless
from tests.unit_tests.blending.trees import (
    fail_fifths,
    first_fit,
    is_odd,
    several,
    shares,
    skip_thirds,
)


def values(tree, positions):
    plan = tree.bind(Binding(1)).plan(np.array(positions, np.int64), PlanBatch())
    return plan.values(0, len(positions))


def blend():
    return shares(endless("a", 50, bad=[7]), endless("b", 30))


def test_a_position_is_a_sample_or_a_hole():
    """A trainer counts holes in its global batch: were they filled, a position would mean another
    sample each time.
    """
    plain = values(blend(), range(200))
    found = values(
        FilterDataset(MapDataset(MapDataset(blend(), skip_thirds), fail_fifths), is_odd), range(200)
    )
    assert {type(value) for value in found} == {tuple, SkipMarker}
    for sample, value in zip(plain, found):
        if type(sample) is SkipMarker:
            assert (type(value), str(value.error)) == (SkipMarker, "a:7: is bad")
        elif sample[1] % 3 == 0:
            assert (value.function, type(value.error), value.value) == (
                skip_thirds,
                SkipSample,
                sample,
            )
        elif sample[1] % 5 == 0:
            assert (value.function, str(value.error)) == (fail_fifths, "fifth")
        elif sample[1] % 2 == 0:
            assert (value.function, value.error) == (is_odd, None)
        else:
            assert value == sample


def test_any_order_gives_the_same():
    """Ranks and workers ask for parts of the stream, a resumed run for its end only."""
    tree = MapDataset(MapDataset(blend(), several), skip_thirds)
    whole = values(tree, range(120))
    assert {MultiOutput, SkipMarker, tuple} == {type(value) for value in whole}
    whole = [shown(value) for value in whole]
    asked = np.random.RandomState(0).permutation(120)[:50].tolist()
    assert [shown(value) for value in values(tree, asked)] == [whole[place] for place in asked]


def shown(value):
    """What stands at a position, without where it came from."""
    if type(value) is MultiOutput:
        return [shown(item) for item in value]
    return repr(value[:4]) if type(value) is SkipMarker else repr(value)


def test_a_block_is_made_of_its_own_positions():
    """What is left out of a batch leaves others waiting; packs are those of a block, however often
    it is made.
    """
    batches = values(BatchDataset(MapDataset(endless(), skip_thirds), 4), range(20))
    assert {type(value) for value in batches} == {list, MultiOutput}
    left = [item for value in batches if type(value) is MultiOutput for item in value]
    assert {type(item) for item in left} == {SkipMarker, Leftover}
    tree = PackingDataset(endless(), 10, first_fit, list)
    packs = [list(block) for block in values(tree, [7, 3, 7])]
    assert packs[0] == packs[2] != packs[1]
    assert sorted(sample for pack in packs[1] for sample in pack) == sorted(
        values(endless(), range(30, 40))
    )
