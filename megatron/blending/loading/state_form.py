"""pure. The state of a loader as it is kept: its form, which is checked before it is used, and its
text.

A state may be damaged, or forged: each value must be of the kind, and within the bounds, that the
loader gives it.
"""

import base64
import json
import zlib
from collections.abc import Callable, Mapping
from typing import Any

from megatron.blending.loading.server import END

State = dict[str, Any]

_MAX_RANKS = 1 << 20
_MOST = END + _MAX_RANKS
_MAX_POSITION = 1 << 48
_LONGEST_BLOCK = 512
_MAX_BEHIND = 256

_LEVEL = 6
"""Of deflate: numbers that are alike take about a byte each, at about 20 MB/s."""


Form = Callable[[Any], bool]


def check_form(state: State) -> None:
    """ValueError that says what is damaged."""
    for name, is_formed in _FORMS.items():
        if name not in state:
            raise _damaged(f"it has no {name!r}")
        if not is_formed(state[name]):
            raise _damaged(f"its {name!r} is {state[name]!r:.100}")
    stream, shards = expanded(state["stream"]), expanded(state["shards"])
    for name, is_formed in _STREAM_FORMS.items():
        if not (isinstance(stream, dict) and name in stream and is_formed(stream[name])):
            raise _damaged(f"the {name!r} of its stream is not what was saved")
    if len(state["positions"]) != len(stream["sources"]):
        raise _damaged(
            f"it has {len(state['positions'])} positions of {len(stream['sources'])} sources"
        )
    if not isinstance(shards, dict):
        raise _damaged("its 'shards' are not what was saved")
    for number, shard in shards.items():
        is_one = number.isdecimal() and len(number) < 8 and int(number) < state["num_shards"]
        if not is_one or not _is_shard(shard, END // _LONGEST_BLOCK // state["num_shards"]):
            raise _damaged(f"its shard {number!r:.20} is not what was saved")
        # What a shard is behind, shared as it may be among workers, would be made again without an
        # end.
        at, most = (
            shard[0] * state["num_shards"],
            _MAX_BEHIND * max(state["num_shards"], state["world_size"]),
        )
        if not shard[1] and at + most < state["slot"] - state["rank"] < END:
            raise _damaged(
                f"its shard {number} stands at output {at}, but {state['slot']} were drawn"
            )


def _whole(least: int, most: int) -> Form:
    # No bool: an index that is one means something else to numpy.
    return lambda value: type(value) is int and least <= value <= most


def _each(is_formed: Form) -> Form:
    return lambda value: isinstance(value, (list, tuple)) and all(map(is_formed, value))


def _row(*forms: Form) -> Form:
    def is_row(value: Any) -> bool:
        is_list = isinstance(value, (list, tuple)) and len(value) == len(forms)
        return is_list and all(is_formed(one) for is_formed, one in zip(forms, value))

    return is_row


def _text(value: object) -> bool:
    return isinstance(value, str)


def _place(value: object) -> bool:
    return isinstance(value, str) and value.isascii()


_position = _whole(0, _MAX_POSITION)
_FORMS: Mapping[str, Form] = {
    **dict.fromkeys(("rank", "pass"), _whole(0, _MAX_RANKS)),
    **dict.fromkeys(("world_size", "num_shards"), _whole(1, _MAX_RANKS)),
    **dict.fromkeys(("slot", "count"), _whole(0, _MOST)),
    **dict.fromkeys(("epoch_start", "since"), _whole(-_MOST, _MOST)),
    "taken": _each(_row(_whole(0, _MOST), lambda one: bool(one) and _each(_whole(0, _MOST))(one))),
    "positions": _each(_whole(-_MOST, _MOST)),
    "is_over": lambda value: isinstance(value, int) and value in (0, 1),
    **dict.fromkeys(("shards", "stream"), _text),
}
_STREAM_FORMS: Mapping[str, Form] = {
    **dict.fromkeys(("seed", "block_length"), lambda value: isinstance(value, int)),
    **dict.fromkeys(("shape", "folder"), _text),
    "changes": _each(
        _row(_place, _whole(0, _MOST), _each(lambda value: isinstance(value, (int, float))))
    ),
    "sources": _each(_row(_text, _text, _position, _place, _place, _whole(-_MOST, _MOST))),
}


def _is_shard(value: object, most: int) -> bool:
    """Whether it has the form of a ShardState. `most`: the largest number of a block, and of an
    output.
    """
    small = _whole(0, most)
    if not (
        isinstance(value, list) and len(value) >= 3 and small(value[0]) and _whole(0, 1)(value[1])
    ):
        return False
    holder = _row(small, _row(small, _cursor(small), _pending, lambda held: True))
    return _cursor(small)(value[2]) and all(map(holder, value[3:]))


def _cursor(small: Form) -> Form:
    return _row(small, small, small, lambda extra: extra is None or _inner_origin(extra))


def _pending(value: object) -> bool:
    return value is None or _row(_each(_origin), _position)(value)


def _origin(value: object) -> bool:
    return _position(value) or _inner_origin(value)


def _inner_origin(value: object) -> bool:
    return _row(_position, _position, _pending)(value)


def _damaged(how: str) -> ValueError:
    return ValueError(f"this is no state of a loader, or a damaged one: {how}")


def compact(value: object) -> str:
    """Return a value of ints, strings, None, lists and dicts with strings as keys as text; tuples
    become lists.
    """
    return base64.b85encode(
        zlib.compress(json.dumps(value, separators=(",", ":")).encode(), _LEVEL)
    ).decode()


def expanded(text: str) -> Any:
    """Return what `compact` made the text of; ValueError if it is not such a text, by its
    checksum."""
    try:
        return json.loads(zlib.decompress(base64.b85decode(text)))
    except (ValueError, zlib.error, RecursionError) as error:
        raise ValueError(f"this is no state of a loader, or a damaged one: {error}") from error
