"""pure. Loads one rank's part of a global batch from the user's iterator.

An error is recorded instead of raised, since all ranks must receive it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from megatron.packing.batch.columns import PAYLOADS, IntArray
from megatron.packing.batch.layout import OverLengthPolicy
from megatron.packing.batch.nodes import Nodes
from megatron.packing.batch.payloads import Payload
from megatron.packing.batch.reading import CostOfPayload, SampleError, SampleReader
from megatron.packing.batch.samples import Samples
from megatron.packing.batch.tree_shapes import truncated


@dataclass(frozen=True, kw_only=True)
class Loaded:
    """The sequences that a data rank loaded for a step, or the reason why it could not."""

    samples: Samples
    fetch: IntArray
    """int64 [n]: number of the `next` call that gave each, from 0."""
    payloads: Sequence[Payload] = ()
    """Those that the column `payloads` numbers."""
    num_dropped: int = 0
    num_truncated: int = 0
    ended: bool = False
    """The iterator had no more."""
    error: str | None = None

    @classmethod
    def failed(cls, error: str) -> Loaded:
        """Returns no sequences and the error."""
        return cls(samples=Samples.none(), fetch=np.empty(0, np.int64), error=error)


def load_samples(
    iterator: Iterator[Any] | None,
    num_fetches: int,
    longest: int,
    policy: OverLengthPolicy,
    rank_name: str,
    payload_cost: CostOfPayload | None = None,
    warned: set[str] | None = None,
) -> Loaded:
    """Calls `next` up to `num_fetches` times and returns all sequences.

    Args:
        longest: tokens. A longer sequence is an error, truncated or dropped, by `policy`.
        rank_name: first words of an error.
        payload_cost, warned: see `SampleReader`.
    """
    if iterator is None:
        return Loaded.failed(
            f"{rank_name} must have a data iterator, but has none; build one where is_data_rank() "
            "is true"
        )
    reader, ended = SampleReader(payload_cost, warned), False
    for number in range(num_fetches):
        try:
            reader.add(next(iterator), number)
        except StopIteration:
            ended = True
            break
        except Exception as failure:  # the user's code may raise anything, and other ranks wait
            return Loaded.failed(
                f"{rank_name}, fetch {number}: {type(failure).__name__}: {failure}"
            )
    try:
        samples = reader.samples()
    except SampleError as failure:
        return Loaded.failed(f"{rank_name}, fetch {failure.fetch}: ValueError: {failure}")
    loaded = Loaded(
        samples=samples, fetch=reader.fetch, payloads=tuple(reader.payloads), ended=ended
    )
    return _within(loaded, longest, policy, rank_name)


def _within(loaded: Loaded, longest: int, policy: OverLengthPolicy, rank_name: str) -> Loaded:
    """Returns sequences of at most `longest` tokens, by `policy`."""
    samples, fetch = loaded.samples, loaded.fetch
    if samples.lengths.max(initial=0) <= longest:  # nor are paths longer than their tree
        return loaded
    path_lengths = Nodes.of(samples).longest_paths(samples.lengths.size)
    is_long = path_lengths > longest
    num_long = int(is_long.sum())
    if not num_long:
        return loaded
    numbers = samples.columns.get(PAYLOADS)
    if policy == "truncate" and numbers is not None and (numbers[is_long] >= 0).any():
        place = int((is_long & (numbers >= 0)).argmax())
        return Loaded.failed(
            f"{rank_name}, fetch {fetch[place]}: a sample of {path_lengths[place]} tokens with "
            f"payloads cannot be truncated to {longest}, as its images would have no place; raise "
            "--max-seqlen-per-dp-cp-rank, or pass --over-length-policy drop"
        )
    if policy == "truncate":
        return replace(loaded, samples=truncated(samples, longest), num_truncated=num_long)
    if policy == "drop":
        kept = np.flatnonzero(~is_long)
        return replace(loaded, samples=samples.take(kept), fetch=fetch[kept], num_dropped=num_long)
    first = int(is_long.argmax())
    return Loaded.failed(
        f"{rank_name}, fetch {fetch[first]}: a sample of {path_lengths[first]} tokens does "
        f"not fit a pack of {longest}; raise --max-seqlen-per-dp-cp-rank or "
        "--context-parallel-size, or pass --over-length-policy truncate or drop"
    )
