"""Chunks from workers: the same for any number of them, and continued from a number."""

import itertools

import pytest

from megatron.blending import BlendDataset, MapDataset
from megatron.blending.loading.chunk_loader import ChunkLoader
from megatron.blending.streams.chunk import ChunkDataset, SkippedSample
from tests.unit_tests.blending.number_streams import WorkerHere, config, endless, source_of
from tests.unit_tests.blending.trees import fail_fifths


@pytest.fixture(autouse=True)
def _workers_here(monkeypatch):
    monkeypatch.setattr("megatron.blending.loading.worker_pool.WorkerProcess", WorkerHere)
    monkeypatch.setattr("megatron.blending.loading.chunk_loader._FIRST_SAMPLES", 20)


def chunks(num_outputs=None):
    if num_outputs is None:
        blend = BlendDataset((endless("a", 50), 0.7), (endless("b", 30), 0.3))
    else:
        blend = source_of("a", 50)
    return ChunkDataset(MapDataset(blend, fail_fifths), 4, first=3, num_outputs=num_outputs)


def loader(rank=0, num_ranks=1, num_workers=0, num_given=0, **options):
    return ChunkLoader(chunks(**options), config(rank, num_ranks, num_workers), num_given=num_given)


def test_any_ranks_and_workers_give_one_stream():
    """The trainer's global batches, and with them its losses, are functions of this."""
    expected = list(itertools.islice(loader(), 60))
    assert any(type(sample) is SkippedSample for chunk in expected for sample in chunk)
    for num_ranks, num_workers in ((1, 1), (1, 3), (2, 0), (3, 2), (5, 4)):
        made = [loader(rank, num_ranks, num_workers) for rank in range(num_ranks)]
        assert [next(one) for _ in range(60 // num_ranks) for one in made] == expected


@pytest.mark.parametrize("num_workers", [0, 2])
def test_continued_from_a_number(num_workers):
    whole = list(itertools.islice(loader(1, 2), 40))
    first = loader(1, 2, num_workers)
    for at in range(12):
        again = loader(1, 2, 2 - num_workers, num_given=first.num_given)
        assert [next(again) for _ in range(5)] == whole[at : at + 5]
        assert next(first) == whole[at]
        first.close()  # the next chunk starts the workers again, where it stood


@pytest.mark.parametrize("num_workers", [0, 3])
def test_a_pass_ends(num_workers):
    """On each rank at its own number, and for good."""
    made = [loader(rank, 2, num_workers, num_outputs=13) for rank in range(2)]
    assert [len(list(one)) for one in made] == [7, 6]
    for one in made:
        assert next(one, None) is None
