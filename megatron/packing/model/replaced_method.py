"""pure. Replacements of megatron-core's methods."""

from __future__ import annotations

from collections.abc import Callable
from functools import update_wrapper
from types import MethodType
from typing import Any


class ReplacedMethod:
    """Takes the place of a method on its class. A subclass's `__call__` is the new method, and its
    first argument the instance that the method is of.
    """

    def __init__(self, plain: Callable[..., Any]) -> None:
        """plain: the method that is replaced."""
        update_wrapper(self, plain)
        self.plain = plain

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run in place of the plain method."""
        raise NotImplementedError

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        # Functions bind by themselves, other objects do not.
        return self if instance is None else MethodType(self, instance)
