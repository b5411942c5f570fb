"""pure. Sizes of memory as users write them: 80GiB, 141GB."""

from __future__ import annotations

import re

GIB = 2**30
_UNITS = {"": 1, "b": 1, "kib": 2**10, "mib": 2**20, "gib": GIB, "kb": 10**3, "mb": 10**6}
_UNITS |= {"gb": 10**9, "tib": 2**40, "tb": 10**12}


def parse_memory(text: str, flag: str = "--memory") -> int:
    """Returns bytes: `80GiB -> 85899345920`, `80GB -> 80000000000`; ValueError for no size."""
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([a-zA-Z]*)\s*", text)
    if match is None or match[2].lower() not in _UNITS or not float(match[1]):
        raise ValueError(f"{flag} {text}: must be a size above 0, such as 80GiB or 141GB")
    size = int(float(match[1]) * _UNITS[match[2].lower()])
    if size < 2**20 and not match[2]:
        raise ValueError(f"{flag} {text} is {size:,} bytes; give the unit: {text.strip()}GiB")
    return size
