"""pure. The simplex method, with an explicit inverse of its basis that grows and shrinks by rows.

A twin of native_simplex.hpp to the last bit: elementwise operations and sums in a fixed order only, which round the
same in numpy and in C++ (built without fused multiply-add).
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]

_LEAST_PIVOT = 1e-9


class Basis:
    """One basic column for each row: what columns hold of the rows adds up to what there is of each."""

    def __init__(self, cost: float, amount: float, inverse: float) -> None:
        self.cost, self.amount = np.array([cost]), np.array([amount])
        """Of one of each basic column, float64 [rows]; how many there are of it."""
        self.value = np.array([cost * inverse])
        """Dual value of each row, float64 [rows]."""
        self._inverse = np.array([[inverse]])

    @classmethod
    def of_ones(cls, cost: FloatArray, amount: FloatArray) -> Basis:
        """For each row a basic column that holds one of it and nothing else."""
        basis = cls(0.0, 0.0, 1.0)
        basis.cost, basis.amount, basis.value = cost.copy(), amount.copy(), cost.copy()
        basis._inverse = np.eye(cost.size)
        return basis

    def grow(self, like: int, cost: float, amount: float) -> None:
        """Adds a row, and for it a basic column that also takes from row `like`."""
        size = self.cost.size
        larger = np.zeros((size + 1, size + 1))
        larger[:size, :size] = self._inverse
        larger[:size, size] = self._inverse[:, like]
        larger[size, size] = 1.0
        self._inverse = larger
        self.cost, self.amount = np.append(self.cost, cost), np.append(self.amount, amount)
        self.value = np.append(self.value, self.value[like] + cost)

    def shrink(self, row: int, basic: int) -> None:
        """Joins a row with that other one which basic column `basic`, of no cost, gives its holdings to."""
        self._inverse = np.delete(np.delete(self._inverse, row, axis=1), basic, axis=0)
        self.cost, self.amount = np.delete(self.cost, basic), np.delete(self.amount, basic)
        self.value = np.delete(self.value, row)

    def revalue(self) -> None:
        """Computes the dual values anew, without the errors that add up while columns enter."""
        self.value = np.zeros(self.cost.size)
        for cost, numbers in zip(self.cost, self._inverse, strict=True):
            self.value = self.value + cost * numbers

    def enter(self, more: list[int], less: int, cost: float, reduced: float) -> int:
        """Lets a column enter that holds one of each row in `more`, and -1 of row `less` unless that is -1.

        `reduced` is its cost less the dual values of what it holds. Returns the number of the basic column that it
        replaces; -1 where none gives way, and all stays as it is.
        """
        entering = np.zeros(self.cost.size)
        for row in more:
            entering = entering + self._inverse[:, row]
        if less >= 0:
            entering = entering - self._inverse[:, less]
        ratios = np.full(entering.size, np.inf)
        np.divide(self.amount, entering, out=ratios, where=entering > _LEAST_PIVOT)
        leaving = int(ratios.argmin())
        least = ratios[leaving]
        if not least < np.inf:
            return -1
        pivot = self._inverse[leaving] / entering[leaving]
        self._inverse = self._inverse + (-entering)[:, None] * pivot
        self._inverse[leaving] = pivot
        self.amount = np.maximum(self.amount - entering * least, 0.0)
        self.value = self.value + reduced * pivot
        self.amount[leaving], self.cost[leaving] = least, cost
        return leaving
