"""pure. Decodes the text parts of a WebDataset sample, by their names.

The last suffix of the name decides: `txt` becomes a str, `json` becomes its value. Any other part
stays bytes. `megatron.blending.energon` decodes images, arrays and more.
"""

import json
from collections.abc import Callable
from typing import Any

from megatron.blending.arguments import shown

Decode = Callable[[str, bytes], Any]


class DecodeError(ValueError):
    """A part cannot be decoded: its content does not match its name, or a library is missing. The
    message names the part.
    """


TEXT_PARTS: dict[str, Callable[[bytes], Any]] = {
    **dict.fromkeys("txt text transcript".split(), bytes.decode),
    **dict.fromkeys("json jsn".split(), json.loads),
}
"""Last suffix of a part's name -> its decoder."""


def decode_text(name: str, content: bytes) -> Any:
    """Returns the value of a text part, or the bytes of any other part. Raises DecodeError if the
    content does not match the name.
    """
    suffix = name if name in TEXT_PARTS else name.rpartition(".")[2]
    if suffix not in TEXT_PARTS:
        return content
    try:
        return TEXT_PARTS[suffix](content)
    except (ValueError, RecursionError) as error:
        raise not_a(suffix, name, error) from error


def not_a(suffix: str, name: str, error: Exception) -> DecodeError:
    """Returns the error for a part whose content does not match its suffix."""
    return DecodeError(f"part {shown(name)}: not a {suffix}: {error or type(error).__name__}")
