"""pure. Counts of the samples that a stream loaded, by source: one table of exact integers. Tables
of ranks are added.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from megatron.sft.data.chat_encoder import DROP_REASONS

COLUMNS = ("sequences", "tokens", "square_sum", "cut", *DROP_REASONS)
# Columns from here on count dropped records, one for each reason.
_FIRST_REASON = len(COLUMNS) - len(DROP_REASONS)


@dataclass(frozen=True, eq=False)
class Counts:
    """Counts by source. Each dropped record is counted in the column of its reason, and each pair
    that is dropped alone from a record of several.
    """

    table: npt.NDArray[np.int64]

    @classmethod
    def none(cls, num_sources: int) -> Counts:
        """Returns counts that are all zero."""
        return cls(np.zeros((num_sources, len(COLUMNS)), np.int64))

    def __sub__(self, other: Counts) -> Counts:
        return Counts(self.table - other.table)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Counts) and np.array_equal(self.table, other.table)

    @property
    def num_sequences(self) -> int:
        return int(self.of("sequences").sum())

    @property
    def num_tokens(self) -> int:
        return int(self.of("tokens").sum())

    @property
    def square_sum(self) -> int:
        return int(self.of("square_sum").sum())

    @property
    def num_cut(self) -> int:
        return int(self.of("cut").sum())

    @property
    def num_dropped(self) -> int:
        return int(self.table[:, _FIRST_REASON:].sum())

    def of(self, column: str) -> npt.NDArray[np.int64]:
        """Returns one column: int64 [sources]."""
        return self.table[:, COLUMNS.index(column)]

    def dropped(self, source: int) -> dict[str, int]:
        """Returns the number of dropped records and pairs of a source, by reason. Reasons without
        any are left out.
        """
        numbers = self.table[source, _FIRST_REASON:].tolist()
        return {reason: number for reason, number in zip(DROP_REASONS, numbers) if number}
