"""pure. The samples of a split in order: sources one after the other, or blended.

megatron.blending computes the order. This module adds the identity of a split: the facts that a
checkpoint records, and by which a later run sees whether a position still means the same record.
"""

from __future__ import annotations

import re
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

_PRINT = re.compile(r"\b([0-9a-f]{32})[0-9a-f]{32}\b")
"""Fingerprint of a file: its first half is all of it in earlier versions."""


@dataclass(frozen=True, kw_only=True)
class SampleSet:
    """Sources, and an order of their records. `len` is the number of records in one epoch."""

    names: Sequence[str]
    """Names of the sources, by number."""
    dataset: SavableDataset[Any] | None
    """Data set with (number of the source, `EncodedSample`) at each position; None for an empty
    split.
    """
    seed: int
    """Random seed of the order."""
    identity: dict[str, Any]
    """Facts that decide which record stands at a position: plain values, for a checkpoint."""

    def __len__(self) -> int:
        return 0 if self.dataset is None else len(self.dataset)

    @property
    def sources(self) -> list[SourceDataset]:
        """Sources in the order of `names`."""
        return [] if self.dataset is None else list(_leaves(self.dataset))


def concatenated(
    names: Sequence[str], sources: Sequence[SourceDataset], seed: int | None = None
) -> SampleSet:
    """Returns unshuffled sources one after the other. With a seed, each epoch shuffles the records
    of all sources together.
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
    """Returns sources mixed in proportion. Each source is shuffled by itself, epoch by epoch.

    Args:
        loaded: each source with its weight in samples.
        shares: the weights as the user gave them, for the identity.
        schedule: weights that change over steps, in place of those of `loaded`.
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


def match_saved_form(saved: Mapping[str, Any], now: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the identity `now` of data in the form of a saved one: earlier versions had
    fingerprints of 32 digits, the first half of today's.
    """
    if any(_PRINT.search(text) for text in _fingerprints(saved)):
        return now
    return _with_former_prints(now)


def _fingerprints(identity: Any) -> Iterator[str]:
    items = identity.items() if isinstance(identity, Mapping) else ()
    for key, value in items:
        if key == "fingerprint":
            yield value
        yield from _fingerprints(value)
    for value in identity if isinstance(identity, list) else ():
        yield from _fingerprints(value)


def _with_former_prints(identity: Any) -> Any:
    if isinstance(identity, list):
        return [_with_former_prints(value) for value in identity]
    if not isinstance(identity, Mapping):
        return identity
    return {
        key: _PRINT.sub(r"\1", value) if key == "fingerprint" else _with_former_prints(value)
        for key, value in identity.items()
    }


def blend_changes(saved: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Returns the differences between two blends that give a position another record; [] if there
    are none, or if neither identity is that of a blend.

    `["source code is new", "the weight of chats was 1/2, is 1/3"]`
    """
    before, after = saved.get("blend"), now.get("blend")
    if before == after:
        return []
    if before is None or after is None:
        was, now_is = ("not a", "a") if after else ("a", "not a")
        return [f"the data was {was} blend, and is {now_is} blend now"]
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
