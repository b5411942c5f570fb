"""Sources in memory, and what comes of a tree of data sets for some number of ranks and workers."""

import itertools
import json
import pickle
from collections import deque
from typing import Any

from megatron.blending import RepeatDataset, SourceDataset
from megatron.blending.energon._loading.loader import WorkerConfig, get_savable_loader
from megatron.blending.energon._loading.server import END
from megatron.blending.formats.record import RecordError, read_each


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


def listed(dataset, count=None, **options):
    """The outputs of a rank alone: of a pass, or so many."""
    loader = get_savable_loader(dataset, config(**options))
    return list(itertools.islice(loader, count))


def config(rank=0, num_ranks=1, num_workers=0, **options):
    options = {"seed": 1, "failure_tolerance": 0, **options}
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
        self._failures: deque[bytes] = deque()
        self._messages: dict[int, deque[bytes]] = {}
        self._error = None
        self._server = self._server or self._make(
            lambda failure: self._failures.append(pickle.dumps(failure))
        )
        self._server.start(start)

    def next(self, lane):
        messages = self._messages.setdefault(lane, deque())
        while not self._error and len(messages) < self._ahead:
            try:
                message = self._server.next(lane)
            except Exception as error:
                self._error, self._server = error, None
                break
            messages.append(pickle.dumps(message))
            if message.turn == END:
                break
        if self._failures:
            return pickle.loads(self._failures.popleft())
        if not messages:
            raise self._error
        return pickle.loads(messages.popleft())

    def close(self):
        pass
