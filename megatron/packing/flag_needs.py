"""pure. Options that act only with another: what a field's metadata says, held against what a user
gave.

    lora_rank: int = field(default=16, metadata={"only_with": "lora"})
    recompute_method: ... metadata={"only_with": "recompute_granularity=full"}
    cp_comm_type: ... metadata={"idle_without": "context_parallel_size>=2"}

- `only_with`: without the other option, another run would start than the one that was meant. It is
  refused; a default beside a switch that the user turned off only gets a note.
- `idle_without`: a note says that the option has no effect.
- `default_holds`: the default, also when given, is what is done without the other option.

A condition is `a` (the option `a` is on), `!a`, `a=text`, `a!=text` or `a>=number`. `a|b=text` is
met by either, a tuple of conditions by all. Options at their defaults count if they were given:
`--lora-rank 16` asks for LoRA as `--lora-rank 8` does. A number of 0 and a switch that is off ask
for nothing.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import Field
from typing import Any, NamedTuple


class Condition(NamedTuple):
    """One alternative of a condition."""

    name: str
    sign: str
    limit: str

    @classmethod
    def parse(cls, text: str) -> Condition:
        """Returns the alternative that metadata write as text."""
        parts = re.fullmatch(r"(!?)(\w+?)(?:(=|!=|>=)(\w+))?", text)
        assert parts is not None, text
        return cls(parts[2], parts[1] or parts[3] or "", parts[4] or "")

    def is_met(self, values: Mapping[str, Any]) -> bool:
        """Returns whether the option has such a value. One that the command lacks counts as met."""
        if self.name not in values:
            return True
        value = values[self.name]
        match self.sign:
            case "=":
                return value == self.limit
            case "!=":
                return value != self.limit
            case ">=":
                return value is not None and value >= int(self.limit)
        return _asks(value) != (self.sign == "!")

    def __str__(self) -> str:
        words = {"=": " ", "!=": " other than ", ">=": " of at least "}
        return f"{_flag(self.name)}{words.get(self.sign, '')}{self.limit}"


def _flag(name: str, value: object = None) -> str:
    return f"--{'no-' if value is False else ''}{name.replace('_', '-')}"


def _asks(value: object) -> bool:
    return value not in (None, False, 0, (), [], "")


def check_needs(
    fields: Collection[Field[Any]], given: Collection[str], values: Mapping[str, Any]
) -> list[str]:
    """Returns notes about options without effect. Raises ValueError for the first option that needs
    another one.

    fields: those of all groups of the command. given: names that the user gave, on the command line
    or in YAML. values: all options by name.
    """
    notes = []
    for field in fields:
        value = values[field.name]
        if field.name not in given or not _is_meant(field, value):
            continue
        flag = _flag(field.name, value)
        if needed := list(_unmet(field, "only_with", values)):
            parent = needed[0][0].name
            if parent not in given or values[parent] is not False or value != field.default:
                raise ValueError(f"{flag} needs {_listed(needed)}; pass it, or drop {flag}")
            notes.append(f"note: {flag} has no effect with {_flag(parent, False)}")
        for alternatives in _unmet(field, "idle_without", values):
            word = "with" if alternatives[0].sign == "!" else "without"
            notes.append(f"note: {flag} has no effect {word} {_listed([alternatives])}")
    return notes


def _listed(conditions: Iterable[tuple[Condition, ...]]) -> str:
    return " and ".join(" or ".join(map(str, alternatives)) for alternatives in conditions)


def _is_meant(field: Field[Any], value: object) -> bool:
    """Returns whether an option that the user gave asks for something."""
    if isinstance(field.default, bool) or field.metadata.get("default_holds"):
        return value != field.default
    return _asks(value) or value != field.default


def _unmet(
    field: Field[Any], key: str, values: Mapping[str, Any]
) -> Iterator[tuple[Condition, ...]]:
    """Yields the alternatives of each condition that is not met."""
    conditions = field.metadata.get(key, ())
    for text in (conditions,) if isinstance(conditions, str) else conditions:
        alternatives = tuple(map(Condition.parse, text.split("|")))
        if not any(condition.is_met(values) for condition in alternatives):
            yield alternatives
