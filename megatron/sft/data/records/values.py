"""pure. Checked values of a record's fields: text, weights of the loss, JSON.

Each function returns the value, or raises SampleError with the place of the field in the record.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

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
        raise SampleError(f"{where} must be a string, but is {text!r:.60}")
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
            f"{where} must be a number from 0 to {MAX_WEIGHT:,}, but is {weight!r:.60}"
        )
    return float(weight)


def json_of(text: str, where: str) -> Any:
    """Returns the value of a JSON text."""
    try:
        return json.loads(text)
    except ValueError as error:
        raise SampleError(f"{where} must be JSON, but is {text!r:.60}: {error}") from None
