"""Chunks have what stands at their positions, and say what does not."""

import numpy as np
import pytest

from megatron.blending import ChunkDataset, MapDataset, SkippedSample, SkipSample, SourceDataset
from megatron.blending.streams.node import Binding, PlanBatch
from tests.unit_tests.blending.number_streams import Numbers, source_of


def even(record: tuple[str, int]) -> int:
    number = record[1]
    if number % 4 == 1:
        raise SkipSample("odd")
    if number % 4 == 3:
        raise ValueError("far too odd")
    return number


def chunks_of(dataset, numbers, **options):
    bound = ChunkDataset(dataset, **options).bind(Binding(seed=1))
    return bound.plan(np.array(numbers), PlanBatch()).values(0, len(numbers))


def test_holes_stay_where_they_are():
    """Filled with what follows, a position would mean another sample for each number of ranks."""
    dataset = MapDataset(source_of(count=6, shuffle=False), even)
    assert chunks_of(dataset, [0, 1], length=4, first=0) == [
        [0, SkippedSample(0, "a:1", "odd"), 2, SkippedSample(0, "a:3", None, "far too odd")],
        [4, SkippedSample(0, "a:5", "odd"), 0, SkippedSample(0, "a:1", "odd")],
    ]


@pytest.mark.parametrize("first", [0, 1, 5])
def test_one_pass_ends_in_shorter_chunks(first):
    """A rank whose chunk is beyond the end would read the first samples once more."""
    dataset = source_of(count=7, shuffle=False)
    chunks = chunks_of(dataset, range(4), length=3, first=first, num_outputs=4)
    assert [number for chunk in chunks for _, number in chunk] == list(range(first, 7))
    assert len(chunks[-1]) == 0


def test_a_source_that_cannot_be_read_fails_sample_by_sample():
    """One file that is gone would take the samples of all others with it."""

    class Gone(Numbers):
        def read(self, indices):
            if 2 in indices:
                raise OSError("disk gone")
            return super().read(indices)

    ((zero, one, two, three),) = chunks_of(
        SourceDataset(Gone("a", 4), shuffle=False), [0], length=4
    )
    assert (zero, one, three) == (("a", 0), ("a", 1), ("a", 3))
    assert two == SkippedSample(0, "a:2", None, "a:2: cannot be read: OSError: disk gone")
