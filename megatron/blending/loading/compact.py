"""pure. Large parts of a saved state as short texts, which any format that states are kept in can hold."""

import base64
import json
import zlib
from typing import Any

_LEVEL = 6
"""Of deflate: numbers that are alike take about a byte each, at about 20 MB/s."""


def compact(value: Any) -> str:
    """Return a value of ints, strings, None, lists and dicts with strings as keys as text; tuples become lists."""
    return base64.b85encode(zlib.compress(json.dumps(value, separators=(",", ":")).encode(), _LEVEL)).decode()


def expanded(text: str) -> Any:
    """Return what `compact` made the text of; ValueError if it is not such a text, whose checksum is looked at."""
    try:
        return json.loads(zlib.decompress(base64.b85decode(text)))
    except (ValueError, zlib.error) as error:
        raise ValueError(f"this is no state of a loader, or a damaged one: {error}") from error
