"""pure. Notes on damage that tables do to records, where it can be seen: in what is trained.

    content that is the JSON text of a list of parts, or of a text in quotes
    null arguments of calls, and nulls in tools, that stay
    times of one argument that are spelled in several ways

Up to 512 records are read, the first and the last of each source: tables are damaged from some row
on. Their texts are not tokenized.
"""

from __future__ import annotations

import json
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from megatron.blending.formats.json_forms import JsonObject
from megatron.blending.formats.record import RecordError, read_records
from megatron.blending.streams.source import SourceDataset
from megatron.sft.data.chats import ChatLoad
from megatron.sft.data.records.content import Answers, Content, Conversation
from megatron.sft.data.records.messages import Message

MAX_RECORDS = 512
_MIN_RECORDS = 4
_PARTS = re.compile(r"\s*\[\s*\{\s*['\"]type['\"]\s*:")
_TIME = re.compile(r"\d{4}-\d\d-\d\d([T ])\d\d:\d\d(:\d\d)?(\.\d+)?(Z|[+-]\d\d:?\d\d)?")
_NAMED = 3
"""Arguments that a note names."""


def notes_on_records(sources: Sequence[SourceDataset]) -> list[str]:
    """Returns lines on records of these sources, each with a count and the way out."""
    tally = _Tally()
    for source in sources:
        assert isinstance(source.load, ChatLoad)
        indices = _ends(len(source), max(MAX_RECORDS // len(sources), _MIN_RECORDS))
        for record in read_records(source.source, indices):
            if isinstance(record, RecordError):
                continue
            try:
                content = source.load.read(record).content
            except Exception:  # a broken record is reported when training comes to it
                continue
            tally.add(content)
    return list(tally.notes())


def _ends(num_records: int, num_read: int) -> list[int]:
    """Returns the first and the last records: 10 records, 4 read -> 0, 1, 8, 9."""
    if num_records <= num_read:
        return list(range(num_records))
    half = num_read // 2
    return [*range(half), *range(num_records - half, num_records)]


class _Tally:
    """Counts of records by what is conspicuous in them."""

    def __init__(self) -> None:
        self._num_records = self._num_texts = self._num_nulls = 0
        self._calls: Counter[str] = Counter()
        """Calls by argument, as "day of f"."""
        self._nulls: Counter[str] = Counter()
        """Nulls that stay, by argument or tool."""
        self._spellings: defaultdict[str, Counter[str]] = defaultdict(Counter)
        """Times by argument and spelling."""
        self._examples: dict[str, str] = {}

    def add(self, content: Content) -> None:
        """Counts a record."""
        self._num_records += 1
        paths = content.paths if isinstance(content, Answers) else [content]
        chats = [path for path in paths if isinstance(path, Conversation)]
        self._num_texts += any(_is_json_text(chat.messages) for chat in chats)
        nulls = [name for chat in chats for name in self._add_calls(chat)]
        self._nulls.update(nulls)
        self._num_nulls += bool(nulls)

    def _add_calls(self, chat: Conversation) -> Iterator[str]:
        """Counts calls. Yields the names of arguments and tools with nulls."""
        for function in _functions(chat.messages):
            arguments = function["arguments"]
            for key, value in arguments.items() if isinstance(arguments, Mapping) else ():
                name = f"{key} of {function['name']}"
                self._calls[name] += 1
                self._add_time(name, value)
                if not isinstance(arguments, JsonObject) and _has_null(value):
                    yield name
        for tool in chat.tools or []:
            if _has_null(tool):
                yield f"tool {tool.get('function', {}).get('name')}"

    def _add_time(self, name: str, value: object) -> None:
        match = _TIME.fullmatch(value) if isinstance(value, str) else None
        if match is not None:
            separator, _, fraction, zone = match.groups()
            spelling = f"{separator}{len(fraction or '')}{zone and zone[0]}"
            self._spellings[name][spelling] += 1
            self._examples.setdefault(name + spelling, match.group())

    def notes(self) -> Iterator[str]:
        """Yields a line for each kind that was seen."""
        of_all = f"of {self._num_records:,} records read"
        if self._num_texts:
            yield (
                f"{self._num_texts:,} {of_all} have content that is JSON text: a list of parts, or "
                "text in quotes. It is trained as it stands. datasets makes it of a file in which "
                "lists come late; give the records as they were before load_dataset, or load them "
                "with features="
            )
        if self._num_nulls:
            named = ", ".join(map(self._described, list(self._nulls)[:_NAMED]))
            more = " ..." if len(self._nulls) > _NAMED else ""
            yield (
                f"{self._num_nulls:,} {of_all} have nulls in calls or tools ({named}{more}), which "
                "are trained as null. If a table added them (to_json of datasets or pandas), give "
                "the records from before it, arguments as JSON text, or tools whose schemas name "
                "the arguments"
            )
        for name, counts in self._spellings.items():
            if len(counts) > 1:
                spelled = ", ".join(
                    f"{count:,} as {self._examples[name + spelling]}"
                    for spelling, count in counts.most_common(_NAMED)
                )
                yield (
                    f"times of the argument {name:.60} are spelled in {len(counts)} ways "
                    f"({spelled}), and trained so. Tables respell times; if one did, keep the "
                    "column as string"
                )

    def _described(self, name: str) -> str:
        is_always = self._calls[name] > 1 and self._nulls[name] == self._calls[name]
        return f"{name:.60}, in every call" if is_always else f"{name:.60}"


def _is_json_text(messages: Sequence[Message]) -> bool:
    """Returns whether a turn is the text of a list of parts, or all turns are texts in quotes."""
    texts = [message.content for message in messages if message.content]
    return any(map(_PARTS.match, texts)) or (len(texts) > 1 and all(map(_is_quoted, texts)))


def _is_quoted(text: str) -> bool:
    if len(text) < 2 or text[0] != '"' or text[-1] != '"':
        return False
    try:
        return isinstance(json.loads(text), str)
    except ValueError:
        return False


def _functions(messages: Sequence[Message]) -> Iterator[Mapping[str, Any]]:
    for message in messages:
        yield from (call["function"] for call in message.fields.get("tool_calls", ()))


def _has_null(value: object) -> bool:
    """Returns whether a value is or holds a null that a table may have added."""
    if isinstance(value, JsonObject):
        return False
    if isinstance(value, Mapping):
        return any(map(_has_null, value.values()))
    return any(map(_has_null, value)) if isinstance(value, list) else value is None
