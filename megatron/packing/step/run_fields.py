"""pure. The users' fields of a run: what batches have of them in a step without any sample.

Names, scopes and types are those of all samples so far, on all ranks. The rank that schedules keeps
them, as it sees the columns of all ranks; the others receive them with each step's schedule.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from megatron.packing.batch.columns import Column, Schema
from megatron.packing.batch.samples import SchemaOfPart, common_schema


class RunFields:
    """Extra columns of all samples that a run has seen, and the fields it was warned of."""

    def __init__(self) -> None:
        self.warned: set[str] = set()
        """Names of fields; each is named in one warning."""
        self._columns: dict[str, Column] = {}
        self._guessed: set[str] = set()
        """Names of those whose samples had one token each, so that their scope may be another."""

    def agree(self, parts: Sequence[SchemaOfPart]) -> Schema:
        """Returns the schema of a step's samples, and keeps what it says of their fields.

        Raises ValueError where samples, or the run's samples so far, have other fields.
        """
        schema = common_schema(parts, self._agreed())
        is_guess = all(part.has_lone_tokens for part in parts)
        for column in schema:
            if column.extra and parts:
                is_new = column.name not in self._columns
                self._columns[column.name] = column
                if is_guess and is_new:
                    self._guessed.add(column.name)
                elif not is_guess:
                    self._guessed.discard(column.name)
        return schema

    def _agreed(self) -> list[SchemaOfPart]:
        """Returns the run's columns: those that are certain, and those of lone tokens."""
        return [
            SchemaOfPart(
                tuple(
                    column
                    for name, column in self._columns.items()
                    if (name in self._guessed) == is_guess
                ),
                is_guess,
            )
            for is_guess in (False, True)
        ]


def run_fields_of(config: Any) -> RunFields:
    """Returns the fields of the run whose steps a config packs. The config holds them; one that
    takes no attributes has new ones in each step.
    """
    attributes = getattr(config, "__dict__", None)
    if not isinstance(attributes, dict):
        return RunFields()
    fields: RunFields = attributes.setdefault("sequence_packing_run_fields", RunFields())
    return fields
