"""pure. The samples of each step: which ones is a function of the position, the same for every layout.

The global stream of samples is one for all numbers of ranks; a global batch is the next `global_batch_size` positions
of it, and a data-parallel rank draws its share of them. So the place to resume from is one number, the samples
consumed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any, NamedTuple

from megatron.sft.data.chat_encoder import Dropped, EncodedSample
from megatron.sft.data.counts import COLUMNS, Counts
from megatron.sft.data.mixture import Mixture, Place


class Share(NamedTuple):
    """Which part of every global batch a data-parallel rank draws, and in which portions."""

    rank: int
    num_ranks: int
    global_batch_size: int
    micro_batch_size: int

    @property
    def num_draws(self) -> int:
        """`next` calls per global batch; equal on all ranks."""
        return self.global_batch_size // (self.num_ranks * self.micro_batch_size)

    def positions_of(self, start: int, end: int) -> range:
        """Those of the batch at [start, end) that this rank draws."""
        size = end - start
        return range(start + size * self.rank // self.num_ranks, start + size * (self.rank + 1) // self.num_ranks)

    def draws_of(self, num_positions: int) -> list[slice]:
        """Which of its positions each draw takes; the last batch of finite data may be small, and draws be empty."""
        starts = [number * self.micro_batch_size for number in range(self.num_draws)]
        return [slice(min(start, num_positions), start + self.micro_batch_size) for start in starts]


class SampleStream:
    """Iterator over a rank's draws: each `next` gives the next up to `micro_batch_size` samples, as dicts of arrays.

    `seek` goes to any step boundary. Records that make no sample are left out; `counts` tells of them, and of those
    drawn. The order of a batch is worked out at once, a few hundred microseconds.
    """

    def __init__(self, mixture: Mixture, share: Share, *, is_endless: bool, consumed_samples: int = 0) -> None:
        """`is_endless`: for training; else the data is read once, and then StopIteration is raised."""
        self._mixture = mixture
        self._share = share
        self._is_endless = is_endless
        self._table = Counts.none(len(mixture.sources)).table
        self.seek(consumed_samples)

    @property
    def counts(self) -> Counts:
        """Of all that was drawn."""
        return Counts(self._table.copy())

    def seek(self, consumed_samples: int) -> None:
        """Continue with the global batch that follows this many samples of the stream."""
        self._next_batch = consumed_samples
        self._draws: deque[list[Place]] = deque()

    def __iter__(self) -> SampleStream:
        return self

    def __next__(self) -> list[Mapping[str, Any]]:
        if not self._draws:
            self._plan_batch()
        samples: list[Mapping[str, Any]] = []
        for place in self._draws.popleft():
            made = self._mixture.sources[place.source][place.record]
            self._count(place.source, made)
            if isinstance(made, EncodedSample):
                fields = {"tokens": made.tokens, "labels": made.labels, "loss_mask": made.loss_mask}
                samples.append({**fields, "source": place.source})
        return samples

    def _plan_batch(self) -> None:
        end = self._next_batch + self._share.global_batch_size
        if not self._is_endless:
            end = min(end, len(self._mixture))
            if end <= self._next_batch:
                raise StopIteration
        places = self._mixture.places(self._share.positions_of(self._next_batch, end))
        self._draws.extend(places[draw] for draw in self._share.draws_of(len(places)))
        self._next_batch = end

    def _count(self, source: int, made: EncodedSample | Dropped) -> None:
        row = self._table[source]
        if isinstance(made, Dropped):
            row[COLUMNS.index(made.reason)] += 1
        else:
            length = len(made.tokens)
            row[:4] += (1, length, length * length, made.is_cut)
