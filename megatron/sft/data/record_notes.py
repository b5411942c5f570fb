"""pure. Notes on damage that tables do to records, where it can be seen: in what is trained.

    content that is the JSON text of a list of parts, or of a text in quotes
    nulls of calls and tools that stay, and null arguments of a table that are left out
    keys that are null in every record
    times as tables spell them, or spelled in several ways; numbers where a schema says text
    columns of text that are all such times

Up to 512 records are read, from both ends of each source: tables are damaged from some row on. They
are fewer where they are long. Their texts are not tokenized.
"""

from __future__ import annotations

import json
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from megatron.blending.formats.json_forms import JsonObject
from megatron.blending.formats.record import Record, RecordError, planned_read, read_records
from megatron.blending.streams.source import SourceDataset
from megatron.sft.data.chats import ChatLoad, of_parts, of_row
from megatron.sft.data.column_notes import ColumnTally, is_respelled, spelling_of_time
from megatron.sft.data.records.content import Answers, Content, Conversation, said_in

MAX_RECORDS = 512
MAX_CHARACTERS = 1 << 24
_MIN_RECORDS = 4
_READ_AT_ONCE = 16
_MIN_QUOTED = 2
_PARTS = re.compile(r"\s*\[\s*\{\s*['\"](type|role|from)['\"]\s*:")
"""Beginning of the text of a list of parts or turns."""
_NAMED = 3
"""Arguments that a note names."""


def notes_on_records(sources: Sequence[SourceDataset]) -> list[str]:
    """Returns lines on records of these sources, each with a count and the way out."""
    tally = _Tally()
    for number, source in enumerate(sources, 1):
        load = source.load
        assert isinstance(load, ChatLoad)
        indices = _ends(len(source), max(MAX_RECORDS // len(sources), _MIN_RECORDS))
        read = planned_read(source.source, indices)
        for start in range(0, len(indices), _READ_AT_ONCE):
            if tally.num_characters > MAX_CHARACTERS * number / len(sources):
                break
            chunk = indices[start : start + _READ_AT_ONCE]
            for record in read_records(source.source, chunk, read):
                if not isinstance(record, RecordError):
                    _add(record, load, tally)
    return list(tally.notes())


def _add(record: Record, load: ChatLoad, tally: _Tally) -> None:
    with suppress(Exception):  # a broken record is reported when training comes to it
        tally.add(load.read(record).content)
        is_row = load.content is of_row
        whole = of_parts(record) if is_row else load.content(record)
        tally.columns.add(whole, load.encoder.columns)
        if is_row:
            tally.add_nulls_left_out(load.encoder.read(of_parts(record)).content)


def _ends(num_records: int, num_read: int) -> list[int]:
    """Returns records from both ends in turn: 10 records, 4 read -> 0, 9, 1, 8."""
    num_read = min(num_records, num_read)
    return [at // 2 if at % 2 == 0 else num_records - 1 - at // 2 for at in range(num_read)]


class _Argument(NamedTuple):
    """An argument of a call."""

    name: str
    """"day of f"."""
    value: Any
    schema: Any
    """Its schema; None if the tools have none."""
    is_text: bool
    """True if the arguments were JSON text, whose nulls stand in the data."""


class _Tally:
    """Counts of records and arguments by what is conspicuous in them."""

    def __init__(self) -> None:
        self.num_characters = 0
        self._num_records = self._num_parts = self._num_quoted = self._num_nulls = 0
        self._calls: Counter[str] = Counter()
        """Calls by argument."""
        self._nulls: Counter[str] = Counter()
        """Nulls that stay, by argument or tool."""
        self._left_out: Counter[str] = Counter()
        """Nulls of a table that are left out though a schema names the argument."""
        self._numbers: Counter[str] = Counter()
        """Numbers by argument, where its schema says text, or integers."""
        self._spellings: defaultdict[str, Counter[str]] = defaultdict(Counter)
        """Times by argument and spelling."""
        self._examples: dict[str, str] = {}
        self.columns = ColumnTally()

    def add(self, content: Content) -> None:
        """Counts a record."""
        self._num_records += 1
        texts = said_in(content)
        self.num_characters += sum(map(len, texts))
        self._num_parts += any(map(_PARTS.match, texts))
        self._num_quoted += bool(texts) and _is_quoted(texts[-1])
        nulls = []
        for chat in _chats(content):
            for argument in _arguments(chat):
                self._add_argument(argument)
                if not argument.is_text and _has_null(argument.value):
                    nulls.append(argument.name)
            nulls += [
                f"tool {_function(tool).get('name')}"
                for tool in chat.tools or []
                if _has_null(tool)
            ]
        self._nulls.update(nulls)
        self._num_nulls += bool(nulls)

    def add_nulls_left_out(self, content: Content) -> None:
        """Counts the null arguments of a table's row, given with its nulls."""
        for chat in _chats(content):
            self._left_out.update(
                argument.name
                for argument in _arguments(chat)
                if argument.schema is not None
                and not argument.is_text
                and _has_null(argument.value)
            )

    def _add_argument(self, argument: _Argument) -> None:
        name, value = argument.name, argument.value
        self._calls[name] += 1
        if isinstance(argument.schema, Mapping):
            kind = argument.schema.get("type")
            is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
            is_float = isinstance(value, float) and kind == "integer"
            self._numbers[name] += is_float or (is_number and kind == "string")
        kind = spelling_of_time(value)
        if kind:
            self._spellings[name][kind] += 1
            self._examples.setdefault(name + kind, value)

    def notes(self) -> Iterator[str]:
        """Yields a line for each kind that was seen."""
        of_all = f"of {self._num_records:,} records read"
        if self._num_parts or self._num_quoted == self._num_records >= _MIN_QUOTED:
            yield (
                f"{max(self._num_parts, self._num_quoted):,} {of_all} have content that is JSON "
                "text: a list of parts or turns, or text in quotes. It is trained as it stands. "
                "datasets makes it of a file in which lists come late; give the records as they "
                "were before load_dataset, or load them with features="
            )
        if self._num_nulls:
            yield (
                f"{self._num_nulls:,} {of_all} have nulls in calls or tools "
                f"({self._named(self._nulls)}), which are trained as null. If a table added them "
                "(to_json of datasets or pandas), give the records from before it, arguments as "
                "JSON text, or tools whose schemas do not name the arguments"
            )
        if self._left_out:
            yield (
                f"{self._left_out.total():,} arguments are null in a table and left out "
                f"({self._named(self._left_out)}), as a table cannot tell null from absent. If "
                "they are null in truth, give arguments as JSON text"
            )
        if +self._numbers:
            yield (
                f"{self._numbers.total():,} arguments are numbers where the tool's schema says "
                f"string, or with a fraction where it says integer ({self._named(+self._numbers)}),"
                " and are trained so. Tables write times and integers as such numbers; if one did, "
                "keep the column as string or integer"
            )
        for name, counts in self._spellings.items():
            if is_respelled(counts):
                spelled = ", ".join(
                    f"{count:,} as {self._examples[name + kind]}"
                    for kind, count in counts.most_common(_NAMED)
                )
                yield (
                    f"times of the argument {name:.60} are spelled as tables spell them, or in "
                    f"several ways ({spelled}), and trained so; if a table respelled them, keep "
                    "the column as string"
                )
        yield from self.columns.notes(self._num_records)

    def _named(self, counts: Counter[str]) -> str:
        described = [
            f"{name:.60}, in every call" if 1 < self._calls[name] == count else f"{name:.60}"
            for name, count in counts.most_common(_NAMED)
        ]
        return "; ".join(described) + " ..." * (len(counts) > _NAMED)


def _is_quoted(text: str) -> bool:
    if len(text) < 2 or text[0] != '"' or text[-1] != '"':
        return False
    try:
        return isinstance(json.loads(text), str)
    except ValueError:
        return False


def _chats(content: Content) -> list[Conversation]:
    paths = content.paths if isinstance(content, Answers) else [content]
    return [path for path in paths if isinstance(path, Conversation)]


def _arguments(chat: Conversation) -> Iterator[_Argument]:
    """Yields the arguments of all calls."""
    schemas = {
        _function(tool).get("name"): _function(tool).get("parameters") for tool in chat.tools or []
    }
    for message in chat.messages:
        for call in message.fields.get("tool_calls", ()):
            name, arguments = call["function"]["name"], call["function"]["arguments"]
            schema = schemas.get(name)
            properties = schema.get("properties") if isinstance(schema, Mapping) else None
            named = properties if isinstance(properties, Mapping) else {}
            for key, value in arguments.items() if isinstance(arguments, Mapping) else ():
                is_text = isinstance(arguments, JsonObject)
                yield _Argument(f"{key} of {name}", value, named.get(key), is_text)


def _function(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    function = tool.get("function")
    return function if isinstance(function, Mapping) else {}


def _has_null(value: object) -> bool:
    """Returns whether a value is or holds a null that a table may have added."""
    if isinstance(value, JsonObject):
        return False
    if isinstance(value, Mapping):
        return any(map(_has_null, value.values()))
    return any(map(_has_null, value)) if isinstance(value, list) else value is None
