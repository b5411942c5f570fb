"""tensor. Sequences that a data rank may train in a step: those that waited, those it loaded."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from megatron.packing.batch.columns import IntArray
from megatron.packing.batch.payloads import Payload
from megatron.packing.batch.samples import Samples
from megatron.packing.step.delay import Delayed, DelayQueue, used_payloads, with_payloads
from megatron.packing.step.load import Loaded


class LocalSamples(NamedTuple):
    """Sequences of this data rank that the step may train: those delayed, then those loaded."""

    loaded: Loaded
    delayed: Delayed | None
    """None without a queue."""
    samples: Samples
    payloads: Sequence[Payload]

    @classmethod
    def of(
        cls, loaded: Loaded, queue: DelayQueue | None, name: str, *, is_repeated: bool
    ) -> LocalSamples:
        """Returns what was loaded and what waits in the queue.

        is_repeated: whether these samples were given in the step before. The queue then begins
        where that step began.
        """
        if queue is None:
            return cls(loaded, None, loaded.samples, loaded.payloads)
        delayed = queue.begin(is_repeated=is_repeated)
        parts = [(delayed.samples, delayed.payloads), (loaded.samples, loaded.payloads)]
        try:
            return cls(loaded, delayed, *with_payloads(parts))
        except ValueError as failure:
            failed = Loaded.failed(f"{name}: {failure}")
            return cls(failed, None, failed.samples, failed.payloads)

    def left_behind(self, stays: IntArray, *, restores: bool) -> Delayed:
        """Returns the sequences `stays`, which wait for a later step: one step more than so far.

        Args:
            restores: whether a key makes a payload again, which then waits without its tensors.
        """
        assert self.delayed is not None
        steps = np.zeros(self.samples.lengths.size, np.int64)
        steps[: self.delayed.steps.size] = self.delayed.steps
        samples, payloads = used_payloads(
            self.samples.take(stays), self.payloads, restores=restores
        )
        return Delayed(samples, steps[stays] + 1, payloads)
