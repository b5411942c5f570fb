"""pure. Expands braces in names as shells do, and writes lists of names with braces.

    "s_{00..02}.tar"   <->   ["s_00.tar", "s_01.tar", "s_02.tar"]

Invariant: expanding what `collapse_numbers` returns gives the same names in the same order.
"""

import itertools
import re
from collections.abc import Iterable
from typing import NamedTuple

_RANGE = re.compile(r"(-?[0-9]+)\.\.(-?[0-9]+)(?:\.\.(-?[0-9]+))?")
_LETTERS = re.compile(r"([A-Za-z])\.\.([A-Za-z])")
_NUMBER = re.compile(r"[0-9]+")
_OPEN, _CLOSE = "{", "}"
_MAX_BRACES, _MAX_CHARACTERS, _MAX_NAMES = 100, 4000, 1_000_000
_WIDE = 10_000
"""Names that each digit of a number counts as, so that a number of over a hundred digits is refused
as too many names.
"""


def expand_braces(pattern: str) -> list[str]:
    """Returns the names that a pattern stands for. Lists `{a,b}` and ranges `{00..15}`,
    `{0..10..2}`, `{a..e}` are expanded, also nested; the last brace changes fastest. Any other
    braces are kept as they are.

    Raises ValueError for more than a million names or a hundred braces.
    """
    if pattern.count(_OPEN) > _MAX_BRACES or len(pattern) > _MAX_CHARACTERS:
        raise ValueError(
            f"{pattern[:40]!r}... has more than {_MAX_BRACES} braces or {_MAX_CHARACTERS:,} "
            "characters"
        )
    start = pattern.find(_OPEN)
    if start < 0:
        return [pattern]
    pieces = _pieces(pattern, start)
    if pieces is None:  # keep this brace; the rest may have others
        return [pattern[: start + 1] + rest for rest in expand_braces(pattern[start + 1 :])]
    end, choices = pieces
    rests = expand_braces(pattern[end + 1 :])
    _check_number(len(choices) * len(rests), pattern)
    return [pattern[:start] + choice + rest for choice, rest in itertools.product(choices, rests)]


def _pieces(pattern: str, start: int) -> tuple[int, list[str]] | None:
    """Returns the closing brace of the one at `start`, and its choices; None if it is not closed,
    or is neither a list nor a range.
    """
    cuts = _cuts(pattern, start)
    if cuts is None:
        return None
    inside = [pattern[a + 1 : b] for a, b in itertools.pairwise(cuts)]
    choices = (
        _range(inside[0])
        if len(inside) == 1
        else [name for item in inside for name in expand_braces(item)]
    )
    return None if choices is None else (cuts[-1], choices)


def _cuts(pattern: str, start: int) -> list[int] | None:
    """Returns the positions of the brace at `start`, of its commas, and of its closing brace; None
    if it is not closed.

    `"a{b,{c,d}}", 1 -> [1, 3, 9]`
    """
    depth, cuts = 0, [start]
    for at in range(start, len(pattern)):
        if pattern[at] == _OPEN:
            depth += 1
        elif pattern[at] == "," and depth == 1:
            cuts.append(at)
        elif pattern[at] == _CLOSE:
            depth -= 1
            if depth == 0:
                return [*cuts, at]
    return None


def _check_number(count: int, pattern: str) -> None:
    if count > _MAX_NAMES:
        raise ValueError(f"{pattern[:40]!r} stands for more than {_MAX_NAMES:,} names")


def _range(text: str) -> list[str] | None:
    if match := _RANGE.fullmatch(text):
        first, last, step = match.groups()
        start, end, by = int(first), int(last), abs(int(step or 1)) or 1
        # As in bash, a leading zero at one end pads all numbers to the same width: {08..10}.
        is_padded = any(
            len(number.lstrip("-")) > 1 and number.lstrip("-").startswith("0")
            for number in (first, last)
        )
        width = max(len(first), len(last)) if is_padded else 0
        numbers = range(start, end + 1, by) if start <= end else range(start, end - 1, -by)
        _check_number(max(abs(end - start) // by, width * _WIDE), text)
        return [f"{number:0{width}d}" for number in numbers]
    return _letters(text)


def _letters(text: str) -> list[str] | None:
    match = _LETTERS.fullmatch(text)
    if match is None:
        return None
    start, end = ord(match[1]), ord(match[2])
    codes = range(start, end + 1) if start <= end else range(start, end - 1, -1)
    return [chr(code) for code in codes]


class _Run(NamedTuple):
    """Names `prefix + number + suffix` with numbers from first to last."""

    prefix: str
    first: str
    last: str
    suffix: str


def collapse_numbers(names: Iterable[str]) -> list[str]:
    """Returns the names with consecutive numbers written as ranges: `["a1", "a2", "b"] ->
    ["a{1..2}", "b"]`. The order is kept. Names with braces or commas are not changed.
    """
    entries: list[str | _Run] = []
    for name in names:
        longer = _joined(entries[-1], name) if entries else None
        if longer is None:
            entries.append(name)
        else:
            entries[-1] = longer
    return [
        entry
        if isinstance(entry, str)
        else f"{entry.prefix}{{{entry.first}..{entry.last}}}{entry.suffix}"
        for entry in entries
    ]


def _joined(entry: str | _Run, name: str) -> _Run | None:
    """Returns the run of `entry` continued by `name`; None if `name` does not continue it."""
    run = _starting_run(entry, name) if isinstance(entry, str) else entry
    if run is None:
        return None
    # a09 a10 are a{09..10}, and a9 a10 are a{9..10}: numbers are padded only if the first begins
    # with a zero. A padded run ends when numbers become wider: a099 to a999, then a1000.
    is_padded = len(run.first) > 1 and run.first.startswith("0")
    following = f"{int(run.last) + 1:0{len(run.first) if is_padded else 0}d}"
    if name != run.prefix + following + run.suffix or (
        is_padded and len(following) != len(run.first)
    ):
        return None
    return run._replace(last=following)


def _starting_run(first: str, second: str) -> _Run | None:
    """Returns a run of `first` alone, if `second` differs from it in exactly one number."""
    numbers, others = list(_NUMBER.finditer(first)), _NUMBER.findall(second)
    if _NUMBER.split(first) != _NUMBER.split(second) or set("{},") & set(first):
        return None
    differing = [number for number, other in zip(numbers, others) if number[0] != other]
    if len(differing) != 1:
        return None
    at = differing[0]
    return _Run(first[: at.start()], at[0], at[0], first[at.end() :])
