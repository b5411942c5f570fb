"""pure. Checks the columns of a table that records are read from, by their types alone.

A column whose cells have no JSON form is refused if it is read, before any row is. Columns that are
not read may have any type, and so may keys of turns that are not read.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from megatron.blending.formats.json_forms import Field, TableForms
from megatron.sft.data.records.columns import READ_COLUMNS, TURN_COLUMNS
from megatron.sft.data.records.messages import READ_KEYS
from megatron.sft.data.records.values import SampleError

_ANY_VALUE = {"tool_calls", "function_call", "tools", "functions", "chat_template_kwargs"}
"""Keys of records and turns whose values may be of any type: calls and schemas."""
_PART_KEYS = ("type", "text", "value")


def check_columns(forms: TableForms, columns: Mapping[str, str]) -> list[str]:
    """Returns notes about columns of dates and times, whose spelling is that of their JSON form.
    Raises SampleError for a column that is read and has no JSON form.

    columns: column of the record -> its name in `records.formats`.
    """
    for field in _read_fields(forms.without_form, columns):
        raise SampleError(
            f"column {field} has no JSON form; {field.form.way_out}, or leave the column out with "
            f"--data-columns none={field.path[0]}"
        )
    notes = []
    for field in _read_fields(forms.times, columns):
        if _ANY_VALUE.isdisjoint(field.path):
            raise SampleError(
                f"column {field} must be text; datasets makes times of text that looks like them, "
                "so that its spelling is lost: write the data again, with the column as string "
                "(features= of load_dataset)"
            )
        notes.append(
            f"{field} is trained as {field.form.json}; if the data had another spelling, write the "
            "column as string"
        )
    return notes


def _read_fields(fields: Iterable[Field], columns: Mapping[str, str]) -> list[Field]:
    return [field for field in fields if _is_read(field.path, columns)]


def _is_read(path: tuple[str, ...], columns: Mapping[str, str]) -> bool:
    """Returns whether a record's text, weights or calls are read from a field."""
    names = [columns.get(name, name) for name in path[:2]]
    if names[0] not in READ_COLUMNS:
        return False
    if names[0] not in TURN_COLUMNS or len(path) == 1:
        return True
    if names[1] in ("content", "value") and len(path) > 2:  # parts, of which text alone is read
        return path[2] in _PART_KEYS
    return names[1] in READ_KEYS
