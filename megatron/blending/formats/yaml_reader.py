"""pure. Reads a YAML file as dicts, lists and scalars that know their lines. Scalars are read as
energon reads them.

    true false yes no              bool
    null ~ (empty)                 None
    12 1_000                       int
    1.5 1e3                        float
    any other word, or in quotes   str; also words with a meaning in YAML 1.1: on, 1:30, 2024-01-01

Anchors, aliases and merge keys (`<<: *name`) are supported. A key that is given twice is an error,
and so is any tag.
"""

import os
import re
from collections.abc import Iterable
from typing import Any, NamedTuple

import yaml

from megatron.blending.arguments import shown

_BOOLS = {
    word: value
    for value, words in ((True, "true yes"), (False, "false no"))
    for word in words.split()
}
_NULLS = {"", "~", "null"}
_DIGITS = r"[0-9]+(?:_[0-9]+)*"
_INT = re.compile(rf"[-+]?{_DIGITS}")
_FLOAT = re.compile(rf"[-+]?({_DIGITS}(\.({_DIGITS})?)?|\.{_DIGITS})([eE][-+]?{_DIGITS})?")
_TAGS = {
    f"tag:yaml.org,2002:{name}"
    for name in "map seq str int float bool null timestamp value merge".split()
}
_MERGE = "<<"
_LARGEST = 2**63 - 1


class YamlLimits(NamedTuple):
    """Limits of a file, which only mistakes reach."""

    values: int = 200_000
    """Values, those behind aliases counted each time."""
    depth: int = 64
    """Levels of mappings and lists."""


LIMITS = YamlLimits()
Scalar = str | int | float | bool | None


class Table(dict[str, Any]):
    """A mapping in the file. `line` is its first line, `lines` those of its keys; from 1."""

    line: int
    lines: dict[str, int]


class Items(list[Any]):
    """A list in the file. `line` is its first line, `lines` those of its items; from 1."""

    line: int
    lines: list[int]


def read_yaml(path: str, text: str, limits: YamlLimits = LIMITS) -> Any:
    """Returns the value of `text`, the content of the file `path`. Raises ValueError, naming file
    and line, if it is not valid.

    A line takes about 40 microseconds with libyaml, 400 without.
    """
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    try:
        _check_size(yaml.parse(text, Loader=loader), limits)
        node = yaml.compose(text, Loader=loader)
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise ValueError(f"{path}:{line}: not YAML: {error.problem}; fix the file") from None
    except yaml.YAMLError as error:
        raise ValueError(
            f"{path}: not YAML: {' '.join(str(error).split())}; fix the file"
        ) from None
    return None if node is None else _Values(path).of(node)


def _check_size(events: Iterable[Any], limits: YamlLimits) -> None:
    """Raises MarkedYAMLError for YAML that is nested too deep, or has too many values. Values
    behind aliases count each time, so that a few lines cannot stand for billions of values. It
    reads events only, before any value is built.
    """
    sizes: dict[str | None, int] = {}
    """Number of values below each anchor, itself included."""
    # A sum and an anchor for each mapping or list that is open. One that closes adds its sum to the
    # one around it.
    open_anchors: list[str | None] = [None]
    counts = [0]
    for event in events:
        if isinstance(event, (yaml.SequenceStartEvent, yaml.MappingStartEvent)):
            open_anchors.append(event.anchor)
            counts.append(1)
        elif isinstance(event, (yaml.SequenceEndEvent, yaml.MappingEndEvent)):
            sizes[open_anchors.pop()] = counts[-1]
            counts[-2:] = [counts[-2] + counts[-1]]
        elif isinstance(event, (yaml.ScalarEvent, yaml.AliasEvent)):
            counts[-1] += sizes.get(event.anchor, 1) if isinstance(event, yaml.AliasEvent) else 1
        if len(counts) > limits.depth or counts[-1] > limits.values:
            limit = (
                f"more than {limits.values:,} values"
                if counts[-1] > limits.values
                else f"over {limits.depth} levels"
            )
            raise yaml.MarkedYAMLError(
                problem=f"{limit}, which is taken for a mistake", problem_mark=event.start_mark
            )


def read_scalar(word: str) -> Scalar:
    """Returns the value of a scalar without quotes: `read_scalar("1e3") -> 1000.0`,
    `read_scalar("012") -> 12`.
    """
    if word.lower() in _NULLS:
        return None
    if word.lower() in _BOOLS:
        return _BOOLS[word.lower()]
    if _INT.fullmatch(word):
        if not -_LARGEST <= (number := int(word)) <= _LARGEST:
            raise ValueError(f"{word[:20]}... does not fit 64 bits")
        return number
    return float(word) if _FLOAT.fullmatch(word) else word


def as_tables(value: object) -> Any:
    """Returns dicts and lists as tables and items, as if they came from line 1 of a file."""
    if isinstance(value, dict):
        table = Table({str(key): as_tables(item) for key, item in value.items()})
        table.line, table.lines = 1, dict.fromkeys(table, 1)
        return table
    if isinstance(value, (list, tuple)):
        items = Items(map(as_tables, value))
        items.line, items.lines = 1, [1] * len(items)
        return items
    return value


class _Values:
    """Builds the values of one file. An anchor that is used twice gives the same object twice."""

    def __init__(self, path: str) -> None:
        self._path = os.fspath(path)
        self._done: dict[int, Any] = {}
        self._open: set[int] = set()

    def of(self, node: yaml.Node) -> Any:
        if id(node) in self._done:
            return self._done[id(node)]
        line = node.start_mark.line + 1
        if id(node) in self._open:
            raise self._error(line, "an anchor holds itself")
        if node.tag not in _TAGS:
            raise self._error(line, f"tag {shown(node.tag)} has no meaning here; remove it")
        self._open.add(id(node))
        value = (
            self._table(node) if isinstance(node, yaml.MappingNode) else self._items_or_scalar(node)
        )
        self._open.remove(id(node))
        self._done[id(node)] = value
        return value

    def _items_or_scalar(self, node: yaml.Node) -> Items | Scalar:
        if isinstance(node, yaml.SequenceNode):
            items = Items(self.of(item) for item in node.value)
            items.line = node.start_mark.line + 1
            items.lines = [item.start_mark.line + 1 for item in node.value]
            return items
        assert isinstance(node, yaml.ScalarNode)
        try:
            return node.value if node.style else read_scalar(node.value)
        except ValueError:  # of thousands of digits
            raise self._error(
                node.start_mark.line + 1, f"the number {node.value[:20]}... is too large"
            ) from None

    def _table(self, node: yaml.MappingNode) -> Table:
        table, merged = Table(), Table()
        table.line, table.lines, merged.lines = node.start_mark.line + 1, {}, {}
        for key_node, value_node in node.value:
            line = key_node.start_mark.line + 1
            if not isinstance(key_node, yaml.ScalarNode):
                raise self._error(line, "a key must be a word")
            key = key_node.value
            if key == _MERGE and not key_node.style:
                self._merge(merged, self.of(value_node), line)
                continue
            if key in table:
                raise self._error(
                    line,
                    f"key {shown(key)} is given twice, first in line {table.lines[key]}; "
                    "remove one",
                )
            table[key], table.lines[key] = self.of(value_node), line
        for key in merged.keys() - table.keys():
            table[key], table.lines[key] = merged[key], merged.lines[key]
        return table

    def _merge(self, into: Table, value: object, line: int) -> None:
        for table in value if isinstance(value, Items) else [value]:
            if not isinstance(table, Table):
                raise self._error(line, "what << merges must be a mapping or a list of them")
            for key in table.keys() - into.keys():
                into[key], into.lines[key] = table[key], table.lines[key]

    def _error(self, line: int, fault: str) -> ValueError:
        return ValueError(f"{self._path}:{line}: {fault}")
