"""pure. Which record of which source stands at a position of the stream: one source after the other, or a blend.

The order is megatron.blending's; what is kept here is what a checkpoint must know of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any, NamedTuple, Protocol

import numpy as np

from megatron.blending.loading.dataset_loader import LoadedDataset
from megatron.blending.order.permutation import permute_indices
from megatron.blending.order.weights import WeightSchedule
from megatron.blending.streams.choice import BlendDataset, ChoicePlan
from megatron.blending.streams.node import Binding, Block
from megatron.sft.data.chat_encoder import Dropped, EncodedSample


class Source(Protocol):
    """Map-style: `len` records, each a sample or the reason why it makes none."""

    @property
    def name(self) -> str: ...

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> EncodedSample | Dropped: ...

    def fingerprint(self) -> str:
        """Changes with the records and their order."""
        ...


class Place(NamedTuple):
    """A record, by the numbers of its source and within it."""

    source: int
    record: int


class Mixture(Protocol):
    """Sources, and an order of their records."""

    @property
    def sources(self) -> Sequence[Source]: ...

    def __len__(self) -> int:
        """Records of one pass; where it is 0, there is nothing to read."""
        ...

    def places(self, positions: range) -> list[Place]:
        """What stands at some positions of the stream."""
        ...

    def identity(self) -> dict[str, Any]:
        """What decides which record a position means: plain values, for a checkpoint."""
        ...


class Concatenation:
    """Records [start, end) of sources, one source after the other: as they stand, or each epoch in an order of its
    own over all of them.
    """

    def __init__(
        self, sources: Sequence[Source], start: int = 0, end: int | None = None, *, seed: int | None = None
    ) -> None:
        """`seed`: of the order of each epoch; None keeps that of the sources."""
        self.sources = sources
        self._ends = list(accumulate(len(source) for source in sources))
        self._start = start
        self._size = (sum(map(len, sources)) if end is None else end) - start
        self._seed = seed

    def __len__(self) -> int:
        return self._size

    def places(self, positions: range) -> list[Place]:
        epochs, indices = np.divmod(np.arange(positions.start, positions.stop), self._size)
        if self._seed is not None:
            for epoch in np.unique(epochs).tolist():
                here = epochs == epoch
                indices[here] = permute_indices(indices[here], self._size, self._seed, epoch)
        records = self._start + indices
        numbers = np.searchsorted(self._ends, records, side="right")
        starts = np.array([0, *self._ends])
        return list(map(Place, numbers.tolist(), (records - starts[numbers]).tolist()))

    def identity(self) -> dict[str, Any]:
        prints = " ".join(source.fingerprint() for source in self.sources)
        return {"seed": self._seed, "fingerprint": f"{self._start}-{self._start + self._size} of {prints}"}


class Blended:
    """Sources in the proportions of a metadataset, each read pass by pass in an order of its own."""

    def __init__(
        self,
        sources: Sequence[Source],
        loaded: Sequence[LoadedDataset],
        shares: Sequence[Any],
        seed: int,
        mode: str,
        schedule: WeightSchedule | None = None,
    ) -> None:
        """`loaded`: each source with its weight in samples; `shares`: what the user said of each; `schedule`: weights
        over steps, instead.
        """
        self.sources = sources
        self._shares = shares
        self._seed = seed
        self._mode = mode
        self._tree = BlendDataset(*loaded, mode=mode, schedule=schedule).bind(Binding(seed=seed))

    def __len__(self) -> int:
        return sum(map(len, self.sources))

    def places(self, positions: range) -> list[Place]:
        plan = self._tree.plan(np.arange(positions.start, positions.stop), Block())
        assert isinstance(plan, ChoicePlan)
        found = []
        for number in range(len(positions)):
            source, place = plan.at(number)
            records: Any = plan.child(source)
            found.append(Place(source, records.record(place)))
        return found

    def identity(self) -> dict[str, Any]:
        sources = [
            {"name": source.name, "fingerprint": source.fingerprint(), "weight": str(share)}
            for source, share in zip(self.sources, self._shares)
        ]
        order = [node.signature() for node in (self._tree, *self._tree.children)]
        return {"seed": self._seed, "blend": {"mode": self._mode, "sources": sources, "order": str(order)}}


def blend_changes(saved: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """What differs between two identities, so that a position in the one means nothing in the other; [] where none of
    them is a blend.

    `["source code is new", "weight of chats was 1/2, is 1/3"]`
    """
    before, after = saved.get("blend"), now.get("blend")
    if before == after:
        return []
    if before is None or after is None:
        return [f"the data {'is a' if after else 'was a'} blend, and {'was' if after else 'is'} none"]
    old = {source["name"]: source for source in before["sources"]}
    new = {source["name"]: source for source in after["sources"]}
    changes = [f"source {name} is gone" for name in old if name not in new]
    changes += [f"source {name} is new" for name in new if name not in old]
    if not changes and list(old) != list(new):
        changes.append(f"the order of the sources was {', '.join(old)}, is {', '.join(new)}")
    for name in old.keys() & new.keys():
        if old[name]["fingerprint"] != new[name]["fingerprint"]:
            changes.append(f"source {name} has other records")
        if old[name]["weight"] != new[name]["weight"]:
            changes.append(f"the weight of {name} was {old[name]['weight']}, is {new[name]['weight']}")
    if before["mode"] != after["mode"]:
        changes.append(f"--blend-mode was {before['mode']}, is {after['mode']}")
    return sorted(changes) or ["the sources are read in another order, or in other proportions over steps"]
