"""pure. Earliest deadline first: the order of a blend's outputs in which no child is ever a whole output off its share.

A child's share W(k) is what its weights sum to over the first k outputs. Its output j may stand from the first place t
where W(t + 1) > j, its release, up to its deadline, the last t where W(t) < j + 1: then it has at every prefix more
than W - 1 and less than W + 1 outputs. As each place is a whole output of shares, of which each falls in the window of
one of a child's outputs, an order that keeps all windows exists, for any weights, also such as vary with the place (a
bipartite graph with a perfect fractional matching has a whole one, Birkhoff, 1946; the chairman assignment problem,
Tijdeman, 1980). Earliest deadline first finds one where windows are intervals.
"""

import heapq
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from numpy.random import RandomState

Ints = npt.NDArray[np.int64]

NEVER = 2**62
"""The deadline of what may stay out for ever."""

_NUM_EXCHANGES = 16


class Behind(NamedTuple):
    """How much each child's share is above its outputs at place 0, times the sum of the weights, rounded down and up.

    Whole numbers are enough: a release is (j * sum - behind) // weight, and the floor of behind's multiple is no other.
    """

    low: Sequence[int]
    high: Sequence[int]


class Windows:
    """Releases and deadlines where weights are constant from place 0 on; each child's outputs count from 0 there."""

    def __init__(
        self,
        weights: Sequence[int],
        behind: Behind,
        end: int = NEVER,
        last_deadlines: Sequence[int] | None = None,
    ) -> None:
        """`last_deadlines`: of each child's output whose deadline is at `end` or later, as weights change there.

        There is one at most of each child that is released before. Without them nothing at `end` is known.
        """
        self.weights = weights
        self.total = sum(weights)
        self.behind = behind
        self.end = end
        self.last_deadlines = last_deadlines if last_deadlines is not None else [NEVER] * len(weights)

    def of(self, children: Ints, numbers: Ints) -> tuple[Ints, Ints]:
        """Return releases and deadlines of many."""
        low, high = (np.array(amounts, np.int64)[children] for amounts in self.behind)
        weights = np.array(self.weights, np.int64)[children]
        steps = np.maximum(weights, 1)
        releases = (numbers * self.total - high) // steps
        deadlines = -((low - (numbers + 1) * self.total) // steps) - 1
        is_last = (deadlines >= self.end) | (weights == 0)
        deadlines[is_last] = np.array(self.last_deadlines, np.int64)[children[is_last]]
        return releases, deadlines


class EarliestDeadlineFirst:
    """Goes through the places once, from 0 on. About 2 microseconds for each."""

    def __init__(self, windows: Windows, begun: Sequence[int] = (), spare: Sequence[int] = ()) -> None:
        """`begun`: children without weight whose output 0 takes part, to be there by its last deadline.

        `spare`: such as only stand where no other is released, the first one first.
        """
        self.is_late = False
        """Whether a deadline was missed."""
        self._windows = windows
        self._counts = [0] * len(windows.weights)
        self._waiting = [
            (-high // weight, child)
            for child, (weight, high) in enumerate(zip(windows.weights, windows.behind.high))
            if weight
        ]
        heapq.heapify(self._waiting)
        self._ready = [(windows.last_deadlines[child], child) for child in begun]
        heapq.heapify(self._ready)
        self._spare = list(spare)

    def take(self, start: int, end: int) -> tuple[Ints, Ints]:
        """Return (children, numbers) of places that begin where the last ones ended."""
        children, numbers = [0] * (end - start), [0] * (end - start)
        waiting, ready, counts = self._waiting, self._ready, self._counts
        weights, total, (low, high) = self._windows.weights, self._windows.total, self._windows.behind
        last, last_deadlines = self._windows.end, self._windows.last_deadlines
        for place in range(start, end):
            if self._spare and not ready and waiting[0][0] > place:
                child = self._spare.pop(0)
                ready.append((last_deadlines[child], child))
            # If all are ahead, which only rounding brings about, the one that is so least.
            while waiting and (waiting[0][0] <= place or not ready):
                child = heapq.heappop(waiting)[1]
                deadline = -((low[child] - (counts[child] + 1) * total) // weights[child]) - 1
                heapq.heappush(ready, (deadline if deadline < last else last_deadlines[child], child))
            deadline, child = heapq.heappop(ready)
            if deadline < place:
                self.is_late = True
            children[place - start] = child
            numbers[place - start] = counts[child]
            counts[child] += 1
            if weights[child]:
                heapq.heappush(waiting, ((counts[child] * total - high[child]) // weights[child], child))
        return np.array(children, np.int64), np.array(numbers, np.int64)


def exchange_neighbours(
    children: Ints, numbers: Ints, start: int, windows: Windows, draws: RandomState
) -> tuple[Ints, Ints]:
    """Exchange neighbours at random where the windows allow it, of the places from `start` on.

    A short pattern would give one rank always the same child.
    """
    if len(children) < 2 or (children == children[0]).all():
        return children, numbers
    releases, deadlines = windows.of(children, numbers)
    # Seen from place 0 of the array.
    releases -= start
    deadlines -= start
    order = np.arange(len(children))
    for turn in range(_NUM_EXCHANGES):
        places = np.arange(turn % 2, len(children) - 1, 2)
        here, there = order[places], order[places + 1]
        may = (children[here] != children[there]) & (deadlines[here] > places) & (releases[there] <= places)
        chosen = may & (draws.random_sample(len(places)) < 0.5)
        order[places[chosen]], order[places[chosen] + 1] = there[chosen], here[chosen]
    return children[order], numbers[order]
