"""pure. Notes on columns that a table has emptied or made times of, over all records read.

keys that are null in every record, or in every turn of all records
columns of text that are times in every record, spelled as tables spell them
scores by which the rejected answer of a pair is the better one
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

from megatron.sft.data.records.columns import READ_COLUMNS, TURN_COLUMNS
from megatron.sft.data.records.messages import READ_KEYS

_TIME = re.compile(r"\d{4}-\d\d-\d\d([T ])\d\d:\d\d(:\d\d)?(\.\d+)?(Z|[+-]\d\d(:?\d\d)?)?")
_LONGEST_TIME = 40
_MIN_RECORDS = 2
_NAMED = 3
_SCORES = (
    ("score_chosen", "score_rejected"),
    ("chosen_score", "rejected_score"),
    ("chosen_rating", "rejected_rating"),
)
"""Columns with the scores of a pair's answers."""


def spelling_of_time(value: object) -> str:
    """Returns the spelling of a time, " 30-" for 2024-01-02 03:04:05; "" for other values."""
    if not isinstance(value, str) or len(value) > _LONGEST_TIME:
        return ""
    match = _TIME.fullmatch(value)
    if match is None:
        return ""
    separator, seconds, fraction, zone, _ = match.groups()
    return f"{separator}{len(seconds or '')}{len(fraction or '')}{(zone or '-')[0]}"


def is_respelled(counts: Mapping[str, int]) -> bool:
    """Returns whether times are spelled as tables spell them, or in several ways.

    counts: number of times by spelling.
    """
    return len(counts) > 1 or next(iter(counts)).startswith(" 3")


class ColumnTally:
    """Counts of the values of each column that is read, and of each key of turns."""

    def __init__(self) -> None:
        self._values: Counter[str] = Counter()
        """Values by column, nulls included."""
        self._nulls: Counter[str] = Counter()
        self._spellings: defaultdict[str, Counter[str]] = defaultdict(Counter)
        """Times by column and spelling."""
        self._examples: dict[str, str] = {}
        self._scored: Counter[tuple[str, str]] = Counter()
        """Pairs by the columns of their scores."""
        self._exchanged: Counter[tuple[str, str]] = Counter()
        """Those of them whose chosen answer has the lower score."""

    def add(self, record: Mapping[str, Any], columns: Mapping[str, str]) -> None:
        """Counts a record.

        columns: column of the record -> its name in `records.formats`.
        """
        for names in _SCORES:
            chosen, rejected = (record.get(name) for name in names)
            if isinstance(chosen, int | float) and isinstance(rejected, int | float):
                self._scored[names] += 1
                self._exchanged[names] += chosen < rejected
        for column, value in record.items():
            name = columns.get(column, column)
            if name not in READ_COLUMNS:
                continue
            self._add(column, value)
            for turn in value if name in TURN_COLUMNS and isinstance(value, list) else ():
                for key, part in turn.items() if isinstance(turn, Mapping) else ():
                    if columns.get(key, key) in READ_KEYS:
                        self._add(f"{key} of {column}", part)

    def _add(self, name: str, value: object) -> None:
        self._values[name] += 1
        self._nulls[name] += value is None
        kind = spelling_of_time(value)
        if kind:
            self._spellings[name][kind] += 1
            self._examples.setdefault(name + kind, str(value))

    def notes(self, num_records: int) -> Iterator[str]:
        """Yields a line on columns that are null, and one for each column of times or scores.

        num_records: records read, those without these columns included.
        """
        empty = [name for name, count in self._nulls.items() if count == self._values[name]]
        if empty and num_records >= _MIN_RECORDS:
            more = " ..." * (len(empty) > _NAMED)
            yield (
                f"{', '.join(name[:60] for name in empty[:_NAMED])}{more}: null in all of "
                f"{num_records:,} records read, and trained as if absent. If a join, a rename or a "
                "schema emptied them, give the records from before it, or else leave them out"
            )
        for name, counts in self._spellings.items():
            is_whole = counts.total() == self._values[name] >= _MIN_RECORDS
            if is_whole and is_respelled(counts):
                spelled = ", ".join(
                    f"{count:,} as {self._examples[name + kind]}"
                    for kind, count in counts.most_common(_NAMED)
                )
                yield (
                    f"{name:.60} is a time in all of {num_records:,} records read, spelled as "
                    f"tables spell them, or in several ways ({spelled}), and trained so. datasets "
                    "and pandas make such of text; keep the column as string (features= of "
                    "load_dataset)"
                )
        for names, count in self._exchanged.items():
            if count:
                yield (
                    f"{names[0]} is below {names[1]} in {count:,} of {self._scored[names]:,} pairs "
                    "read, which are trained as they stand. If chosen and rejected are exchanged, "
                    "pass --data-columns chosen=rejected,rejected=chosen"
                )
