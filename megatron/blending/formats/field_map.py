"""pure. Where the fields of a sample come from: `{"text": "txt", "label": "json[classes][0],cls"}`.

A part, or what stands in it under keys and list positions; alternatives by comma, of which the first that is there is
taken. A part is decoded once, and only if a field asks for it.
"""

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from megatron.blending.formats.decode import Decode, DecodeError
from megatron.blending.formats.record import Record

_OPTION = re.compile(r"([^\[\]]+)((?:\[[^\[\]]+\])*)")
_KEY = re.compile(r"\[([^\[\]]+)\]")
_MISSING: Any = object()


class _Option(NamedTuple):
    part: str
    keys: tuple[str, ...]


class FieldMap:
    """`FieldMap({"text": "txt"})(record, decode_part) -> {"text": "..."}`. DecodeError if a field is not there."""

    def __init__(self, fields: Mapping[str, str], where: str = "field_map") -> None:
        self._texts = dict(fields)
        self._fields = [(name, _parse(text, f"{where}: {name}")) for name, text in fields.items()]
        # The common case, in which nothing is to be chosen and nothing decoded twice: each field a part of its own.
        self._parts_alone = [(name, options[0].part) for name, options in self._fields]
        if any(len(options) > 1 or options[0].keys for _, options in self._fields) or len(self.parts) < len(fields):
            self._parts_alone = []

    @property
    def parts(self) -> set[str]:
        """Names of all parts that a field may come from."""
        return {option.part for _, options in self._fields for option in options}

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
                    f"field {name!r} must come from {self._texts[name]}, which is not there; parts: {parts}"
                )
        return values


def _parse(text: str, where: str) -> tuple[_Option, ...]:
    options = []
    for option in text.split(","):
        match = _OPTION.fullmatch(option.strip())
        if match is None:
            raise ValueError(f"{where} must be like txt or json[caption][0], alternatives by comma, but is {text!r}")
        options.append(_Option(match[1], tuple(_KEY.findall(match[2]))))
    return tuple(options)


def _value_at(value: Any, keys: tuple[str, ...]) -> Any:
    for key in keys:
        if isinstance(value, dict):
            value = value.get(key, _MISSING)
        elif isinstance(value, list) and key.lstrip("-").isdecimal() and -len(value) <= int(key) < len(value):
            value = value[int(key)]
        else:
            return _MISSING
    return value
