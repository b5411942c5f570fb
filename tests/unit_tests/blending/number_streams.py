"""Sources in memory, and what comes of a tree of data sets for some number of ranks and workers."""

import json

from megatron.blending.formats.record import RecordError, read_each
from megatron.blending.loading.loader import WorkerConfig, get_savable_loader
from megatron.blending.loading.server import END, Server
from megatron.blending.streams.datasets import RepeatDataset, SourceDataset
from megatron.blending.streams.failures import Failures
from megatron.blending.streams.node import Binding

NUM_LANES = 12


class Numbers:
    """Records (name, 0), (name, 1), ...; those in `bad` cannot be read."""

    def __init__(self, name, count, bad=()):
        self.name, self.count, self.bad = name, count, frozenset(bad)

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        if not 0 <= index < self.count:
            raise IndexError(index)
        if index in self.bad:
            raise RecordError(f"{self.describe(index)}: is bad")
        return (self.name, index)

    def read(self, indices):
        return read_each(self, indices)

    def describe(self, index):
        return f"{self.name}:{index}"

    def fingerprint(self):
        return f"{self.name} {self.count}".ljust(32, ".")


def leaf(name="a", count=50, bad=(), **options):
    return SourceDataset(Numbers(name, count, bad), name=name, **options)


def endless(name="a", count=50, bad=(), **options):
    return RepeatDataset(leaf(name, count, bad, **options))


def servers(dataset, num_seats=1, num_lanes=NUM_LANES, seed=1, tolerance=0):
    root = dataset.bind(Binding(seed))
    return [Server(root, num_lanes, seat, num_seats, Failures(tolerance)) for seat in range(num_seats)]


def outputs(dataset, count=None, num_seats=1, **options):
    """{slot: output} of all seats, of `count` slots or of a pass."""
    found = {}
    for server in servers(dataset, num_seats, **options):
        while True:
            output = server.next()
            if output.slot == END or (count is not None and output.slot >= count):
                break
            found[output.slot] = output.value
    return found


def listed(dataset, count=None, **options):
    found = outputs(dataset, count, **options)
    return [found[slot] for slot in sorted(found)]


def config(rank=0, num_ranks=1, num_workers=0, **options):
    options = {"num_lanes": NUM_LANES, "seed": 1, "worker_kind": "thread", "failure_tolerance": 0, **options}
    return WorkerConfig(rank=rank, world_size=num_ranks, num_workers=num_workers, **options)


def loaders(dataset, num_ranks=1, num_workers=0, states=None, **options):
    made = [get_savable_loader(dataset, config(rank, num_ranks, num_workers, **options)) for rank in range(num_ranks)]
    for loader in made if states is not None else ():
        loader.load_state_dict(states)
    return made


def drawn(made, count):
    """`count` outputs of each rank, in the order of the stream; and the states, as they come back from a file."""
    rows = [[next(loader, None) for loader in made] for _ in range(count)]
    states = [json.loads(json.dumps(loader.state_dict())) for loader in made]
    for loader in made:
        loader.close()
    return [output for row in rows for output in row if output is not None], states
