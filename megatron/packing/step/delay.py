"""tensor. Holds the sequences that wait for a later step (see `scheduling.delay`), on the rank that
drew them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from megatron.packing.batch.columns import ALWAYS, DERIVABLE, Column
from megatron.packing.batch.samples import IntArray, Samples, joined

_STATE_VERSION = 2


class Delayed(NamedTuple):
    """Sequences that wait, oldest first, and by how many steps each is late: int64 [n]."""

    samples: Samples
    steps: IntArray

    @classmethod
    def none(cls) -> Delayed:
        """Return that nothing waits."""
        return cls(Samples.none(), np.empty(0, np.int64))


class DelayQueue:
    """What waits on this rank between steps; made once per run, on every rank, by whoever owns the
    loop.

    A step takes what waits by `begin` and leaves what waits after it by `finish`. A step that fails
    leaves the queue as it was; one that is repeated on a rewound iterator begins with the same
    sequences again. It stays empty on ranks that do not draw. Who prepares steps ahead does so with
    a `copy`, and hands what waits after each (see `GlobalBatch.delayed`) to the queue of the run
    when that step is trained.
    """

    def __init__(self, max_steps: int, delayed: Delayed | None = None) -> None:
        if max_steps < 0:
            raise ValueError(f"--outlier-delay-steps must be at least 0, but is {max_steps}")
        self.max_steps = max_steps
        """Steps that a sequence waits at most; the same on all ranks. 0 lets all that wait leave at
        the next step: set it before the last one.
        """
        self._before = self._after = delayed or Delayed.none()

    def copy(self) -> DelayQueue:
        """Return another queue in which the same sequences wait."""
        return DelayQueue(self.max_steps, self._after)

    @property
    def delayed(self) -> Delayed:
        """What waits now."""
        return self._after

    def begin(self, is_repeated: bool) -> Delayed:
        """Return what waits as a step begins; `is_repeated`: the step before, once more."""
        if not is_repeated:
            self._before = self._after
        return self._before

    def finish(self, delayed: Delayed) -> None:
        """Note that the step was scheduled, and that these wait for the next one."""
        self._after = delayed

    def __len__(self) -> int:
        return len(self._after.steps)

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's part of a checkpoint between steps, as tensors and plain values."""
        samples, steps = self._after
        return {
            "version": _STATE_VERSION,
            "steps": torch.from_numpy(steps),
            "lengths": torch.from_numpy(samples.lengths),
            "columns": {
                c.name: torch.from_numpy(values)
                for c, values in samples.columns.items()
                if not c.extra
            },
            "extra_per_token": {
                c.name: torch.from_numpy(v) for c, v in samples.extra().items() if c.per_token
            },
            "extra_per_sequence": {
                c.name: torch.from_numpy(v) for c, v in samples.extra().items() if not c.per_token
            },
        }

    def load_state_dict(self, states: Sequence[dict[str, Any]], rank: int, num_ranks: int) -> None:
        """Continue as data-parallel rank `rank` of `num_ranks` from what all ranks saved, in the
        order of their ranks.

        As many ranks as saved take back what was theirs; others share all of it out evenly, in that
        order. Raises ValueError for a state of another version, or whose columns do not fit its
        lengths.
        """
        if any(state.get("version") != _STATE_VERSION for state in states):
            raise ValueError(
                "the checkpoint holds delayed sequences as another version wrote them; continue it "
                "with that version up to a step at which none is delayed"
            )
        mine = [*states] if len(states) != num_ranks else [states[rank]]
        loaded = [_loaded(state) for state in mine]
        samples = joined([delayed.samples for delayed in loaded])
        steps = np.concatenate([delayed.steps for delayed in loaded])
        if len(states) != num_ranks:
            first, last = (len(steps) * edge // num_ranks for edge in (rank, rank + 1))
            samples, steps = samples.take(np.arange(first, last)), steps[first:last]
        self._before = self._after = Delayed(samples, steps)


def _loaded(state: dict[str, Any]) -> Delayed:
    lengths, steps = np.asarray(state["lengths"]), np.asarray(state["steps"])
    table = {column.name: column for column in (*ALWAYS, *DERIVABLE)}
    columns = {
        table[name]: np.asarray(values)
        for name, values in state["columns"].items()
        if name in table
    }
    for key in ("extra_per_token", "extra_per_sequence"):
        for name, tensor in state[key].items():
            values = np.asarray(tensor)
            column = Column(
                name, values.dtype.name, key == "extra_per_token", values.shape[1:], extra=True
            )
            columns[column] = values
    size = (lengths.size, int(lengths.sum()))
    is_whole = steps.size == lengths.size and columns.keys() >= set(ALWAYS)
    for column, values in columns.items():
        is_whole &= (
            values.shape == (column.num_rows(*size), *column.shape) and values.dtype == column.dtype
        )
    if not is_whole:
        raise ValueError("the checkpoint's delayed sequences are damaged; take another checkpoint")
    return Delayed(Samples(lengths=lengths, columns=columns), steps)
