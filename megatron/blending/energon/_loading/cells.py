"""pure. A rank's cells: the positions of a part of the stream that it takes, one after the other.

Rank r of R begins with cell r and continues with every R-th. When other ranks continue from a saved
state, cells are dealt again from the first one on that some rank had not begun, and rows say which
of those behind it are gone. Worked example: two ranks saved the next cells 4 and 9. Rank 0 had
begun 0 and 2, rank 1 had begun 1, 3, 5 and 7. Of the cells from 4 on the row [4, 9] leaves 4, 6, 8,
9, 10, ...: cell k is gone if it is below the next one of rank (k - 4) % 2.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

Row = list[int]
"""The next cell of each rank, in order, when cells were dealt again."""


class CellState(NamedTuple):
    """Position of a rank in a part of the stream. Ints and lists: a state holds it as it is."""

    next: int
    """The next cell that it has not begun."""
    unfinished: Sequence[Sequence[int]] = ()
    """(cell, outputs given) of those that it has, which come first."""
    taken: Sequence[Row] = ()

    def cells(self, num_ranks: int, size: int | None) -> Iterator[tuple[int, int]]:
        """Yields (cell, outputs given before) of all cells that are left, `size` of a pass."""
        for cell, given in self.unfinished:
            yield cell, given
        cell, rows = self.next, self.taken
        while size is None or cell < size:
            if not rows or not is_taken(rows, cell):
                yield cell, 0
            elif cell >= max(map(max, rows)):
                rows = ()
            cell += num_ranks

    def after(self, cell: int, given: int, is_finished: bool, num_ranks: int) -> "CellState":
        """Returns the state when so many outputs of a cell were given."""
        known = [number for number, _ in self.unfinished]
        if cell in known:
            left, following = list(self.unfinished[known.index(cell) + 1 :]), self.next
        else:
            left, following = [], cell + num_ranks
        if not is_finished:
            left.insert(0, [cell, given])
        return self._replace(next=following, unfinished=left)


def dealt_again(states: Sequence[CellState], rank: int, num_ranks: int) -> CellState:
    """Returns where a rank begins that continues from the states of all ranks of another number."""
    row = [state.next for state in states]
    first = min(row)
    rows = [list(one) for one in {tuple(one) for state in states for one in state.taken}]
    # Ranks that stand at one point of the stream leave no gaps.
    rows += [row] if max(row) - first >= len(row) else []
    unfinished = sorted(list(cell) for state in states for cell in state.unfinished)
    return CellState(
        first + rank,
        unfinished[rank::num_ranks],
        [one for one in sorted(rows) if max(one) > first],
    )


def is_taken(rows: Sequence[Row], cell: int) -> bool:
    return any(cell < row[(cell - row[0]) % len(row)] for row in rows)
