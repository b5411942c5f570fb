"""pure. Makes the fields of a sample from the parts of a record, by the `field_map` of a
dataset.yaml.

    field_map              record                          fields
    text: txt              {"txt": b"hi"}                  {"text": "hi"}
    label: json[ids][0]    {"json": b'{"ids": [3, 4]}'}    {"label": 3}
    label: json[id],cls    {"cls": b"7"}                   {"label": 7}

A source is a part, or a value in it under keys and list positions. Several sources are separated by
commas, and the first that exists is used. A part is decoded once, and only if a field needs it.
"""

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from megatron.blending.arguments import shown
from megatron.blending.formats.decode import Decode, DecodeError
from megatron.blending.formats.record import Record

_OPTION = re.compile(r"([^\[\]]+)((?:\[[^\[\]]+\])*)")
_KEY = re.compile(r"\[([^\[\]]+)\]")
_CHEAP_SUFFIXES = frozenset("json jsn txt text transcript cls cls2 index inx id npy".split())
"""Suffixes of parts that are quick and safe to decode."""
_MISSING: Any = object()


class _Option(NamedTuple):
    part: str
    keys: tuple[str, ...]


class Missing(NamedTuple):
    """A missing source of a field: a part of the record, or a key in the value of a part."""

    name: str
    within: str
    """Place where it should be: "json" or "json[meta]"; "" for a part."""
    there: tuple[str, ...]
    """Names that exist at that place: parts or keys."""
    held: str
    """Type of the value there, if it cannot have keys; "" if it can."""


class FieldMap:
    """Function from a record to the fields of its sample: `FieldMap({"text": "txt"})(record,
    decode_part) -> {"text": "..."}`. It raises DecodeError if a field has no source.
    """

    def __init__(self, fields: Mapping[str, str], where: str = "field_map") -> None:
        for name in fields:
            if str(name).startswith("__"):
                raise ValueError(
                    f"{where}: {name} must be a field of the sample's own, but is filled in "
                    "anyway; remove it"
                )
        self._texts = dict(fields)
        self._fields = [(name, _parse(text, f"{where}: {name}")) for name, text in fields.items()]
        # The common case: each field is a part of its own, without alternatives and keys.
        self._parts_alone = [(name, options[0].part) for name, options in self._fields]
        if any(len(options) > 1 or options[0].keys for _, options in self._fields) or len(
            self.parts
        ) < len(fields):
            self._parts_alone = []

    @property
    def parts(self) -> set[str]:
        """Names of all parts that fields may come from."""
        return {option.part for _, options in self._fields for option in options}

    def missing(self, record: Record, decode: Decode) -> dict[str, Missing]:
        """Returns the missing source of each field that a record lacks. If a field has several
        sources, a missing key is returned rather than a missing part.

        It looks for keys in JSON, text, numbers and arrays only: other parts may be slow to decode.
        A list that is too short, and null, do not count as missing, since other records may have
        more. Raises any error of `decode`.
        """
        decoded: dict[str, Any] = {}
        missing = {}
        for name, options in self._fields:
            faults = [_missing(option, record, decode, decoded) for option in options]
            real = [fault for fault in faults if fault is not None]
            if len(real) == len(faults):
                missing[name] = next((fault for fault in real if fault.within), real[0])
        return missing

    def __call__(self, record: Record, decode: Decode) -> dict[str, Any]:
        try:
            if self._parts_alone:
                return {name: decode(part, record[part]) for name, part in self._parts_alone}
        except KeyError:
            pass
        return self._choose(record, decode)

    def _choose(self, record: Record, decode: Decode) -> dict[str, Any]:
        decoded: dict[str, Any] = {}
        values = {}
        for name, options in self._fields:
            for part, keys in options:
                if part not in decoded:
                    if part not in record:
                        continue
                    decoded[part] = decode(part, record[part])
                value = decoded[part] if not keys else _value_at(decoded[part], keys)
                if value is not _MISSING:
                    values[name] = value
                    break
            else:
                parts = ", ".join(key for key in record if not key.startswith("__")) or "none"
                raise DecodeError(
                    f"field {shown(name)} must come from {self._texts[name]}, which is not there; "
                    f"parts: {parts}"
                )
        return values


def _parse(text: str, where: str) -> tuple[_Option, ...]:
    options = []
    for option in text.split(","):
        match = _OPTION.fullmatch(option.strip())
        if match is None:
            raise ValueError(
                f"{where} must be like txt or json[caption][0], alternatives by comma, but is "
                f"{shown(text)}"
            )
        options.append(_Option(match[1], tuple(_KEY.findall(match[2]))))
    return tuple(options)


def _missing(
    option: _Option, record: Record, decode: Decode, decoded: dict[str, Any]
) -> Missing | None:
    part, keys = option
    if part not in record:
        return Missing(part, "", tuple(name for name in record if not name.startswith("__")), "")
    if not keys or part.rpartition(".")[2] not in _CHEAP_SUFFIXES:
        return None
    if part not in decoded:
        decoded[part] = decode(part, record[part])
    value, within = decoded[part], part
    for key in keys:
        inner = _value_at(value, (key,))
        if inner is _MISSING:
            if isinstance(value, dict):
                return Missing(key, within, tuple(map(str, value)), "")
            is_position = isinstance(value, list) and key.lstrip("-").isdecimal()
            return (
                None
                if value is None or is_position
                else Missing(key, within, (), type(value).__name__)
            )
        value, within = inner, f"{within}[{key}]"
    return None


def _value_at(value: object, keys: tuple[str, ...]) -> object:
    for key in keys:
        if isinstance(value, dict):
            value = value.get(key, _MISSING)
        elif (
            isinstance(value, list)
            and key.lstrip("-").isdecimal()
            and -len(value) <= int(key) < len(value)
        ):
            value = value[int(key)]
        else:
            return _MISSING
    return value
