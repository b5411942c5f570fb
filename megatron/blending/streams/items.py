"""pure. Values at a position of a node: an output, several of them, or the reason for none.

A position holds one of
- an output, whatever a function of a user returned;
- a `SkipMarker`: the sample failed, or was skipped on purpose;
- a `MultiOutput`: several of these, made one after the other while somebody iterates over them. It
  may also hold a `Leftover`, samples that wait for more of their kind on the rank, and `Deferred`
  outputs, which are made only when they are asked for.

Functions are applied to outputs. Everything else passes through them unchanged.
"""

from collections.abc import Callable, Iterable, Iterator
from contextvars import ContextVar
from types import GeneratorType
from typing import Any, NamedTuple, Protocol

from megatron.blending.streams.seeding import At, UserFunction

Ref = list[Any]
"""Says how an output is made again. Either [node, position, part]: output number `part` of what
stands at a position of a node. Or [node, part, [ref, ref, ...]]: output number `part` of what the
node makes of the samples of these references.
"""
Sample = tuple[Ref, Any]
Entries = Callable[[], list[tuple[Any, int]]]
"""Returns the sources that something was made of, each with the position that was read."""

PARTS_OF_DEFERRED = 1 << 16
"""Outputs that a Deferred may give: its own are numbered from `number * PARTS_OF_DEFERRED` on, so
that nobody has to make those before it to count them.
"""


def no_entries() -> list[tuple[Any, int]]:
    return []


class SkipMarker(NamedTuple):
    """Stands in the place of a sample that makes no output."""

    node: int
    function: Any
    """The function that did not take it."""
    error: Exception | None
    """None or SkipSample if it was skipped on purpose."""
    value: Any = None
    entries: Entries = no_entries


ON_FAILURE: ContextVar[Callable[[SkipMarker], None] | None] = ContextVar("on failure", default=None)
"""Called with each sample that fails, when it does: what comes after it in its block may end the
process.
"""


def failed(
    node: int, function: object, error: Exception, value: Any, entries: Entries
) -> SkipMarker:
    """Returns what stands in the place of a sample of which a function made an exception."""
    marker = SkipMarker(node, function, error, value, entries)
    if (report := ON_FAILURE.get()) is not None:
        report(marker)
    return marker


class Leftover(NamedTuple):
    """Samples of a batch or group that is not full. They wait on the rank for more."""

    node: int
    """Number of the node that makes batches or groups of them."""
    samples: list[Sample]


class MultiOutput:
    """Several outputs of one position, in order. It can be iterated over once."""

    __slots__ = ("_items",)

    def __init__(self, items: Iterable[Any]) -> None:
        self._items = iter(items)

    def __iter__(self) -> Iterator[Any]:
        return self._items


class Deferred(NamedTuple):
    """An output that is made when somebody wants it, so that workers can share a block."""

    number: int
    """Among those of its position."""
    is_last: bool
    make: Callable[[], Iterable[Any]]
    """Returns what a MultiOutput would hold."""


SPECIAL = frozenset((SkipMarker, MultiOutput))
"""Types at positions that are no single output."""


class Function(Protocol):
    """A node that changes single outputs."""

    def apply(self, value: Any, at: At, entries: Entries) -> Any:
        """Returns what becomes of one output; a SkipMarker where the function fails."""


def applied(node: Function, value: Any, at: At, entries: Entries) -> Any:
    """Returns what becomes of whatever stands at a position."""
    kind = type(value)
    if kind is MultiOutput:
        return MultiOutput(_each_applied(node, value, at, entries))
    if kind is SkipMarker or kind is Leftover:
        return value
    if kind is Deferred:
        items = lambda: _each_applied(node, value.make(), (at, value.number), entries)  # noqa: E731
        return value._replace(make=items)
    return node.apply(value, at, entries)


def _each_applied(node: Function, items: Iterable[Any], at: At, entries: Entries) -> Iterator[Any]:
    for part, item in enumerate(items):
        made = applied(node, item, (at, part), entries)
        if type(made) is MultiOutput:
            yield from made
        else:
            yield made


def called(user: UserFunction, value: Any, node: int, at: At, entries: Entries) -> Any:
    """Returns what a function of a user makes of one output; a MultiOutput of a generator."""
    try:
        made = user(value, at)
    except Exception as error:
        return failed(node, user.function, error, value, entries)
    if type(made) is GeneratorType:
        return MultiOutput(generated(made, user.function, value, node, entries))
    return made


def generated(
    generator: Iterator[Any], function: object, value: Any, node: int, entries: Entries
) -> Iterator[Any]:
    """Yields what a generator of a user gives, and a SkipMarker if it fails on the way."""
    try:
        yield from generator
    except Exception as error:
        yield failed(node, function, error, value, entries)


def numbered(value: Any) -> Iterator[tuple[int | None, Any]]:
    """Yields (part, output) of all outputs at a position; (None, item) for what is no output.

    >>> list(numbered(MultiOutput(["a", SkipMarker(3, len, None), "b"])))[::2]
    [(0, 'a'), (1, 'b')]
    """
    kind = type(value)
    if kind is SkipMarker:
        yield None, value
    elif kind is not MultiOutput:
        yield 0, value
    else:
        yield from _numbered_items(value, 0)


def _numbered_items(items: Iterable[Any], part: int) -> Iterator[tuple[int | None, Any]]:
    for item in items:
        kind = type(item)
        if kind is SkipMarker or kind is Leftover:
            yield None, item
        elif kind is Deferred:
            yield from numbered_deferred(item)
        else:
            yield part, item
            part += 1


def numbered_deferred(item: Deferred) -> Iterator[tuple[int | None, Any]]:
    """Makes a Deferred, and yields as `numbered` does."""
    return _numbered_items(item.make(), item.number * PARTS_OF_DEFERRED)
