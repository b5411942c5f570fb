"""The simplex method, against the equations that its numbers solve."""

import numpy as np

from megatron.packing.scheduling.simplex import Basis


class Checked:
    """A basis beside its columns in full."""

    def __init__(self, rng) -> None:
        self.rng, self.amount = rng, np.array([float(rng.integers(1, 30))])
        self.columns = np.array([[float(rng.integers(1, 4))]])
        self.basis = Basis(1.0, self.amount[0] / self.columns[0, 0], 1.0 / self.columns[0, 0])
        self.exchanged: list[tuple[int, int] | None] = [None]

    def check(self) -> None:
        np.testing.assert_allclose(self.columns @ self.basis.amount, self.amount, atol=1e-9)
        np.testing.assert_allclose(self.basis.value @ self.columns, self.basis.cost, atol=1e-9)
        assert self.basis.amount.min() >= 0

    def grow(self) -> None:
        size = self.amount.size
        like = int(self.rng.integers(size))
        moved = self.amount[like] * self.rng.random()
        self.basis.grow(like, 2.0, moved)
        self.amount = np.append(self.amount, moved)
        self.amount[like] -= moved
        self.columns = np.pad(self.columns, (0, 1))
        self.columns[like, size], self.columns[size, size] = -1.0, 1.0
        self.exchanged.append(None)

    def enter(self) -> bool:
        """A random column that is worth it; whether it was."""
        size = self.amount.size
        if self.rng.random() < 0.4 and size > 1:
            one, other = self.rng.choice(size, 2, replace=False).tolist()
            more, less, cost = [one], other, 0.0
        else:
            more, less, cost = self.rng.integers(0, size, self.rng.integers(1, 4)).tolist(), -1, 1.0
        column = np.bincount(more, minlength=size).astype(float)
        if less >= 0:
            column[less] -= 1.0
        reduced = float(cost - self.basis.value @ column)
        if reduced > -1e-6:
            return False
        before = float(self.basis.cost @ self.basis.amount)
        basic = self.basis.enter(more, less, cost, reduced)
        if basic >= 0:
            self.columns[:, basic] = column
            self.exchanged[basic] = (more[0], less) if less >= 0 else None
            assert self.basis.cost @ self.basis.amount <= before + 1e-9
        return basic >= 0

    def shrink(self) -> bool:
        found = next(((k, *rows) for k, rows in enumerate(self.exchanged) if rows is not None), None)
        if found is None:
            return False
        basic, one, other = found
        self.basis.shrink(other, basic)
        self.columns[one] += self.columns[other]
        self.amount[one] += self.amount[other]
        self.columns = np.delete(np.delete(self.columns, other, axis=0), basic, axis=1)
        self.amount = np.delete(self.amount, other)
        del self.exchanged[basic]
        self.exchanged = [None] * len(self.exchanged)  # their rows have other numbers now
        return True


def test_amounts_and_values_solve_their_equations():
    """A wrong inverse chooses values that bound nothing: no error, but no proof where there was one."""
    entered = shrunk = 0
    for case in range(150):
        checked = Checked(np.random.default_rng(case))
        for _ in range(4):
            for step in (checked.grow, checked.grow, *[checked.enter] * 12, checked.shrink):
                is_done = step()
                checked.check()
                entered += is_done is True and step == checked.enter
                shrunk += is_done is True and step == checked.shrink
    assert entered > 1000, entered
    assert shrunk > 100, shrunk


def test_values_without_errors_are_the_same():
    checked = Checked(np.random.default_rng(1))
    for step in (checked.grow, checked.grow, *[checked.enter] * 20):
        step()
    before = checked.basis.value
    checked.basis.revalue()
    np.testing.assert_allclose(checked.basis.value, before)


def test_nothing_gives_way():
    """Only what takes up room of a row can replace what is there."""
    basis = Basis(1.0, 3.0, 1.0)
    assert basis.enter([], 0, 0.0, -1.0) == -1
    assert basis.amount.tolist() == [3.0]
