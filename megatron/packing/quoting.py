"""pure. Quotes values of users and their files in messages. What is printed is short, however long
or deep a value is.
"""

from __future__ import annotations

import re
import reprlib

_MAX_QUOTED = 200
_LONG_WORD = re.compile(r"\S{301,}")
_quoted = reprlib.Repr()
_quoted.maxstring = _quoted.maxother = _quoted.maxlong = 100
_quoted.maxlevel = 3


def shown(value: object) -> str:
    """Returns a value as a message shows it, in at most 200 characters."""
    return cut(_quoted.repr(value), _MAX_QUOTED)


def shortened(message: str, most: int = 1000) -> str:
    """Returns a message without its middle if it is longer: where and the way out stand at its
    ends. So is each word of over 300 characters, as only a file's content has them.
    """
    return cut(_LONG_WORD.sub(lambda word: cut(word[0], 285), message), most)


def cut(text: str, most: int) -> str:
    """Returns a text without its middle if it has more than `most` characters."""
    half = (most - 5) // 2
    return text if len(text) <= most else f"{text[:half]} ... {text[-half:]}"
