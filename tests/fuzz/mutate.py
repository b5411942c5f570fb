"""Mutations of a sound input: of its bytes, of the words and numbers in it, or of the values that
its JSON holds.
"""

import json
import re
from random import Random
from typing import Any

_NUMBERS = (
    "-1 0 1 2 255 65536 2147483648 9223372036854775807 9223372036854775808 1e308 1e999 -0.0 NaN "
    "Infinity"
).split()
_HUGE = "1" + "0" * 400
_WORDS = [
    *(
        b"",
        b"\0",
        b"\n",
        b"\xff",
        b"\xed\xa0\x80",
        b"\xef\xbb\xbf",
        b"\\ud800",
        b'"',
        b"{",
        b"}",
        b"[",
        b"]",
        b",",
        b":",
    ),
    *(
        b"null",
        b"true",
        b"../x",
        b"/dev/null",
        b"s{0..200}",
        b"&a [*a]",
        b"<<: *a",
        b"!!python/tuple [x]",
    ),
    *(
        b"[" * 100,
        b'{"a":' * 100,
        b"{{" * 30,
        b"{% for x in range(99) %}",
        _HUGE.encode(),
        b"-",
        b"%s",
        b"~",
    ),
    *map(str.encode, _NUMBERS),
]


def _deep(levels: int, is_list: bool) -> Any:
    value: Any = 0
    for _ in range(levels):
        value = [value] if is_list else {"a": value}
    return value


_VALUES: list[Any] = [
    *(
        None,
        True,
        False,
        0,
        -1,
        1,
        2**31,
        2**63,
        2**64,
        10**400,
        -(10**400),
        1e308,
        -1e-308,
        0.5,
        3e38,
    ),
    *(
        float("nan"),
        float("inf"),
        "",
        " ",
        "\0",
        "a",
        "\ud800",
        "\u202e",
        "../x",
        "/etc/passwd",
        "s{0..200}",
    ),
    *(
        "{{",
        "a" * 5000,
        "1" * 400,
        [],
        {},
        [[]],
        [None],
        {"": None},
        _deep(30, True),
        _deep(90, False),
        _deep(500, True),
    ),
]


def mutated_bytes(content: bytes, random: Random, others: list[bytes]) -> bytes:
    """Return `content` with one to five mutations; `others` are sound inputs to take pieces
    from."""
    made = bytearray(content)
    for _ in range(random.choice((1, 1, 1, 2, 3, 5))):
        at = random.randrange(len(made) + 1)
        end = min(len(made), at + random.choice((1, 1, 2, 4, 8, 64, 512)))
        kind = random.randrange(9)
        if kind == 0 and at < len(made):
            made[at] ^= 1 << random.randrange(8)
        elif kind == 1 and at < len(made):
            made[at] = random.choice((0, 1, 0x7F, 0x80, 0xFF, random.randrange(256)))
        elif kind == 2:
            del made[at:end]
        elif kind == 3:
            made[at:at] = made[at:end]
        elif kind == 4:
            made[at:at] = random.choice(_WORDS)
        elif kind == 5 and random.random() < 0.3:
            del made[at:]
        elif kind == 6:
            made[at:end] = random.randbytes(end - at)
        elif kind == 7:
            other = random.choice(others)
            start = random.randrange(len(other) + 1)
            made[at:end] = other[start : start + random.choice((1, 8, 64, 512))]
        elif numbers := list(re.finditer(rb"\d+(\.\d+)?", bytes(made[:20_000]))):
            number = random.choice(numbers)
            made[number.start() : number.end()] = random.choice([*_NUMBERS, _HUGE]).encode()
    return bytes(made)


def mutated_value(value: Any, random: Random) -> Any:
    """Return a value of JSON with one to three of its parts changed, removed, repeated, renamed or
    moved.
    """
    made = _copy(value)
    for _ in range(random.choice((1, 1, 2, 3))):
        places = _places(made)
        if not places:
            return _copy(random.choice(_VALUES))
        holder, key = random.choice(places)
        kind = random.randrange(7)
        if kind <= 2:
            holder[key] = _copy(random.choice(_VALUES))
        elif kind == 3:
            del holder[key]
        elif kind == 4:
            other_holder, other_key = random.choice(places)
            if (
                other_key in other_holder
                if isinstance(other_holder, dict)
                else other_key < len(other_holder)
            ):
                holder[key] = _copy(other_holder[other_key])
        elif isinstance(holder, dict):
            name = random.choice(
                ["", "\ud800", str(key).upper(), f"{key}s", "__class__", "path", "a" * 2000]
            )
            holder[name] = _copy(holder[key]) if kind == 5 else holder.pop(key)
        elif kind == 5:
            holder.insert(key, _copy(holder[key]))
        else:
            holder[:] = [part for _ in range(random.choice((2, 50))) for part in _copy(holder)][
                :500
            ]
    return made


def _copy(value: Any) -> Any:
    return json.loads(json.dumps(value))


def _places(value: Any) -> list[tuple[Any, Any]]:
    """Return (container, key) of everything that a value of JSON holds."""
    found: list[tuple[Any, Any]] = []
    pending = [value]
    while pending and len(found) < 1000:
        holder = pending.pop()
        keys = (
            list(holder)
            if isinstance(holder, dict)
            else range(len(holder))
            if isinstance(holder, list)
            else []
        )
        found += [(holder, key) for key in keys]
        pending += [holder[key] for key in keys]
    return found
