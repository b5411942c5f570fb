"""Random trees that are killed and restored at random places, on other ranks and workers.

`BLENDING_RANDOM_TREES=500` tries as many; continuous integration a few.
"""

import json
import logging
import os
import random
from typing import Any, NamedTuple

import pytest

from megatron.blending import (
    BatchDataset,
    BlendDataset,
    ConcatDataset,
    FilterDataset,
    GroupBatchDataset,
    MapDataset,
    PackingDataset,
    RepeatDataset,
    ShuffleBufferDataset,
)
from megatron.blending.energon._loading.loader import get_savable_loader
from megatron.blending.streams.failures import FatalSampleError
from tests.unit_tests.blending.number_streams import WorkerHere, config, source_of
from tests.unit_tests.blending.trees import (
    fail_fifths,
    flat,
    halves,
    is_odd,
    parity,
    several,
    skip_thirds,
)

NUM_TREES = int(os.environ.get("BLENDING_RANDOM_TREES", "24"))
LAYOUTS = [(1, 0), (1, 1), (2, 0), (1, 3), (3, 2), (2, 2), (5, 0), (4, 1)]


@pytest.fixture(autouse=True)
def _workers_here(monkeypatch):
    monkeypatch.setattr("megatron.blending.loading.worker_pool.WorkerProcess", WorkerHere)
    monkeypatch.setattr("megatron.blending.energon._loading.server._FIRST_PLANNED", 20)
    monkeypatch.setattr("megatron.blending.streams.failures._MAX_IN_SILENCE", 3000)
    logging.getLogger("megatron.blending").setLevel(logging.ERROR)
    yield
    logging.getLogger("megatron.blending").setLevel(logging.NOTSET)


class Made(NamedTuple):
    """A tree, and the samples that a pass over it gives."""

    tree: Any
    samples: list[Any]
    batch_size: int = 0
    """Of batches of single samples, or 0."""


def whole_packs(samples):
    """Packs of up to 100, by arrival."""
    packs: list[list[Any]] = [[]]
    for sample in samples:
        if sum(1 + one[1] for one in packs[-1]) + sample[1] > 99:
            packs.append([])
        packs[-1].append(sample)
    return [pack for pack in packs if pack]


def open_packs(samples):
    """The last pack waits for more."""
    return whole_packs(samples)[:-1]


def pairs(samples):
    return [samples[at : at + 2] for at in range(0, len(samples), 2)]


def kept(function, sample):
    try:
        made = function(sample)
    except Exception:
        return []
    return list(made) if hasattr(made, "__next__") else [made]


class Trees:
    """Makes random trees. `is_endless`: sources are repeated for ever."""

    def __init__(self, seed, is_endless):
        self.draw = random.Random(seed)
        self.is_endless = is_endless
        self.num_sources = 0

    def weight(self):
        return self.draw.choice([1, 0.5, 3, 0.7, 1e-3, 1e-6])

    def source(self):
        self.num_sources += 1
        name, count = f"s{self.num_sources}", self.draw.randint(1, 50)
        bad = [at for at in range(count) if self.draw.random() < 0.05]
        source = source_of(name, count, bad, shuffle=self.draw.random() < 0.7)
        return Made(
            RepeatDataset(source) if self.is_endless else source,
            [(name, at) for at in range(count) if at not in bad],
        )

    def children(self, make):
        return [make() for _ in range(self.draw.randint(2, 3))]

    def joined(self, parts):
        samples = [sample for part in parts for sample in part.samples]
        if self.is_endless or self.draw.random() < 0.5:
            # The first has a weight that others may fall short of.
            weights = [1, *(self.weight() for _ in parts[1:])]
            pairs = [(part.tree, weight) for part, weight in zip(parts, weights)]
            return Made(BlendDataset(*pairs), samples)
        return Made(ConcatDataset(*(part.tree for part in parts)), samples)

    def singles(self, depth=0):
        """A tree of single samples."""
        draw = self.draw.random()
        if depth > 2 or draw < 0.3:
            return self.source()
        if draw < 0.5:
            return self.joined(self.children(lambda: self.singles(depth + 1)))
        tree, samples, _ = self.singles(depth + 1)
        if draw < 0.8:
            function = self.draw.choice([skip_thirds, fail_fifths, several, list_of])
            return Made(
                MapDataset(tree, function), [one for s in samples for one in kept(function, s)]
            )
        if draw < 0.9:
            return Made(FilterDataset(tree, is_odd), list(filter(is_odd, samples)))
        return Made(ShuffleBufferDataset(tree, self.draw.randint(2, 9)), samples)

    def collected(self):
        """Batches, packs or groups of single samples."""
        tree, samples, _ = self.singles()
        draw, size = self.draw.random(), self.draw.randint(1, 7)
        if draw < 0.4:
            batcher = self.draw.choice([None, halves])
            made = BatchDataset(tree, size, batcher)
            return Made(made, samples, 0 if batcher else size)
        if draw < 0.8:
            select = self.draw.choice([whole_packs, open_packs])
            final = self.draw.choice([list, halves])
            return Made(PackingDataset(tree, 3 * size, select, final), samples)
        return Made(GroupBatchDataset(tree, size, parity), samples)

    def any(self):
        """A tree as users build them: sometimes blends of packs, or batches of packs."""
        draw = self.draw.random()
        if draw < 0.3:
            return self.singles()
        made = self.collected() if draw < 0.6 else self.joined(self.children(self.collected))
        draw = self.draw.random()
        if draw < 0.2:
            made = Made(BatchDataset(made.tree, self.draw.randint(1, 4)), made.samples)
        elif draw < 0.3:
            made = Made(
                PackingDataset(made.tree, self.draw.randint(1, 5), pairs, list), made.samples
            )
        if self.draw.random() < 0.3:
            made = made._replace(tree=MapDataset(made.tree, list_of))
        return made


def list_of(value):
    """Changes nothing."""
    return value


def loaders(tree, layout, states):
    made = [
        get_savable_loader(tree, config(rank, layout[0], layout[1])) for rank in range(layout[0])
    ]
    for loader in made if states is not None else ():
        loader.load_state_dict(states)
    return made


def saved(made):
    return [json.loads(json.dumps(loader.state_dict())) for loader in made]


@pytest.mark.parametrize("seed", range(NUM_TREES))
def test_every_sample_of_a_pass_comes_once(seed):
    """Whatever the layouts before and after. What is lost or repeated shows in no loss curve."""
    trees = Trees(seed, is_endless=False)
    tree, expected, batch_size = trees.any()
    outputs: list[Any] = []
    states = None
    for _ in range(trees.draw.randint(0, 5)):
        made = loaders(tree, trees.draw.choice(LAYOUTS), states)
        for _ in range(trees.draw.choice([0, 1, 1, 2, 5, 20])):
            row = [next(loader, None) for loader in made]
            outputs += [output for output in row if output is not None]
        states = saved(made)
    layout = trees.draw.choice(LAYOUTS)
    made = loaders(tree, layout, states)
    for loader in made:
        # Not by `for`, which would begin a new pass where this one was over.
        while (output := next(loader, None)) is not None:
            outputs.append(output)
    assert sorted(map(str, flat(outputs))) == sorted(map(str, expected))
    assert all(next(loader, None) is None for loader in made)
    if batch_size:
        assert sum(len(output) < batch_size for output in outputs) <= len(LAYOUTS)
        assert max(map(len, outputs), default=0) <= batch_size


@pytest.mark.parametrize("seed", range(NUM_TREES))
def test_an_endless_stream_is_continued_to_the_bit(seed):
    """On any number of workers, killed and restored anywhere."""
    trees = Trees(seed, is_endless=True)
    tree, samples, batch_size = trees.any()
    if not samples:
        return
    num_ranks = trees.draw.choice([1, 1, 2, 3])
    whole = loaders(tree, (num_ranks, 0), None)
    states: Any = None
    for _ in range(trees.draw.randint(2, 5)):
        made = loaders(tree, (num_ranks, trees.draw.choice([0, 1, 2, 3])), states)
        for _ in range(trees.draw.choice([0, 1, 3, 10])):
            try:
                expected = [next(loader) for loader in whole]
                row = [next(loader) for loader in made]
            except FatalSampleError:
                # A tree of which only a child with next to no weight has any samples.
                return
            assert row == expected
            assert not batch_size or {len(batch) for batch in row} == {batch_size}
        states = saved(made)
