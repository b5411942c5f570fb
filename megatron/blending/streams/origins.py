"""pure. Where a sample comes from, so that it can be made again: nested lists of ints.

[n, p] is position p of leaf number n. Negative first numbers stand for nodes above the leaves: [-1 - n, origin, i] is
what node n made as its i-th output of one input, or of several: `origin` is then the list of theirs.
"""

from collections.abc import Iterable
from typing import Any


def origin_tag(node: Any) -> int:
    return -1 - node.number


def first_leaf(origin: Any) -> int:
    while isinstance(origin[0], (list, tuple)) or origin[0] < 0:
        origin = origin[0] if isinstance(origin[0], (list, tuple)) else origin[1]
    return origin[0]


def columns_of(origins: Iterable[Any]) -> list[Any]:
    """Return [leaf numbers, positions less the last one of the same leaf], as shorter states are made of.

    `[[3, 7], [5, 2], [3, 8]] -> [[3, 5, 3], [7, 2, 1]]`. An origin that is not a leaf's stands among the numbers.
    """
    leaves, steps = [], []
    last: dict[int, int] = {}
    for origin in origins:
        is_plain = not isinstance(origin[0], (list, tuple)) and origin[0] >= 0
        leaf, position = origin if is_plain else (origin, 0)
        leaves.append(leaf)
        steps.append(position - last.get(leaf, 0) if is_plain else 0)
        if is_plain:
            last[leaf] = position
    return [leaves, steps]


def origins_of(columns: Any) -> list[Any]:
    """Return what `columns_of` made the columns of."""
    found = []
    last: dict[int, int] = {}
    for leaf, step in zip(*columns):
        if isinstance(leaf, (list, tuple)):
            found.append(leaf)
            continue
        last[leaf] = last.get(leaf, 0) + step
        found.append([leaf, last[leaf]])
    return found


def sources_of(origin: Any) -> set[int]:
    """Return the numbers of all leaves that an output is made of."""
    if isinstance(origin[0], (list, tuple)):
        return set().union(*map(sources_of, origin))
    return {origin[0]} if origin[0] >= 0 else sources_of(origin[1])
