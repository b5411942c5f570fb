"""pure. Former names of fields, which are read for one more release.

@with_former_names(num_draws="num_fetches")
@dataclass(frozen=True)
class Request: ...

Request(num_draws=4)    ->    Request(num_fetches=4), whose `num_draws` is 4
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from operator import attrgetter
from typing import Any, TypeVar

T = TypeVar("T")


def with_former_names(**former: str) -> Callable[[type[T]], type[T]]:
    """Decorates a class so that `former` names of its fields can be passed and read."""

    def decorate(kind: type[T]) -> type[T]:
        cls: Any = kind
        make: Callable[..., None] = cls.__init__

        @wraps(make)
        def init(self: T, *values: Any, **named: Any) -> None:
            # `dataclasses.replace(x, old=1)` passes both names. The one that was typed counts.
            typed = {former[name]: named.pop(name) for name in [*named] if name in former}
            make(self, *values, **named | typed)

        cls.__init__ = init
        for old, new in former.items():
            setattr(cls, old, property(attrgetter(new)))
        return kind

    return decorate
