"""pure. JSON forms of a table's cells, by their Arrow type. It needs pyarrow.

`FORMS` declares them. A cell becomes its JSON value when a row is read: a record of a table is what
the same record is in a JSON file. Cells of a type without a JSON form stay Python values (bytes; a
duration as the number of its unit) for callers that have a use for them. `TableForms.without_form`
names their columns, for callers that have none.

Invariant: no column makes a row unreadable that its reader does not use. So no conversion raises
for a value of its type, but for maps that have a key twice.
"""

import json
import re
from collections.abc import Callable, Iterable, Mapping
from decimal import Decimal
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple
from uuid import UUID

import numpy as np

from megatron.blending.arguments import shown

if TYPE_CHECKING:
    import pyarrow

Convert = Callable[[Any], Any]
"""Function from a cell's Python value, which is not None, to its JSON value."""


class JsonObject(dict[str, Any]):
    """An object whose nulls stand in the data. Those of a struct, a plain dict, may be keys that
    only other rows have.
    """


parse_json_cell = json.JSONDecoder(object_hook=JsonObject).decode
"""Function from JSON text in a cell to its value."""


class Form(NamedTuple):
    """JSON form of the cells of an Arrow type."""

    json: str
    """The form, for people."""
    storage: str | None = None
    """Arrow type that cells are cast to before they become Python values: those of some types
    become values of pandas where it is installed, and errors elsewhere.
    """
    build: "Callable[[pyarrow.DataType], Convert] | None" = None
    """Function from a type to the conversion of its cells; None if Python's value is the JSON
    value.
    """
    way_out: str = ""
    """Advice about a type without a JSON form; "" if it has one."""
    is_time: bool = False


def _shortest(value: float, kind: Any) -> float:
    """Returns the float of fewest digits that is `value` in a smaller type."""
    return float(str(kind(value)))


def _number(value: Decimal) -> Any:
    """Returns a decimal as a number, or as it is where a float would be another number."""
    if int(value.as_tuple().exponent) >= 0:
        return int(value)
    number = float(value)
    return number if Decimal(repr(number)) == value else value


def _time_text(value: int, unit: str, suffix: str = "") -> str:
    """Returns a point in time in ISO 8601, its fraction in 0, 3, 6 or 9 digits."""
    moment: Any = np.datetime64
    text, _, fraction = str(moment(value, unit)).partition(".")
    while fraction.endswith("000"):
        fraction = fraction[:-3]
    return f"{text}.{fraction}{suffix}" if fraction else text + suffix


def _build_timestamp(kind: Any) -> Convert:
    return partial(_time_text, unit=kind.unit, suffix="" if kind.tz is None else "Z")


def _build_time(kind: Any) -> Convert:
    return lambda value: _time_text(value, kind.unit).partition("T")[2]


def _build_date(kind: Any) -> Convert:
    unit = "D" if kind.bit_width == 32 else "ms"
    return lambda value: _time_text(value, unit).partition("T")[0]


def _uuid_text(value: Any) -> str:
    return str(UUID(bytes=value) if isinstance(value, bytes) else value)


def _always(convert: Convert) -> "Callable[[pyarrow.DataType], Convert]":
    return lambda _: convert


_AS_TEXT = "cast it to string"
_SAME = Form("number, with all its digits")
_SHORTEST = "number: the shortest decimal that reads back as the same "
_FLOAT32 = Form(
    _SHORTEST + "float32, 0.1 for 0.10000000149", build=_always(partial(_shortest, kind=np.float32))
)
_DECIMAL = Form("number; one that float64 would round has none", build=_always(_number))
_DATE = "text, 2024-01-31"
_TIME = "text, 23:59:58.125"
_TEXT = Form("text")
_LIST = Form("list of its items' forms")
_BINARY = Form("none", way_out=_AS_TEXT)

FORMS: Mapping[str, Form] = {
    "null": Form("null"),
    "bool": Form("true, false"),
    **dict.fromkeys((f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)), _SAME),
    "halffloat": Form(_SHORTEST + "float16", build=_always(partial(_shortest, kind=np.float16))),
    "float": _FLOAT32,
    "double": Form(_SHORTEST + "float64"),
    **dict.fromkeys((f"decimal{bits}" for bits in (32, 64, 128, 256)), _DECIMAL),
    **dict.fromkeys(("string", "large_string", "string_view"), _TEXT),
    "date32": Form(_DATE, "int32", _build_date, is_time=True),
    "date64": Form(_DATE, "int64", _build_date, is_time=True),
    "time32": Form(_TIME, "int32", _build_time, is_time=True),
    "time64": Form(_TIME, "int64", _build_time, is_time=True),
    "timestamp": Form(
        "text, 2024-01-31T23:59:58.125; with a zone in UTC, 2024-01-31T23:59:58Z",
        "int64",
        _build_timestamp,
        is_time=True,
    ),
    **dict.fromkeys(
        ("list", "large_list", "fixed_size_list", "list_view", "large_list_view"), _LIST
    ),
    "struct": Form("object; keys that are null in it are left out of records"),
    "map": Form("object, where keys are text", way_out="give its keys the type string"),
    "dictionary": Form("the form of its values; times in it have none"),
    "extension<arrow.json>": Form("the value of the JSON text", build=_always(parse_json_cell)),
    "extension<arrow.uuid>": Form("text, 32 hex digits in 5 groups", build=_always(_uuid_text)),
    "extension<arrow.bool8>": Form("true, false", build=_always(bool)),
    **dict.fromkeys(("binary", "large_binary", "fixed_size_binary", "binary_view"), _BINARY),
    "duration": Form("none", "int64", way_out="cast it to a number or to string"),
}
"""Arrow's name of a type -> the JSON form of its cells. A type that is not named has none."""
_OTHER = Form("none", way_out=_AS_TEXT)
_TWICE = Form("none", way_out="rename one of the two fields of that name")
_CAST_LISTS = ("list", "large_list", "fixed_size_list")


class Field(NamedTuple):
    """A column of a table, or a field of its structs."""

    path: tuple[str, ...]
    """Names from the column on: ("messages", "content")."""
    type: str
    """Its Arrow type."""
    form: Form

    def __str__(self) -> str:
        return f"{'.'.join(self.path)} of the type {self.type:.60}"


class TableForms:
    """JSON forms of a table's columns."""

    def __init__(self, schema: "pyarrow.Schema") -> None:
        self.without_form: list[Field] = []
        """Fields whose cells have no JSON form."""
        self.times: list[Field] = []
        """Fields of dates and times, whose text may have been spelled otherwise."""
        self._converts = self._build_fields(schema, ())
        self._casts = [
            (number, stored)
            for number, field in enumerate(schema)
            if (stored := _storage(field.type)) != field.type
        ]

    def cast(self, table: "pyarrow.Table") -> "pyarrow.Table":
        """Returns a table whose rows `convert` takes."""
        for number, stored in self._casts:
            field = table.field(number).with_type(stored)
            table = table.set_column(number, field, table.column(number).cast(stored))
        return table

    def convert(self, row: dict[str, Any]) -> dict[str, Any]:
        """Returns a row with JSON values."""
        return _convert_fields(row, self._converts)

    def _build_fields(
        self, fields: "Iterable[pyarrow.Field]", path: tuple[str, ...]
    ) -> Mapping[str, Convert]:
        converts: dict[str, Convert] = {}
        names: set[str] = set()
        for field in fields:
            if field.name in names:
                self.without_form.append(Field((*path, field.name), str(field.type), _TWICE))
            names.add(field.name)
            convert = self._build(field, (*path, field.name))
            if convert is not None:
                converts[field.name] = convert
        return converts

    def _build(self, field: "pyarrow.Field", path: tuple[str, ...]) -> Convert | None:
        """Returns the conversion of a field's cells; None if they stay as they are."""
        kind, name = field.type, _form_name(field)
        form = FORMS.get(name, _OTHER)
        if name == "struct":
            fields = self._build_fields(kind, path)
            return partial(_convert_fields, converts=fields) if fields else None
        if name == "map" and FORMS.get(_form_name(kind.key_field)) is _TEXT:
            return partial(_convert_pairs, convert=self._build(kind.item_field, path))
        if form is _LIST or name == "dictionary":
            inner = kind.value_field if form is _LIST else field.with_type(kind.value_type)
            if name in _CAST_LISTS or _storage(inner.type) == inner.type:
                item = self._build(inner, path)
                return partial(_convert_items, convert=item) if item and form is _LIST else item
            form = _OTHER  # Arrow has no cast of its values
        if form.way_out:
            self.without_form.append(Field(path, str(kind), form))
            return None
        if form.is_time:
            self.times.append(Field(path, str(kind), form))
        return form.build and form.build(kind)


def _convert_fields(row: dict[str, Any], converts: Mapping[str, Convert]) -> dict[str, Any]:
    changed = {
        name: convert(row[name]) for name, convert in converts.items() if row[name] is not None
    }
    return {**row, **changed}


def _convert_items(values: list[Any], convert: Convert) -> list[Any]:
    return [None if value is None else convert(value) for value in values]


def _convert_pairs(pairs: list[tuple[str, Any]], convert: Convert | None) -> JsonObject:
    """Returns a map's pairs as an object: `[("city", "Paris")] -> {"city": "Paris"}`."""
    keys = [key for key, _ in pairs]
    values = [value for _, value in pairs]
    made = JsonObject(zip(keys, values if convert is None else _convert_items(values, convert)))
    if len(made) < len(pairs):
        twice = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f"a map has the key {shown(twice)} twice; keep one")
    return made


def _form_name(field: "pyarrow.Field") -> str:
    """Returns the key of a field's type in `FORMS`: `timestamp[s] -> timestamp`."""
    # Releases of pyarrow that do not know an extension leave its name with the field.
    noted = (field.metadata or {}).get(b"ARROW:extension:name", b"").decode()
    extension = f"extension<{getattr(field.type, 'extension_name', noted)}>"
    name = _type_name(getattr(field.type, "storage_type", field.type))
    # Text by another extension is text, but its numbers may be anything.
    is_storage = extension == "extension<>" or (extension not in FORMS and FORMS.get(name) is _TEXT)
    return name if is_storage else extension


def _type_name(kind: "pyarrow.DataType") -> str:
    return re.split(r"[<\[( ]", str(kind))[0]


def _storage(kind: Any) -> Any:
    """Returns the type that the cells of a type are cast to."""
    import pyarrow

    name = _type_name(kind)
    if name == "struct":
        return pyarrow.struct([field.with_type(_storage(field.type)) for field in kind])
    if name == "map":
        return pyarrow.map_(kind.key_field, kind.item_field.with_type(_storage(kind.item_type)))
    if name in _CAST_LISTS:
        item = kind.value_field.with_type(_storage(kind.value_type))
        if name == "fixed_size_list":
            return pyarrow.list_(item, kind.list_size)
        return (pyarrow.list_ if name == "list" else pyarrow.large_list)(item)
    storage = FORMS.get(name, _OTHER).storage
    return kind if storage is None else pyarrow.type_for_alias(storage)
