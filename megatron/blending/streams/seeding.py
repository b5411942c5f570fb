"""pure. @stateless says what a function is like; here it gets random numbers that do not depend on
the past.

Every function is called as if it were stateless: a sample that is read again after a restore is
encoded again.
"""

import functools
import hashlib
import itertools
import random
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from types import GeneratorType
from typing import Any, TypeVar, overload

import numpy as np

BATCH_INDEX: ContextVar[int | None] = ContextVar("batch index", default=None)
"""Index of the output that is being made, among those of its rank."""
SAMPLE_INDEX: ContextVar[int | None] = ContextVar("sample index", default=None)
"""Index of the sample that a seeded function was given."""

F = TypeVar("F", bound=Callable[..., Any])


@overload
def stateless(function: F) -> F: ...
@overload
def stateless(
    *, restore_seeds: bool = False, failure_tolerance: int | None = None
) -> Callable[[F], F]: ...
def stateless(
    function: Any = None, *, restore_seeds: bool = False, failure_tolerance: int | None = None
) -> Any:
    """Marks a function as one whose result depends on its arguments alone.

    `restore_seeds`: the generators of random, numpy and torch are seeded from the sample round each
    call, so that it may draw random numbers: equal whenever the sample is encoded again, different
    in each epoch and for each seed of the WorkerConfig. Wherever the function is used: in a task
    encoder, a cooker or given to a data set. About 30 microseconds. A generator function is seeded
    round each of its values. `failure_tolerance`: how many failures of this function in a row are
    fatal; 0 is never.
    """
    if function is None:
        return functools.partial(
            stateless, restore_seeds=restore_seeds, failure_tolerance=failure_tolerance
        )
    function.__stateless__ = True
    function.__restore_seeds__ = restore_seeds
    function.__failure_tolerance__ = failure_tolerance
    return function


At = int | tuple[Any, ...]
"""Position of a value among the outputs of the node that gave it; with the number of the output if
there are several: `(7, 1)`.
"""


class UserFunction:
    """Function of a user, as a node calls it: with seeded generators if the function is marked so.

    The seed follows from that of the stream, the node, and where the (first) sample came from: its
    `__restore_key__`, or its position if it has none.
    """

    def __init__(self, function: Callable[..., Any], stream_seed: int = 0, role: str = "") -> None:
        self.function = function
        self.is_seeded = bool(mark_of(function, "__restore_seeds__"))
        self._salt = f"{stream_seed} {role}"

    def __call__(self, value: Any, at: At, *others: Any) -> Any:
        if not self.is_seeded:
            return self.function(value, *others)
        # Where the record came from, not where it is now: the sample is the same when it is packed
        # with others, or read on another number of ranks.
        origin = restore_key_of(_first(value)) or at
        seed = self._seed(origin)
        token = SAMPLE_INDEX.set(_index_of(origin))
        try:
            with seeded(seed):
                made = self.function(value, *others)
        finally:
            SAMPLE_INDEX.reset(token)
        return _seeded_values(made, seed) if type(made) is GeneratorType else made

    def each(self, values: Sequence[Any], positions: Iterable[int]) -> list[Any]:
        """Calls it with each of many values; any exception is raised."""
        return list(map(self, values, positions) if self.is_seeded else map(self.function, values))

    def _seed(self, origin: object) -> int:
        return int.from_bytes(
            hashlib.blake2b(f"{self._salt} {origin}".encode(), digest_size=4).digest(), "little"
        )


def mark_of(function: object, name: str) -> Any:
    """Returns what `@stateless` said of a function, also if arguments were bound to it since; None
    if nothing.
    """
    while isinstance(function, functools.partial):
        function = function.func
    return getattr(function, name, None)


def _seeded_values(values: Iterator[Any], seed: int) -> Iterator[Any]:
    """Yields what a generator gives, whose code runs only now: value n is made with generators
    seeded by `seed` + n.
    """
    for number in itertools.count():
        with seeded((seed + number) % 2**32):
            try:
                value = next(values)
            except StopIteration:
                return
        yield value


def restore_key_of(sample: object) -> Any:
    """Returns where a sample says it came from; () if it says nothing."""
    return (
        sample.get("__restore_key__", ())
        if isinstance(sample, Mapping)
        else getattr(sample, "__restore_key__", ())
    )


def _first(value: object) -> object:
    """Returns the sample, or the first of several."""
    while isinstance(value, list) and value:
        value = value[0]
    return value


def _index_of(key: Any) -> int | None:
    """Returns the position in the stream of its source that the key of a (first) sample says; None
    if it says none.
    """
    while isinstance(key, tuple) and key and isinstance(key[0], tuple):
        key = key[0]
    return key[1] if isinstance(key, tuple) and len(key) == 3 else None


def seed_generators(seed: int) -> None:
    """Seeds the generators of random, numpy and (if it was imported) torch on the CPU, with 32
    bits."""
    random.seed(seed)
    np.random.seed(seed)
    # A function that draws from torch has imported it; importing it here would take seconds in
    # each worker that trains on text.
    if (torch := sys.modules.get("torch")) is not None:
        torch.default_generator.manual_seed(seed)


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seeds the generators of random, numpy and (if it was imported) torch on the CPU, for as long
    as it is entered.
    """
    torch = sys.modules.get("torch")
    states = random.getstate(), np.random.get_state(), torch.get_rng_state() if torch else None
    try:
        seed_generators(seed)
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        if torch:
            torch.set_rng_state(states[2])
