"""pure. Checks what users pass: errors name who was given what, and what was probably meant."""

import difflib
from collections.abc import Collection, Iterable, Mapping
from numbers import Integral

_MAX_LISTED = 50
_MAX_COMPARED = 100


def shown(value: object) -> str:
    """Returns a value as a message shows it, in at most 100 characters."""
    return f"{value!r:.100}"


def nearest(word: str, words: Iterable[str], kind: str = "they") -> str:
    """Says which of `words` was probably meant, or else what there is: the first 50."""
    words = list(words)
    close = difflib.get_close_matches(word[:_MAX_COMPARED], words, 1, 0.6)
    if close:
        return f"did you mean {close[0]!r}?"
    more = f" and {len(words) - _MAX_LISTED} more" if len(words) > _MAX_LISTED else ""
    return f"{kind} are {', '.join(words[:_MAX_LISTED]) or 'none':.1000}{more}"


def check_whole(name: str, value: object, least: float = 1, *, may_be_none: bool = False) -> None:
    """Raises ValueError for what is no whole number of at least `least`; a bool is none."""
    if value is None and may_be_none:
        return
    if not isinstance(value, Integral) or isinstance(value, bool):
        raise ValueError(f"{name} must be a whole number, but is {shown(value)}")
    if value < least:
        raise ValueError(f"{name} must be at least {least}, but is {value}")


def check_one_of(name: str, value: object, known: Collection[str]) -> None:
    if value not in known:
        close = difflib.get_close_matches(f"{value}", known, 1, 0.6)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise ValueError(f"{name} must be one of {', '.join(known)}, but is {shown(value)}{hint}")


def check_flag(name: str, value: object) -> None:
    if value not in (True, False):
        raise ValueError(f"{name} must be True or False, but is {shown(value)}")


def check_function(name: str, function: object) -> None:
    if not callable(function):
        raise ValueError(f"{name} must be a function, but is {function!r}")


def check_no_more(kind: str, given: Mapping[str, object], known: Collection[str]) -> None:
    """Raises TypeError for an argument that neither we know nor energon does."""
    for name in given:
        if name not in known:
            raise TypeError(f"{kind} has no argument {shown(name)}")
