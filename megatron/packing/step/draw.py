"""pure. Takes one rank's part of a global batch from the user's iterator.

What goes wrong is put down instead of raised: all ranks must hear of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from megatron.packing.batch.layout import OverLengthPolicy
from megatron.packing.batch.reading import SampleError, SampleReader
from megatron.packing.batch.samples import IntArray, Samples


@dataclass(frozen=True, kw_only=True)
class Draw:
    """The sequences that a rank drew for a step, or why it could not."""

    samples: Samples
    draws: IntArray
    """int64 [n]: which `next` gave each, from 0."""
    num_dropped: int = 0
    num_cut: int = 0
    ended: bool = False
    """The iterator had no more."""
    error: str | None = None

    @classmethod
    def failed(cls, error: str) -> Draw:
        """Return a draw that was given up."""
        return cls(samples=Samples.none(), draws=np.empty(0, np.int64), error=error)


def draw_samples(
    iterator: Iterator[Any] | None,
    num_draws: int,
    longest: int,
    policy: OverLengthPolicy,
    rank_name: str,
) -> Draw:
    """Call `next` up to `num_draws` times and return all sequences.

    A sequence of more than `longest` tokens is an error, cut, or dropped, by `policy`. `rank_name`
    begins each error's text.
    """
    if iterator is None:
        return Draw.failed(
            f"{rank_name} must have a data iterator, but has none; build one where "
            "is_drawing_rank() is true"
        )
    reader, ended = SampleReader(), False
    for number in range(num_draws):
        try:
            reader.add(next(iterator), number)
        except StopIteration:
            ended = True
            break
        except (
            Exception
        ) as failure:  # the edge to the user's data: whatever it is, all ranks must hear of it
            return Draw.failed(f"{rank_name}, draw {number}: {type(failure).__name__}: {failure}")
    try:
        samples, draws = reader.samples(), reader.draws
    except SampleError as failure:
        return Draw.failed(f"{rank_name}, draw {failure.draw}: ValueError: {failure}")
    is_long = samples.lengths > longest
    num_long = int(is_long.sum())
    if num_long and policy == "error":
        first = int(is_long.argmax())
        return Draw.failed(
            f"{rank_name}, draw {draws[first]}: a sample of {samples.lengths[first]} tokens does "
            f"not fit a pack of {longest}; raise --max-seqlen-per-dp-cp-rank or "
            "--context-parallel-size, or pass --over-length-policy truncate or drop"
        )
    if num_long and policy == "truncate":
        return Draw(samples=samples.first(longest), draws=draws, num_cut=num_long, ended=ended)
    if num_long:
        kept = np.flatnonzero(~is_long)
        return Draw(
            samples=samples.take(kept), draws=draws[kept], num_dropped=num_long, ended=ended
        )
    return Draw(samples=samples, draws=draws, ended=ended)
