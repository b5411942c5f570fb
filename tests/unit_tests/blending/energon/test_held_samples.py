"""How many encoded samples are held, and how often each is encoded."""

import weakref
from collections import Counter

import pytest

from megatron.blending import (
    BatchDataset,
    GroupBatchDataset,
    MapDataset,
    PackingDataset,
    SkipSample,
    TaskEncoder,
)
from megatron.blending.energon._encoding.task_encoder import check_encoder
from tests.unit_tests.blending.number_streams import (
    WorkerHere,
    drawn,
    endless,
    listed,
    loaders,
    source_of,
)
from tests.unit_tests.blending.trees import parity


@pytest.fixture(autouse=True)
def _workers_here(monkeypatch):
    monkeypatch.setattr("megatron.blending.loading.worker_pool.WorkerProcess", WorkerHere)


class Encoder:
    """Counts its calls by sample, and the most samples that were held at once."""

    def __init__(self):
        self.calls: Counter = Counter()
        self.held: weakref.WeakSet[Holder] = weakref.WeakSet()
        self.most_held = 0

    def encode(self, sample):
        self.calls[sample] += 1
        if sample[1] % 10 == 9:
            raise SkipSample
        made = Holder(sample)
        self.held.add(made)
        self.most_held = max(self.most_held, len(self.held))
        return made


class Holder:
    """An encoded sample, of which it is known whether it is still held."""

    def __init__(self, sample):
        self.sample = sample

    @property
    def length(self):
        return 1 + self.sample[1] % 30


def length_of(sample):
    return 1 + sample[1] % 30


def packs_of(lengths, samples, capacity=60):
    packs: list[list] = [[]]
    room = capacity
    for length, sample in sorted(zip(lengths, samples), key=lambda pair: -pair[0]):
        if length > room:
            packs.append([])
            room = capacity
        packs[-1].append(sample)
        room -= length
    return packs


def by_samples(samples):
    return packs_of([sample.length for sample in samples], samples)


def by_lengths(lengths):
    return packs_of(lengths, lengths)


def numbers(samples):
    return sorted(sample.sample for sample in samples)


def parity_of(sample):
    return parity(sample.sample)


def trees(encoder, source):
    return {
        "batches": BatchDataset(MapDataset(source, encoder.encode), 7, numbers),
        "packs": PackingDataset(MapDataset(source, encoder.encode), 100, by_samples, numbers),
        "groups": GroupBatchDataset(MapDataset(source, encoder.encode), 7, parity_of, numbers),
        "lengths": PackingDataset(
            source, 100, by_lengths, numbers, sample_encoder=encoder.encode, length_of=length_of
        ),
        "batches of packs": BatchDataset(
            PackingDataset(MapDataset(source, encoder.encode), 30, by_samples, numbers), 4
        ),
    }


@pytest.mark.parametrize("name", ["batches", "packs", "groups", "lengths", "batches of packs"])
@pytest.mark.parametrize(("num_ranks", "num_workers"), [(1, 0), (1, 3), (3, 2)])
def test_each_sample_is_encoded_once(name, num_ranks, num_workers):
    """Workers that shared a shard encoded all of it: with 256 of them each sample 32 times."""
    encoder = Encoder()
    tree = trees(encoder, source_of("a", 1000))[name]
    outputs = [output for loader in loaders(tree, num_ranks, num_workers) for output in loader]
    assert outputs
    assert set(encoder.calls.values()) == {1}
    assert len(encoder.calls) == 1000


@pytest.mark.parametrize("name", ["batches", "packs", "lengths"])
def test_a_resumed_run_encodes_what_is_under_way_again(name):
    encoder = Encoder()
    tree = trees(encoder, source_of("a", 1000))[name]
    head, states = drawn(loaders(tree), 20)
    tail = listed_from(tree, states)
    assert head + tail == list(loaders(trees(Encoder(), source_of("a", 1000))[name])[0])
    again = [sample for sample, count in encoder.calls.items() if count > 1]
    # With lengths, packs that were given are not even made again.
    assert len(again) <= (0 if name == "lengths" else 101)
    assert max(encoder.calls.values()) <= 2


def listed_from(tree, states):
    (loader,) = loaders(tree, states=states)
    return list(loader)


@pytest.mark.parametrize(
    ("name", "most"), [("packs", 101), ("lengths", 30), ("batches", 15), ("groups", 70)]
)
def test_a_block_is_held_and_no_more(name, most):
    """Each shard had a buffer: one process held 32,000 samples for a buffer of 100, 630 MB."""
    encoder = Encoder()
    (loader,) = loaders(trees(encoder, endless("a", 10**6))[name])
    for _ in range(300):
        next(loader)
    assert 5 < encoder.most_held <= most


@pytest.mark.parametrize("num_workers", [0, 1, 2, 5])
def test_packs_by_lengths_are_those_by_samples(num_workers):
    """... of which the encoder takes all. Workers share the packs of a block."""
    source = source_of("a", 700)
    expected = listed(PackingDataset(source, 100, by_tuples, sorted))
    tree = PackingDataset(source, 100, by_lengths, sorted, length_of=length_of)
    assert listed(tree, num_workers=num_workers) == expected
    head, states = drawn(loaders(tree, num_workers=num_workers), 33)
    assert head + listed_from(tree, states) == expected


def by_tuples(samples):
    return packs_of(map(length_of, samples), samples)


class ByLengths(TaskEncoder):
    pack_by = "lengths"

    def sample_length(self, sample):
        return length_of(sample)

    def encode_sample(self, sample):
        return {"number": sample[1]}

    def select_samples_to_pack(self, samples):
        return by_lengths(samples)

    def pack_selected_samples(self, samples):
        return sorted(sample["number"] for sample in samples)


def test_a_task_encoder_packs_by_lengths():
    encoder = ByLengths()
    encoded = encoder.build_encode_sample(source_of("a", 100))
    tree = encoder.build_batch(encoded, packing_buffer_size=50)
    assert tree.children[0].node_id == source_of("a", 100).node_id
    packs = listed(tree)
    assert sorted(number for pack in packs for number in pack) == list(range(100))
    assert all(sum(1 + number % 30 for number in pack) <= 60 for pack in packs)


def test_what_packing_by_lengths_needs_is_said():
    class NoLength(ByLengths):
        sample_length = TaskEncoder.sample_length

    with pytest.raises(ValueError, match="NoLength has no sample_length; define it"):
        check_encoder(NoLength(), 10)

    class Typo(ByLengths):
        pack_by = "length"

    with pytest.raises(ValueError, match=r"pack_by must be one of .*did you mean 'lengths'"):
        check_encoder(Typo(), 10)


def test_groups_that_are_too_many_go_out_short():
    """With a key of its own for each sample every one of them would be held for ever."""

    def own(sample):
        return sample[1], 2

    tree = GroupBatchDataset(source_of("a", 100), 2, own, max_open_groups=10)
    (loader,) = loaders(tree)
    batches = list(loader)
    assert sorted(sample for batch in batches for sample in batch) == [
        ("a", index) for index in range(100)
    ]
    assert loader.num_short_groups == 90
