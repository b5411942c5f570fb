"""pure. Reads a record of preference data: a prompt, and answers of which one is chosen.

    a pair                                  in any form of `pair_forms`
    prompt | messages + answer + label      KTO: one answer, marked as good or bad
      | kto_tag
    ... + margin                            TRL: least difference of scores, of reward models

A record becomes one of `prompt` and `responses`, as SFT has it, so that turns, tools, calls and
template variables are read by the same code.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from math import isfinite
from typing import Any, NamedTuple

from megatron.packing.quoting import shown
from megatron.sft.data.preference.pair_forms import (
    MARKS,
    PAIR_NAMES,
    as_responses,
    last_answer,
    said_empty,
)
from megatron.sft.data.records.columns import TURNS, rename_fields
from megatron.sft.data.records.content import Answers, Conversation, Passage, TokenIds
from megatron.sft.data.records.formats import Reading, read_record
from megatron.sft.data.records.values import SampleError

_MARK_NAMES = {*MARKS, "chosen", "rejected"}
_TRUE, _FALSE = ("true", "1", "1.0"), ("false", "0", "0.0")


class Preference(NamedTuple):
    """Answers to one prompt, as conversations or passages from their first turn on."""

    paths: Sequence[Conversation | Passage]
    """The chosen answer, then those that are rejected; in marked data one answer."""
    is_good: bool | None = None
    """The mark of KTO's data; None in pairs."""
    margins: tuple[float, ...] = ()
    """Least difference of scores that each rejected answer asks for; () if they were not read."""
    is_plain: bool = False
    """True for a chat to imitate, which has one path."""


class PreferenceReading(NamedTuple):
    """The content of a record, its weight, and keys with a value that were not read."""

    content: Preference
    weight: float
    unread: set[str]


def read_preference(
    record: Mapping[str, Any],
    columns: Mapping[str, str],
    *,
    is_marked: bool,
    has_margin: bool = False,
    takes_plain: bool = False,
) -> PreferenceReading:
    """Returns the content of a record. Raises SampleError if it has none of these forms.

    Args:
        columns: as `records.formats.read_record` takes them.
        is_marked: reads one answer with its mark (KTO), not a pair.
        has_margin: reads `margin`, too: a number, or one for each rejected answer (reward models).
        takes_plain: reads records without answers to compare as chats to imitate.
    """
    fields = rename_fields(record, columns)
    of_turns = {column: name for column, name in columns.items() if name in ("role", "content")}
    is_good = None
    # A null column of a table is no column.
    empty = {columns.get(column, column) for column in record} - fields.keys()
    if takes_plain and not fields.keys() & (_MARK_NAMES if is_marked else PAIR_NAMES):
        return _plain(read_record(fields, of_turns))
    if is_marked:
        rest, is_good = _marked(fields, empty)
    else:
        rest = as_responses(fields, empty)
    reading = _in_own_names(rest, of_turns, fields)
    paths = _paths(reading, is_marked)
    margins = _margins(fields.get("margin"), len(paths) - 1) if has_margin else ()
    return PreferenceReading(Preference(paths, is_good, margins), reading.weight, reading.unread)


def _in_own_names(
    rest: Mapping[str, Any], of_turns: Mapping[str, str], fields: Mapping[str, Any]
) -> Reading:
    """Returns the content of a record of `responses`, which errors call as the data do."""
    try:
        return read_record(rest, of_turns)
    except SampleError as error:
        text, rejected = str(error), fields.get("rejected")  # responses[2] -> rejected[1]
        if "chosen" not in fields or "responses[" not in text:
            raise
        text = text.replace("responses[0]", "chosen")
        if isinstance(rejected, list) and len(rest["responses"]) > 2:
            text = re.sub(r"responses\[(\d+)\]", lambda one: f"rejected[{int(one[1]) - 1}]", text)
        raise SampleError(text.replace("responses[1]", "rejected")) from None


def _plain(reading: Reading) -> PreferenceReading:
    """Returns a record as a chat to imitate."""
    content = reading.content
    if isinstance(content, TokenIds | Answers):
        raise SampleError(
            "is neither a pair of answers nor a chat with one answer, which --sft-weight trains "
            "beside pairs"
        )
    return PreferenceReading(Preference([content], is_plain=True), reading.weight, reading.unread)


def _margins(margin: Any, num_rejected: int) -> tuple[float, ...]:
    """Returns a margin for each rejected answer; 0 where the record has none."""
    values = margin if isinstance(margin, list) else [margin] * num_rejected
    if len(values) != num_rejected:
        raise SampleError(
            f"margin must be a number, or one for each of the {num_rejected} rejected answers, but "
            f"has {len(values)}"
        )
    if any(isinstance(value, bool) for value in values):
        raise SampleError(f"margin must be a number, but is {shown(margin)}")
    try:
        numbers = tuple(float(0 if value is None else value) for value in values)
    except (TypeError, ValueError):
        raise SampleError(f"margin must be a number, but is {shown(margin)}") from None
    if not all(map(isfinite, numbers)):
        raise SampleError(f"margin must be finite, but is {shown(margin)}")
    return numbers


def _paths(reading: Reading, is_marked: bool) -> Sequence[Conversation | Passage]:
    content = reading.content
    if isinstance(content, TokenIds):
        raise SampleError("holds token ids, of which nobody knows where the answer begins")
    paths = content.paths if isinstance(content, Answers) else [content]
    if is_marked and len(paths) > 1:
        raise SampleError("must have one answer beside its mark, but has several")
    return [_only_answer(path) for path in paths]


def _only_answer(path: Conversation | Passage) -> Conversation | Passage:
    """Returns a path of which all turns of the answer have weight 1, and those before have 0."""
    if isinstance(path, Passage) or any(not one.weight for one in path.messages):
        return path
    # A conversation whose turns all count, as `messages` beside a mark: its last turns are the
    # answer, behind the last turn of a user.
    last = max((n for n, one in enumerate(path.messages) if one.role == "user"), default=-1)
    return path._replace(
        messages=[
            one._replace(weight=float(number > last)) for number, one in enumerate(path.messages)
        ]
    )


def _marked(fields: dict[str, Any], empty: set[str]) -> tuple[dict[str, Any], bool]:
    key = next((key for key in MARKS if key in fields), None)
    if key is None:
        raise SampleError(
            f"{said_empty(empty & {*MARKS})}has no mark of its answer, label or kto_tag, which "
            "--loss kto needs; pairs (chosen, rejected) train with --loss dpo"
        )
    mark = fields[key]
    text = str(mark).lower()
    if isinstance(mark, Mapping | list) or text not in (*_TRUE, *_FALSE):
        raise SampleError(f"{key} must be true or false, but is {shown(mark)}")
    rest = {name: value for name, value in fields.items() if name not in MARKS}
    turns = next((name for name in TURNS if name in rest), None)
    if turns is not None and isinstance(rest[turns], list) and rest[turns]:
        prompt, answer = last_answer(rest.pop(turns))
        rest |= {"prompt": prompt, "completion": answer}
    return rest, text in _TRUE
