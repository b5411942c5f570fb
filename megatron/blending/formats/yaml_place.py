"""pure. A place in a YAML file, which checks the values there: every error begins with file, line
and key.

    Place("blend.yaml", 7, "splits.train").error("is empty")
    -> ValueError("blend.yaml:7: splits.train: is empty")
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass

from megatron.blending.arguments import nearest, shown
from megatron.blending.formats.yaml_reader import Items, Table


@dataclass(frozen=True)
class Place:
    """A place in a file. `table`, `items`, `text` and `share` return a checked value or raise."""

    path: str
    line: int
    keys: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.keys:.200}".removesuffix(": ")

    def error(self, fault: str) -> ValueError:
        return ValueError(f"{self}: {fault}")

    def at(self, key: str | int, parent: Table | Items) -> "Place":
        if isinstance(parent, Items):
            return Place(self.path, parent.lines[int(key)], f"{self.keys}[{key}]")
        return Place(
            self.path, parent.lines.get(str(key), self.line), f"{self.keys}.{key}".lstrip(".")
        )

    def check_keys(self, table: Table, known: Iterable[str]) -> None:
        known = [key for key in known if key]
        for key in table:
            if key not in known:
                raise Place(self.path, table.lines[key], self.keys).error(
                    f"unknown key {shown(key)}; {nearest(key, known, 'the keys here')}"
                )

    def table(self, value: object) -> Table:
        if not isinstance(value, Table):
            raise self.error(f"must be a mapping (key: value), but is {described(value)}")
        return value

    def items(self, value: object) -> Items:
        if not isinstance(value, Items):
            raise self.error(f"must be a list (lines that start with -), but is {described(value)}")
        return value

    def text(self, table: Table, key: str) -> str | None:
        value = table.get(key)
        if value is not None and (not isinstance(value, str) or not value):
            raise self.at(key, table).error(
                f"must be a word, but is {described(value)}; put it in quotes"
            )
        return value

    def share(self, table: Table, key: str) -> float:
        value = table.get(key, 1)
        is_number = (
            isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
        )
        if not is_number or value < 0:
            raise self.at(key, table).error(
                f"must be a number of at least 0, but is {described(value)}"
            )
        return value


def described(value: object) -> str:
    if isinstance(value, (Table, Items)):
        return "a mapping" if isinstance(value, Table) else "a list"
    return "empty" if value is None else f"{shown(value)}"
