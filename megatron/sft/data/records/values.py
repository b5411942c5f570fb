"""pure. Checked values of a record's fields: text, weights of the loss, JSON.

Each function returns the value, or raises SampleError with the place of the field in the record.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from megatron.blending.formats.json_forms import JsonObject
from megatron.packing.quoting import shown

MAX_WEIGHT = 10_000
"""Largest weight of a record, a turn or a source in the loss. A larger one would destroy the model
with its gradients.
"""


class SampleError(ValueError):
    """A record that cannot become a sample. The message does not name the record: whoever catches
    it adds `source.describe(index)`.
    """


def is_empty(value: object) -> bool:
    """Returns whether a field is null, "", [] or {}."""
    return value is None or (isinstance(value, (str, list, Mapping)) and not value)


def text_of(text: object, where: str) -> str:
    """Returns `text`, which must be a string that UTF-8 can encode."""
    if not isinstance(text, str):
        is_number = isinstance(text, (int, float)) and not isinstance(text, bool)
        way_out = (
            "; tables make numbers of text and of times, so keep the column as string"
            if is_number
            else ""
        )
        raise SampleError(f"{where} must be a string, but is {shown(text)}{way_out}")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise SampleError(
            f"{where} holds half of a surrogate pair at character {error.start}; remove it"
        ) from error
    return text


def weight_of(weight: object, where: str) -> float:
    """Returns `weight`, which must be a number from 0 to `MAX_WEIGHT`."""
    if (
        isinstance(weight, bool)
        or not isinstance(weight, (int, float))
        or not 0 <= weight <= MAX_WEIGHT
    ):
        raise SampleError(
            f"{where} must be a number from 0 to {MAX_WEIGHT:,}, but is {shown(weight)}"
        )
    return float(weight)


def json_of(text: str, where: str) -> Any:
    """Returns the value of a JSON text. Its nulls stand in the data."""
    try:
        return json.loads(text, object_hook=JsonObject, parse_constant=_refuse_constant)
    except ValueError as error:
        is_python = text.lstrip()[:2] in ("['", "{'") or text.lstrip()[:3] == "[{'"
        way_out = "; it is Python's spelling, so write it by json.dumps" if is_python else ""
        raise SampleError(f"{where} must be JSON, but is {shown(text)}: {error}{way_out}") from None


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"JSON has no {name}")


def check_json(value: object, where: str) -> None:
    """Raises SampleError if a value has no JSON form: NaN and infinities, bytes, decimals that
    float64 would round.
    """
    if isinstance(value, Mapping):
        for key, part in value.items():
            check_json(part, f"{where}.{key}")
    elif isinstance(value, list):
        for part in value:
            check_json(part, where)
    elif isinstance(value, float):
        if not math.isfinite(value):
            raise SampleError(f"{where} is {value}, which JSON does not have; write null or text")
    elif not isinstance(value, (str, int, type(None))):
        raise SampleError(f"{where} is {shown(value)}, which has no JSON form; write it as text")
