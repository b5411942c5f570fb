"""tensor. The sequences that wait for a later step (see `delay`), on the data-parallel rank that drew them, with their
tokens.

Context-parallel ranks and the first and the last stage draw the same samples and so hold the same queue.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Waiting(NamedTuple):
    """Samples on the wire (see `sample.encode`), oldest first, and a row for each: length, kind, minus steps waited."""

    words: list[Tensor]
    rows: list[tuple[int, int, int]]


class DelayQueue:
    """What waits on this rank between steps; made once per run, on every rank that owns data, by whoever owns the loop.

    A step takes what waits by `begin` and leaves what waits after it by `finish`. A step that fails leaves the queue as
    it was; one that is repeated on a rewound iterator begins with the same sequences again.
    """

    def __init__(self, max_steps: int) -> None:
        if max_steps < 0:
            raise ValueError(f"--outlier-delay-steps must be at least 0, but is {max_steps}")
        self.max_steps = max_steps
        """Steps that a sequence waits at most; the same on all ranks. 0 lets all that wait leave at the next step: set
        it before the last one.
        """
        self._before = self._after = Waiting([], [])

    def begin(self, is_repeated: bool) -> Waiting:
        """What waits as a step begins; `is_repeated`: the step before, once more."""
        if not is_repeated:
            self._before = self._after
        return self._before

    def finish(self, waiting: Waiting) -> None:
        """The step was scheduled, and these wait for the next one."""
        self._after = waiting

    def __len__(self) -> int:
        return len(self._after.rows)

    def state_dict(self) -> dict[str, Any]:
        """This rank's part of a checkpoint between steps: rows, int64 [n, 3], and the words of all, int32."""
        rows = torch.tensor(self._after.rows, dtype=torch.int64).reshape(-1, 3)
        return {
            "rows": rows,
            "sizes": torch.tensor([len(words) for words in self._after.words], dtype=torch.int64),
            "words": torch.cat([torch.empty(0, dtype=torch.int32), *self._after.words]),
        }

    def load_state_dict(self, states: Sequence[dict[str, Any]], rank: int, num_ranks: int) -> None:
        """Continue as data-parallel rank `rank` of `num_ranks` from what all ranks saved, in the order of their ranks.

        As many ranks as saved take back what was theirs; others share all of it out evenly, in that order.
        """
        mine = [*states] if len(states) != num_ranks else [states[rank]]
        words = [each for state in mine for each in state["words"].split(state["sizes"].tolist())]
        rows = [tuple(row) for state in mine for row in state["rows"].tolist()]
        if len(states) != num_ranks:
            bounds = [len(rows) * edge // num_ranks for edge in (rank, rank + 1)]
            words, rows = words[slice(*bounds)], rows[slice(*bounds)]
        self._before = self._after = Waiting(words, rows)
