"""pure. Decodes a part of a sample that is text, by its name.

The last suffix of the name decides: txt -> str, json -> what it holds. A part of any other
name stays bytes; `megatron.blending.energon` decodes images, arrays and more.
"""

import json
from collections.abc import Callable
from typing import Any

Decode = Callable[[str, bytes], Any]


class DecodeError(ValueError):
    """A part is not what its name says, or no library here can decode it. The message names the
    part.
    """


TEXT_PARTS: dict[str, Callable[[bytes], Any]] = {
    **dict.fromkeys("txt text transcript".split(), bytes.decode),
    **dict.fromkeys("json jsn".split(), json.loads),
}
"""Decoders of parts, by the last suffix of the name."""


def decode_text(name: str, content: bytes) -> Any:
    """Returns what a part of text holds, and the bytes of any other; DecodeError if its content is
    not what its name says.
    """
    suffix = name if name in TEXT_PARTS else name.rpartition(".")[2]
    if suffix not in TEXT_PARTS:
        return content
    try:
        return TEXT_PARTS[suffix](content)
    except (ValueError, RecursionError) as error:
        raise not_a(suffix, name, error) from error


def not_a(suffix: str, name: str, error: Exception) -> DecodeError:
    """Returns the error for a part whose content is not what its suffix says."""
    return DecodeError(f"part {name!r}: not a {suffix}: {error or type(error).__name__}")
