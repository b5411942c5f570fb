"""Which samples a step trains on: the same for every layout, from any place on, each record once
per epoch.
"""

import math
from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.blending.streams.failures import SkipSample
from megatron.blending.streams.source import SourceDataset
from megatron.sft.data.chat_encoder import EncodedSample
from megatron.sft.data.sample_set import concatenated
from megatron.sft.data.stream import SampleStream, Share


@dataclass(frozen=True)
class Numbered:
    """Records of which number i is the token i; every `drop_every`-th makes no sample, every
    `cut_every`-th is cut, and record `part_dropped` has a pair that is dropped alone.
    """

    size: int
    name: str = "numbered"
    drop_every: int = 10**9
    cut_every: int = 10**9
    part_dropped: int = -1
    number: int = 0

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index):
        assert 0 <= index < self.size
        return index

    def read(self, indices):
        return list(map(self.__getitem__, indices))

    def describe(self, index):
        return f"{self.name}:{index + 1}"

    def fingerprint(self):
        return f"{self.size} {self.name} {self.drop_every} {self.cut_every}"

    def load(self, index, key):
        if index % self.drop_every == self.drop_every - 1:
            raise SkipSample("over length")
        tokens = np.full(1 + index % 3, index)
        return self.number, EncodedSample(
            tokens,
            tokens,
            np.ones(len(tokens), np.float32),
            index % self.cut_every == 0,
            dropped=("equal answers in one of several pairs",) * (index == self.part_dropped),
        )


def one_after_the_other(*sources, seed=None):
    numbered = [replace(source, number=number) for number, source in enumerate(sources)]
    nodes = [
        SourceDataset(source, load=source.load, shuffle=False, name=source.name)
        for source in numbered
    ]
    return concatenated([source.name for source in sources], nodes, seed)


def names(samples):
    return [int(sample["tokens"][0]) for sample in samples]


def stream_of(size, share, seed=0, consumed_samples=0, num_workers=0, **options):
    """Endless with a seed; without one, what is left of a pass."""
    samples = one_after_the_other(Numbered(size, **options), seed=seed)
    num_batches = (
        None if seed is not None else math.ceil((size - consumed_samples) / share.global_batch_size)
    )
    return SampleStream(
        samples,
        share,
        consumed_samples=consumed_samples,
        num_batches=num_batches,
        num_workers=num_workers,
    )


def global_batch(streams, share):
    """The next global batch over all ranks: names of the records, in the order of their chunks."""
    drawn = [[names(next(stream)) for _ in range(share.num_fetches)] for stream in streams]
    each = share.fetches_per_chunk
    starts = range(0, share.num_fetches, each)
    return [
        name for at in starts for draws in drawn for draw in draws[at : at + each] for name in draw
    ]


def all_ranks(share):
    return [share._replace(rank=rank) for rank in range(share.num_ranks)]


@st.composite
def shares(draw):
    """A global batch that the ranks and their draws divide, as the options demand."""
    num_ranks, micro_batch_size = draw(st.integers(1, 6)), draw(st.integers(1, 4))
    return Share(
        0, num_ranks, num_ranks * micro_batch_size * draw(st.integers(1, 4)), micro_batch_size
    )


def test_draws_literal():
    """The plain case, to be read: 2 ranks, 8 samples, 2 at a time; a chunk is a rank's whole
    share.
    """
    streams = [stream_of(12, Share(rank, 2, 8, 2), seed=None) for rank in range(2)]
    assert [[names(next(stream)) for _ in range(4)] for stream in streams] == [
        [[0, 1], [2, 3], [8, 9], [10, 11]],
        [[4, 5], [6, 7], [], []],
    ]


@given(shares())
def test_a_global_batch_is_whole_chunks(share):
    """A chunk across the end of a batch would leave samples of the next one to a rank that
    resumes.
    """
    assert share.num_fetches % share.fetches_per_chunk == 0
    assert share.fetches_per_chunk == 1 or share.fetches_per_chunk * share.micro_batch_size <= 32


@pytest.mark.parametrize(
    ("num_ranks", "micro_batch_size"),
    [(1, 1), (1, 3), (2, 1), (2, 2), (3, 1), (3, 4), (4, 3), (6, 2), (12, 1)],
)
def test_global_batches_are_the_same_for_every_layout(num_ranks, micro_batch_size):
    """Runs on other numbers of processes would train on other data, and no loss curve could be
    compared.
    """
    one = Share(0, 1, 12, 12)
    share = Share(0, num_ranks, 12, micro_batch_size)
    streams = [stream_of(50, rank) for rank in all_ranks(share)]
    reference = stream_of(50, one)
    for _ in range(9):  # two epochs and a half; epochs end within batches
        assert global_batch(streams, share) == names(next(reference))


@given(st.integers(1, 40), st.integers(-3, 2**40), st.integers(1, 7))
@settings(max_examples=50)
def test_each_record_once_per_epoch(size, seed, batch):
    """Records that an epoch leaves out are never learned; sampling with replacement leaves out a
    third.
    """
    stream = stream_of(size, Share(0, 1, batch, batch), seed=seed)
    drawn = [name for _ in range(math.ceil(3 * size / batch)) for name in names(next(stream))]
    for epoch in range(3):
        assert sorted(drawn[epoch * size : (epoch + 1) * size]) == list(range(size))


def test_epochs_and_seeds_differ():
    """The same order again and again lets the model learn the order."""
    stream = stream_of(50, Share(0, 1, 50, 50))
    first, second = names(next(stream)), names(next(stream))
    other_seed = names(next(stream_of(50, Share(0, 1, 50, 50), seed=1)))
    assert len({tuple(first), tuple(second), tuple(other_seed), tuple(range(50))}) == 4
    assert first == names(next(stream_of(50, Share(0, 1, 50, 50))))


@pytest.mark.slow
@given(shares(), st.integers(0, 6), st.integers(1, 30))
@settings(max_examples=15)
def test_consumed_samples_are_the_place(share, steps, size):
    """A run that is continued would train on records again, or skip some."""
    for rank in all_ranks(share):
        ran, jumped = (
            stream_of(size, rank),
            stream_of(size, rank, consumed_samples=steps * share.global_batch_size),
        )
        for _ in range(steps * share.num_fetches):
            next(ran)
        for _ in range(2 * share.num_fetches):
            assert names(next(ran)) == names(next(jumped))


def test_continued_on_another_number_of_ranks():
    """The samples consumed are the whole place: a run may go on with more processes."""
    two, three = Share(0, 2, 12, 2), Share(0, 3, 12, 1)
    streams = [stream_of(31, rank) for rank in all_ranks(two)]
    batches = [global_batch(streams, two) for _ in range(6)]
    streams = [stream_of(31, rank, consumed_samples=36) for rank in all_ranks(three)]
    assert [global_batch(streams, three) for _ in range(3)] == batches[3:]


@pytest.mark.parametrize(("num_ranks", "micro_batch_size"), [(1, 8), (2, 2), (4, 1), (8, 1)])
@pytest.mark.parametrize("size", [1, 3, 8, 11, 16])
def test_finite_stream_reads_all_once_and_ends_on_all_ranks_together(
    num_ranks, micro_batch_size, size
):
    """A last batch that is dropped makes a small validation set empty; a rank that ends early hangs
    the others.
    """
    share = Share(0, num_ranks, 8, micro_batch_size)
    streams = [stream_of(size, rank, seed=None) for rank in all_ranks(share)]
    batches = [global_batch(streams, share) for _ in range(math.ceil(size / 8))]
    assert [name for batch in batches for name in batch] == list(range(size))
    for stream in streams:
        for _ in range(2):
            with pytest.raises(StopIteration):
                next(stream)


def test_counts():
    """Dropped and cut records that nobody counts are data that silently is not trained on."""
    stream = stream_of(30, Share(0, 1, 10, 5), drop_every=5, cut_every=4, part_dropped=1)
    drawn = [sample for _ in range(6) for sample in next(stream)]
    kept = [i for i in range(30) if i % 5 != 4]
    assert sorted(names(drawn)) == kept
    counts = stream.counts
    assert counts.num_sequences == len(kept)
    assert counts.num_tokens == sum(1 + i % 3 for i in kept)
    assert counts.square_sum == sum((1 + i % 3) ** 2 for i in kept)
    assert counts.dropped(0) == {"over length": 6, "equal answers in one of several pairs": 1}
    assert counts.num_cut == len([i for i in kept if i % 4 == 0])


def test_samples_are_counted_by_their_source():
    """Counts under another source's name tell of proportions that are not there."""
    samples = one_after_the_other(Numbered(4, "a"), Numbered(6, "b", drop_every=2), seed=1)
    stream = SampleStream(samples, Share(0, 1, 10, 5))
    drawn = [sample for _ in range(4) for sample in next(stream)]
    before = stream.counts
    assert [sum(sample["source"] == source for sample in drawn) for source in (0, 1)] == [8, 6]
    assert before.of("sequences").tolist() == [8, 6]
    assert (before.dropped(0), before.dropped(1)) == ({}, {"over length": 6})
    next(stream)
    next(stream)
    assert (stream.counts - before).of("sequences").tolist() == [4, 3]


def test_a_draw_of_dropped_records_is_empty_and_not_the_end():
    """StopIteration there would end the training on one rank."""
    stream = stream_of(4, Share(0, 1, 4, 2), drop_every=1)
    assert [next(stream) for _ in range(6)] == [[]] * 6
    assert (stream.counts.num_sequences, stream.counts.num_dropped) == (0, 12)


def test_samples_have_what_packing_reads():
    """A missing loss mask would be taken for all ones: training on the user's turns."""
    (sample,) = next(stream_of(9, Share(0, 1, 1, 1)))
    assert set(sample) == {"tokens", "labels", "loss_mask", "source"}
    assert {len(sample[name]) for name in ("tokens", "labels", "loss_mask")} == {
        len(sample["tokens"])
    }


def test_worker_processes_change_nothing():
    """A run on another machine, with other cores, would train on other samples; or count what it
    left out twice.
    """
    share = Share(1, 2, 24, 2)
    plain, read_ahead = (
        stream_of(31, share, drop_every=5, num_workers=workers) for workers in (0, 2)
    )
    read_ahead.start()
    drawn = [
        [names(next(stream)) for _ in range(3 * share.num_fetches)]
        for stream in (plain, read_ahead)
    ]
    assert drawn[0] == drawn[1]
    assert plain.counts == read_ahead.counts
    read_ahead.close()
