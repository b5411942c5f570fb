"""Sources in memory, and what comes of a tree of data sets for some number of ranks and workers."""

import json
import pickle
from collections import deque
from typing import Any

from megatron.blending import RepeatDataset, SourceDataset
from megatron.blending.formats.record import RecordError, read_each
from megatron.blending.loading.loader import WorkerConfig, get_savable_loader
from megatron.blending.loading.server import END, Server
from megatron.blending.streams.failures import Failures
from megatron.blending.streams.node import Binding

NUM_SHARDS = 12


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


def source_of(name="a", count=50, bad=(), **options):
    return SourceDataset(Numbers(name, count, bad), name=name, **options)


def endless(name="a", count=50, bad=(), **options):
    return RepeatDataset(source_of(name, count, bad, **options))


def servers(dataset, num_servers=1, num_shards=NUM_SHARDS, seed=1, tolerance=0):
    root = dataset.bind(Binding(seed))
    return [
        Server(root, num_shards, worker, num_servers, Failures(tolerance))
        for worker in range(num_servers)
    ]


def outputs(dataset, count=None, num_servers=1, **options):
    """{slot: output} of all of them, of `count` slots or of a pass."""
    found = {}
    for server in servers(dataset, num_servers, **options):
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
    options = {"num_shards": NUM_SHARDS, "seed": 1, "failure_tolerance": 0, **options}
    return WorkerConfig(rank=rank, world_size=num_ranks, num_workers=num_workers, **options)


def loaders(dataset, num_ranks=1, num_workers=0, states=None, **options):
    made = [
        get_savable_loader(dataset, config(rank, num_ranks, num_workers, **options))
        for rank in range(num_ranks)
    ]
    for loader in made if states is not None else ():
        loader.load_state_dict(states)
    return made


def drawn(made, count):
    """`count` outputs of each rank, in the order of the stream; and the states, as they come back
    from a file.
    """
    rows = [[next(loader, None) for loader in made] for _ in range(count)]
    states = [json.loads(json.dumps(loader.state_dict())) for loader in made]
    for loader in made:
        loader.close()
    return [output for row in rows for output in row if output is not None], states


class WorkerHere:
    """A worker that works ahead as a process does, but in this one: hundreds of tests would start
    thousands.
    """

    def __init__(self, name, make_server, ahead, config, others):
        self._make, self._ahead = make_server, ahead
        self._server: Any = None
        self._error: Any = None

    def start(self, start):
        start = pickle.loads(pickle.dumps(start))
        self._told: deque[bytes] = deque()
        self._messages: deque[bytes] = deque()
        self._error, self._is_over = None, False
        self._server = self._server or self._make(
            lambda failure: self._told.append(pickle.dumps(failure))
        )
        self._server.start(start)

    def next(self):
        while not self._is_over and not self._error and len(self._messages) < self._ahead:
            try:
                message = self._server.next()
            except Exception as error:
                self._error, self._server = error, None
                break
            self._messages.append(
                pickle.dumps(message._replace(shards=self._server.changed_states()))
            )
            self._is_over = message.slot == END
        if self._told:
            return pickle.loads(self._told.popleft())
        if not self._messages:
            raise self._error
        return pickle.loads(self._messages.popleft())

    def close(self):
        pass
