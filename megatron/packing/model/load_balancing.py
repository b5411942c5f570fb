"""mcore. The load-balancing loss of an empty pack is 0, where megatron-core 0.16.1 divides 0 by the pack's tokens.

The NaN would reach every gradient: a data-parallel rank that has fewer sequences than others runs empty packs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import update_wrapper
from typing import Any

from megatron.core.transformer.moe import router

_NAME = "get_tokens_per_expert_and_token_count"


class AtLeastOneToken:
    """megatron-core's count of a pack's tokens (per expert, of this rank, of all), where all are at least one."""

    def __init__(self, plain: Callable[..., Any]) -> None:
        update_wrapper(self, plain)
        self.plain = plain

    def __call__(self, *arguments: Any, **options: Any) -> tuple[Any, Any, Any]:
        """See megatron-core; the number of all is a divisor only."""
        per_expert, num_local, num_all = self.plain(*arguments, **options)
        return per_expert, num_local, max(num_all, 1) if isinstance(num_all, int) else num_all.clamp(min=1)


def install() -> None:
    """Let megatron-core's router count so, where its version has this count. Idempotent."""
    plain = getattr(router, _NAME, None)
    if plain is not None and not isinstance(plain, AtLeastOneToken):
        setattr(router, _NAME, AtLeastOneToken(plain))


@contextmanager
def installed() -> Iterator[None]:
    """Let megatron-core's router count so, and leave it as it was."""
    before = vars(router).get(_NAME)
    install()
    try:
        yield
    finally:
        if before is not None:
            setattr(router, _NAME, before)
