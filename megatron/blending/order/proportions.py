"""pure. Proportions say which child of a blend gives each output, and how many of that child's came
before.

A child's share W(k) is what its weights, of 1 together, sum to over the first k outputs.
Invariants, at every k:
- a child gave floor(W(k)) or ceil(W(k)) outputs, for weights that are constant or planned, and for
  finite children;
- after a change at run time it gave less than 2 more or fewer; the numbers of its outputs are 0, 1,
  2, ... always.

Output j of a child may stand from the first place t where W(t + 1) > j, its release, to the last t
where W(t) < j + 1, its deadline. An order that keeps all of these windows exists (the chairman
assignment problem, Tijdeman, 1980), and earliest deadline first finds it, as windows are intervals.
With weights (1/2, 1/3, 1/6) the windows of six outputs are

    child 0: 0-1, 2-3, 4-5      child 1: 0-2, 3-5      child 2: 0-5

    and their order is 0 1 0 1 0 2.

The order repeats itself when every child gave its share of a period, so only the first period and
what stands near a change of weights is computed, by 3 microseconds for each output, once. All else
is the arithmetic of a table.
"""

import heapq
import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from functools import lru_cache, partial
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt
from numpy.random import RandomState

from megatron.blending.order.permutation import permute_indices
from megatron.blending.order.reading import salted_seed
from megatron.blending.order.weights import MAX_PERIOD, Weight, exact_weight, integer_weights

Ints = npt.NDArray[np.int64]
BlendMode = Literal["exact", "random"]
Segments = Sequence[tuple[int | Fraction, Sequence[Weight]]]
"""(first output, weights) of each stretch of constant weights, the first at 0."""

_NEVER = 2**62
_MAX_AT_ONCE = 4096
_NUM_EXCHANGES = 16
_MIN_PERIOD = 2048  # a shorter pattern could give one rank always the same child
_DRAWN_TOGETHER = 2**16


class Choices(NamedTuple):
    """Choices tell the child of each position, and the number of its output."""

    children: Ints
    numbers: Ints


def until_exhausted(weights: Sequence[Weight], sizes: Sequence[int | None]) -> Segments:
    """Return segments that read each child once, in proportion to weights for as long as it lasts;
    None: endless.

    A segment ends, maybe between two outputs, where a child runs out. Too long periods are rounded
    to 2**16, and what that leaves over is blended last. Weights in proportion to the sizes make all
    children last to the end.
    """
    exact = [exact_weight(weight, number) for number, weight in enumerate(weights)]
    left = {
        child: Fraction(size)
        for child, size in enumerate(sizes)
        if exact[child] and size is not None
    }
    endless = [int(weight > 0 and size is None) for weight, size in zip(exact, sizes)]
    is_by_size = (
        not any(endless) and len({exact[child] / size for child, size in left.items() if size}) == 1
    )
    segments: list[tuple[Fraction, Sequence[Weight]]] = []
    start = Fraction(0)
    while any(left.values()):
        wanted = [
            left.get(c, 0) if is_by_size else weight * bool(left.get(c, 1))
            for c, weight in enumerate(exact)
        ]
        whole = integer_weights(wanted)
        if sum(whole) == MAX_PERIOD:
            whole = integer_weights(wanted, 2**16)
        segments.append((start, whole))
        length = min(size * sum(whole) / whole[child] for child, size in left.items() if size)
        left = {child: size - length * whole[child] / sum(whole) for child, size in left.items()}
        start += length
    return [*segments, (start, endless)] if any(endless) else segments


class _Shares:
    """They tell each child's share at any output, and the windows of its outputs that follow, in
    whole numbers.

    An output that is begun when its child loses its weight for good stands before that, or never:
    as many do as leave the others less than one output more, those that are released first. A pause
    may have the output that it cuts.
    """

    def __init__(self, segments: Segments, at_start: Sequence[Fraction]) -> None:
        self.weights = [integer_weights(weights) for _, weights in segments]
        self.starts = [math.ceil(start) for start, _ in segments]
        columns, shares = [], list(at_start)
        for weights, (start, _), (end, _) in zip(
            self.weights, segments, [*segments[1:], segments[-1]]
        ):
            slopes = [Fraction(weight, sum(weights)) for weight in weights]
            columns.append(
                [(slope, share - slope * start, share) for slope, share in zip(slopes, shares)]
            )
            shares = [share + slope * (end - start) for share, slope in zip(shares, slopes)]
        unit = self.unit = math.lcm(
            *{number.denominator for lines in columns for line in lines for number in line}
        )
        self.lines = list(
            zip(*([[int(number * unit) for number in line] for line in lines] for lines in columns))
        )
        """Of each child and segment: slope, share at output 0 if it went on so, share at the start;
        times `unit`.
        """
        self._at_starts = [[-math.inf, *(share for _, _, share in line[1:])] for line in self.lines]
        self._cut: dict[tuple[int, int], tuple[int, int]] = {}
        self._cut_at_last()

    def at(self, output: int) -> list[Fraction]:
        """Return each child's share of the first outputs."""
        number = bisect_right(self.starts, output) - 1
        return [
            Fraction(line[number][0] * output + line[number][1], self.unit) for line in self.lines
        ]

    def window(self, child: int, output: int) -> tuple[int, int]:
        """Return release and deadline of a child's output."""
        line, at_starts, begin = self.lines[child], self._at_starts[child], output * self.unit
        slope, offset, _ = line[bisect_right(at_starts, begin) - 1]
        release = (begin - offset) // slope if slope else _NEVER
        end = begin + self.unit
        slope, offset, _ = line[bisect_left(at_starts, end) - 1]
        deadline = (end - offset - 1) // slope if slope else _NEVER
        return self._cut.get((child, output), (release, deadline))

    def first_cut(self, number: int) -> int:
        """Return where the first output is released whose window goes on behind a segment."""
        if number + 1 == len(self.starts):
            return _NEVER
        shares = (
            (child, line[number + 1][2]) for child, line in enumerate(self.lines) if line[number][0]
        )
        cut = [
            self.window(child, share // self.unit)[0]
            for child, share in shares
            if share % self.unit
        ]
        return min([self.starts[number + 1], *cut])

    def _cut_at_last(self) -> None:
        last = [
            max((n for n, (slope, *_) in enumerate(line) if slope), default=-1)
            for line in self.lines
        ]
        owed = 0
        for number, end in enumerate(self.starts[1:]):
            ends = (
                (child, line[number + 1][2])
                for child, line in enumerate(self.lines)
                if last[child] == number
            )
            cut = {child: share for child, share in ends if share % self.unit}
            num_early, owed = divmod(
                owed + sum(share % self.unit for share in cut.values()), self.unit
            )
            released = sorted(
                (self.window(child, share // self.unit)[0], child) for child, share in cut.items()
            )
            for at, (release, child) in enumerate(released):
                window = (release, end - 1) if at < num_early else (_NEVER, _NEVER)
                self._cut[child, cut[child] // self.unit] = window


class _Stretch(NamedTuple):
    """A stretch is consecutive outputs that a table gives, which repeats itself where it is
    shorter.
    """

    start: int
    end: int
    before: Ints
    """Each child's outputs before the start."""
    table: Callable[[], Choices]
    """Numbers count from the start."""

    def choose(self, positions: Ints) -> Choices:
        table = self.table()
        turns, places = np.divmod(positions - self.start, len(table.children))
        children = table.children[places]
        per_turn = self._counts(table.children)[children]
        return Choices(
            children,
            table.numbers[places] + self.before[children] + turns.astype(np.int64) * per_turn,
        )

    def counts(self, position: int) -> Ints:
        children = self.table().children
        turns, place = divmod(position - self.start, len(children))
        return self.before + turns * self._counts(children) + self._counts(children[:place])

    def _counts(self, children: Ints) -> Ints:
        return np.bincount(children, minlength=len(self.before))


def _exact_stretches(shares: _Shares, start: int, before: Ints, seed: int) -> Iterator[_Stretch]:
    """Yield what comes from `start` on, where the shares begin."""
    place, counts = 0, np.zeros_like(before)
    for number, weights in enumerate(shares.weights):
        end = [*shares.starts[1:], _NEVER][number]
        # Several periods, unlike each other, and an odd number of them.
        period = np.array(weights, np.int64) * (-(-_MIN_PERIOD // sum(weights)) | 1)
        mark, at_mark = place, counts
        tables: list[tuple[Ints, Ints]] = []
        while place < end:
            if place == mark + period.sum():
                limit = shares.first_cut(number)
                if limit > place and (counts - at_mark == period).all():
                    children, numbers = map(np.concatenate, zip(*tables))
                    table = partial(Choices, children, numbers - at_mark[children])
                    yield (
                        stretch := _Stretch(start + place, start + limit, before + counts, table)
                    )
                    # The rest of the segment depends on the next one.
                    place, counts, mark = limit, stretch.counts(start + limit) - before, _NEVER
                    continue
                mark, at_mark, tables = place, counts, []
            upto = int(min(place + _MAX_AT_ONCE, end, mark + period.sum()))
            draws = RandomState(salted_seed(seed, f"exchange {start + place}") & 0xFFFFFFFF)
            children, numbers = _earliest_deadline_first(
                shares, place, upto, counts.tolist(), draws
            )
            table = partial(Choices, children, numbers - counts[children])
            yield _Stretch(start + place, start + upto, before + counts, table)
            tables.append((children, numbers))
            place, counts = upto, counts + np.bincount(children, minlength=len(counts))


def _earliest_deadline_first(
    shares: _Shares, start: int, end: int, counts: list[int], draws: RandomState
) -> tuple[Ints, Ints]:
    """Return (children, numbers) of some outputs, neighbours exchanged at random where their
    windows allow it.
    """
    later = [(*shares.window(child, count), child) for child, count in enumerate(counts)]
    heapq.heapify(later)
    ready: list[tuple[int, int, int]] = []
    found = []
    for place in range(start, end):
        while later and (later[0][0] <= place or not ready):
            release, deadline, child = heapq.heappop(later)
            heapq.heappush(ready, (deadline, child, release))
        deadline, child, release = heapq.heappop(ready)
        found.append((child, counts[child], release, deadline))
        counts[child] += 1
        heapq.heappush(later, (*shares.window(child, counts[child]), child))
    children, numbers, releases, deadlines = np.array(found, np.int64).T
    order = np.arange(len(found))
    for turn in range(_NUM_EXCHANGES if (children != children[0]).any() else 0):
        places = np.arange(turn % 2, len(found) - 1, 2)
        here, there = order[places], order[places + 1]
        may = (deadlines[here] > start + places) & (releases[there] <= start + places)
        chosen = (
            may & (children[here] != children[there]) & (draws.random_sample(len(places)) < 0.5)
        )
        order[places[chosen]], order[places[chosen] + 1] = there[chosen], here[chosen]
    return children[order], numbers[order]


def _random_stretches(shares: _Shares, start: int, before: Ints, seed: int) -> Iterator[_Stretch]:
    """Yield outputs drawn independently: the counts of 2**16 together (multinomial), then put in a
    random order.
    """
    for weights, end in zip(
        shares.weights, [*(start + first for first in shares.starts[1:]), _NEVER]
    ):
        while start < end:
            # RandomState, unlike numpy's newer generators, is promised never to change.
            state = RandomState(salted_seed(seed, f"draw from {start}") & 0xFFFFFFFF)
            drawn = state.multinomial(_DRAWN_TOGETHER, np.array(weights) / sum(weights))
            table = partial(_drawn_table, tuple(drawn.tolist()), seed, start)
            yield (stretch := _Stretch(start, min(start + _DRAWN_TOGETHER, end), before, table))
            start, before = (
                stretch.end,
                before + drawn if end - start >= _DRAWN_TOGETHER else stretch.counts(end),
            )


@lru_cache(maxsize=8)
def _drawn_table(drawn: tuple[int, ...], seed: int, at: int) -> Choices:
    ranks = permute_indices(np.arange(_DRAWN_TOGETHER), _DRAWN_TOGETHER, seed, at)
    children = np.repeat(np.arange(len(drawn)), drawn)[ranks]
    numbers = np.empty_like(children)
    numbers[np.argsort(children, kind="stable")] = np.concatenate(list(map(np.arange, drawn)))
    return Choices(children, numbers)


class Proportions:
    """They give the choices of a blend. Stretches are made when asked for, in order; then a
    position takes 20 ns.
    """

    def __init__(self, segments: Segments, seed: int, mode: BlendMode = "exact") -> None:
        self._make = partial(
            {"exact": _exact_stretches, "random": _random_stretches}[mode], seed=seed
        )
        self._parts: list[tuple[int, _Shares, list[Fraction]]] = []
        """Of what was planned together: its start, the shares from there on, and what else each
        child is owed.
        """
        self._stretches: list[_Stretch] = []
        none = [Fraction(0)] * len(segments[0][1])
        self._begin(0, segments, np.zeros(len(none), np.int64), none)

    def choose(self, positions: Ints) -> Choices:
        """Return what stands at each of many positions."""
        self._reach(int(positions.max(initial=0)))
        stretches = np.searchsorted(self._starts, positions, side="right") - 1
        children, numbers = np.empty_like(positions), np.empty_like(positions)
        for stretch in np.unique(stretches).tolist():
            here = np.flatnonzero(stretches == stretch)
            children[here], numbers[here] = self._stretches[stretch].choose(positions[here])
        return Choices(children, numbers)

    def counts(self, position: int) -> list[int]:
        """Return how many of the first outputs are each child's."""
        self._reach(position)
        return self._stretches[bisect_right(self._starts, position) - 1].counts(position).tolist()

    @property
    def last_weights(self) -> Sequence[int]:
        """They hold from some output on, for ever."""
        return self._parts[-1][1].weights[-1]

    def change(self, start: int, weights: Sequence[Weight]) -> None:
        """Change to `weights` at output `start`, whatever was planned from there on; what comes
        before stays.

        What children are behind is made up for, as far as no output can come too late for it: all
        of it, if those that are ahead are less than an output ahead together, else in proportion.
        What children are behind whose weight is 0 is left to the others.
        """
        before, owed = np.array(self.counts(start), np.int64), [Fraction(0)] * len(weights)
        self._parts = [part for part in self._parts if part[0] < start]
        for begin, shares, rest in self._parts[-1:]:
            given = (before - self.counts(begin)).tolist()
            owed = [
                more + due - count
                for more, due, count in zip(rest, shares.at(start - begin), given)
            ]
        kept = [stretch for stretch in self._stretches if stretch.start < start]
        self._stretches = [stretch._replace(end=min(stretch.end, start)) for stretch in kept]
        self._begin(start, [(0, weights)], before, owed)

    def _begin(self, start: int, segments: Segments, before: Ints, owed: list[Fraction]) -> None:
        if any(len(weights) != len(before) for _, weights in segments):
            raise ValueError(
                f"there must be {len(before)} weights, but they are {list(segments[0][1])}"
            )
        carried = _carried(owed, integer_weights(segments[0][1]))
        self._parts.append(
            (start, _Shares(segments, carried), [more - less for more, less in zip(owed, carried)])
        )
        self._more = self._make(self._parts[-1][1], start, before)
        self._starts = [stretch.start for stretch in self._stretches]

    def _reach(self, position: int) -> None:
        while not self._stretches or self._stretches[-1].end <= position:
            self._stretches.append(next(self._more))
            self._starts.append(self._stretches[-1].start)


def _carried(owed: Sequence[Fraction], weights: Sequence[int]) -> list[Fraction]:
    """Return what of `owed` the shares of those with weight begin with: 0 together, less than an
    output ahead.
    """
    total, surplus = sum(weights), sum(more for more, weight in zip(owed, weights) if weight)
    even = [
        more - surplus * weight / total if weight else Fraction(0)
        for more, weight in zip(owed, weights)
    ]
    part = min(
        Fraction(1),
        (1 - Fraction(1, 2**20)) / max(-sum(min(more, 0) for more in even), Fraction(1, 2)),
    )
    rounded = [Fraction(int(more * part * 2**40), 2**40) for more in even]
    rounded[weights.index(max(weights))] -= sum(rounded)
    return rounded
