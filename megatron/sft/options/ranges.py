"""pure. Numbers within their limits."""

from __future__ import annotations

import sys
from typing import Any

from megatron.packing.flags import flag_of


def check_range(options: Any, low: float, high: float | None, *names: str) -> None:
    """Raise ValueError unless each of these options is absent, or finite and from `low` to `high`."""
    for name in names:
        value = getattr(options, name)
        if value is not None and not low <= value <= (sys.float_info.max if high is None else high):
            limits = f"at least {low}" if high is None else f"from {low} to {high}"
            raise ValueError(f"{flag_of(name)} must be {limits}, but is {value}")
