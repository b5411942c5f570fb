"""pure. The samples of a split in order: sources one after the other, or blended. The order is
megatron.blending's; what is kept here is what a checkpoint must know of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron.blending.loading.sources import LoadedDataset, source_of
from megatron.blending.order.proportions import BlendMode
from megatron.blending.order.weights import WeightSchedule
from megatron.blending.streams.choice import BlendDataset, ConcatDataset
from megatron.blending.streams.node import Binding, SavableDataset
from megatron.blending.streams.positions import ShuffleBufferDataset
from megatron.blending.streams.source import SourceDataset


@dataclass(frozen=True, kw_only=True)
class SampleSet:
    """Sources, and an order of their records; `len` is the records of one pass."""

    names: Sequence[str]
    """Names of the sources, by number."""
    dataset: SavableDataset[Any] | None
    """Data set that gives (number of the source, `EncodedSample`) at each position; None where
    there is nothing to read.
    """
    seed: int
    """Seed that the data set is bound with."""
    identity: dict[str, Any]
    """Facts that decide which record a position means: plain values, for a checkpoint."""

    def __len__(self) -> int:
        return 0 if self.dataset is None else len(self.dataset)

    @property
    def sources(self) -> list[SourceDataset]:
        """Sources in the order of `names`."""
        return [] if self.dataset is None else list(_leaves(self.dataset))


def concatenated(
    names: Sequence[str], sources: Sequence[SourceDataset], seed: int | None = None
) -> SampleSet:
    """Returns sources, which are not shuffled, one after the other; with a seed, each pass in an
    order of its own over all of them.
    """
    dataset: SavableDataset[Any] | None = ConcatDataset(*sources) if sources else None
    if dataset is not None and seed is not None:
        dataset = ShuffleBufferDataset(dataset, len(dataset))
    identity = {"seed": seed, "fingerprint": " ".join(source.fingerprint() for source in sources)}
    return SampleSet(names=names, dataset=dataset, seed=seed or 0, identity=identity)


def blended(
    names: Sequence[str],
    loaded: Sequence[LoadedDataset],
    shares: Sequence[Any],
    seed: int,
    mode: BlendMode,
    schedule: WeightSchedule | None = None,
) -> SampleSet:
    """Returns sources in the proportions of a metadataset, each read pass by pass in an order of
    its own.

    loaded: each source with its weight in samples; shares: what the user said of each; schedule:
    weights over steps, instead.
    """
    dataset = BlendDataset(*loaded, mode=mode, schedule=schedule)
    sources = [
        {"name": name, "fingerprint": source_of(one.dataset).fingerprint(), "weight": str(share)}
        for name, one, share in zip(names, loaded, shares)
    ]
    bound = dataset.bind(Binding(seed=seed))
    order = [node.signature() for node in (bound, *bound.children)]
    identity = {"seed": seed, "blend": {"mode": mode, "sources": sources, "order": str(order)}}
    return SampleSet(names=names, dataset=dataset, seed=seed, identity=identity)


def _leaves(node: Any) -> Iterator[SourceDataset]:
    if not node.children:
        yield node
    for child in node.children:
        yield from _leaves(child)


def blend_changes(saved: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Returns the differences of two identities by which a position in the one means nothing in the
    other; [] where none of them is a blend.

    `["source code is new", "weight of chats was 1/2, is 1/3"]`
    """
    before, after = saved.get("blend"), now.get("blend")
    if before == after:
        return []
    if before is None or after is None:
        return [
            f"the data {'is a' if after else 'was a'} blend, and {'was' if after else 'is'} none"
        ]
    changes = _source_changes(
        {source["name"]: source for source in before["sources"]},
        {source["name"]: source for source in after["sources"]},
    )
    if before["mode"] != after["mode"]:
        changes.append(f"--blend-mode was {before['mode']}, is {after['mode']}")
    return sorted(changes) or [
        "the sources are read in another order, or in other proportions over steps"
    ]


def _source_changes(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """Returns what differs between the sources of two blends, by name."""
    changes = [f"source {name} is missing" for name in old if name not in new]
    changes += [f"source {name} is new" for name in new if name not in old]
    if not changes and list(old) != list(new):
        changes.append(f"the order of the sources was {', '.join(old)}, is {', '.join(new)}")
    for name in old.keys() & new.keys():
        if old[name]["fingerprint"] != new[name]["fingerprint"]:
            changes.append(f"source {name} has other records")
        if old[name]["weight"] != new[name]["weight"]:
            changes.append(
                f"the weight of {name} was {old[name]['weight']}, is {new[name]['weight']}"
            )
    return changes
