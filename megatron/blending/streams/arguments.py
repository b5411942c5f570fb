"""pure. Here what users pass to nodes is checked as it comes: errors name the node and the argument."""

from collections.abc import Sequence
from numbers import Integral
from typing import Any

from megatron.blending.order.weights import Weight
from megatron.blending.streams.node import SavableDataset


def as_pairs(kind: str, given: tuple[Any, ...]) -> list[tuple[Any, Weight]]:
    """Pairs of (data set, weight), given one by one or as one tuple of them."""
    if len(given) == 1 and isinstance(given[0], (list, tuple)) and given[0] and isinstance(given[0][0], (list, tuple)):
        given = tuple(given[0])
    for number, pair in enumerate(given):
        if not isinstance(pair, (list, tuple)) or len(pair) != 2:
            raise ValueError(f"{kind} takes pairs (data set, weight), but argument {number} is {type(pair).__name__}")
    check_datasets(kind, [pair[0] for pair in given])
    return [(pair[0], pair[1]) for pair in given]


def check_count(kind: str, name: str, value: object) -> None:
    if not isinstance(value, Integral) or isinstance(value, bool):
        raise ValueError(f"{kind}: {name} must be a whole number, but is {value!r}")
    if value < 1:
        raise ValueError(f"{kind}: {name} must be at least 1, but is {value}")


def check_datasets(kind: str, datasets: Sequence[Any]) -> None:
    if not datasets:
        raise ValueError(f"{kind} needs at least one data set")
    for number, dataset in enumerate(datasets):
        if not isinstance(dataset, SavableDataset):
            raise ValueError(f"{kind}: data set {number} must be a data set of megatron.blending, but is {dataset!r}")


def check_function(kind: str, name: str, function: object) -> None:
    if not callable(function):
        raise ValueError(f"{kind}: {name} must be a function, but is {function!r}")


def check_no_more(kind: str, given: dict[str, Any], known: tuple[str, ...]) -> None:
    for name in given:
        if name not in known:
            raise TypeError(f"{kind} has no argument {name!r}")
