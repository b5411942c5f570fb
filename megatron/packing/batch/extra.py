"""pure. Extra fields of a user's samples: numbers per token or per sample that travel with their
sequence.

    {"tokens": [5, 6, 7], "advantages": [.1, .2, .3], "sample_id": 12}
                           one row per token           one per sequence

A row may itself be an array. A sample with several sequences gives one number for all of them, or
one row for each. In HuggingFace's samples rows per token move one to the left, as labels do, and
the last token of a sequence has zero. A field without numbers is named once in a warning and does
not travel.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from megatron.packing.batch import grammar
from megatron.packing.batch.columns import PATH, SEQUENCE, TOKEN, Column, IntArray

Warn = Callable[[str, str], None]
"""Function of a field's name and what is to be said of it."""

MAX_EXACT = 2**53
"""Integers up to which a float64 holds each exactly."""


class Rows(NamedTuple):
    """One sample's values of an extra field, in each reading that its shape allows."""

    per_token: npt.NDArray[Any] | None
    """[L, *shape]"""
    per_sequence: npt.NDArray[Any] | None
    """[sequences, *shape]"""
    per_path: npt.NDArray[Any] | None = None
    """[paths, *shape], of fields that are named so (see `paths`)"""


def extra_fields(item: Mapping[str, Any], size: int, warn: Warn) -> dict[str, npt.NDArray[Any]]:
    """Returns the extra fields of a sample of `size` tokens as arrays; [1, L] is taken for [L]."""
    found = {}
    for name, value in item.items():
        if value is None or not grammar.is_own(name):
            continue
        array = _numbers(value)
        if array is None:
            warn(name, "is left out: it holds no numbers")
            continue
        found[name] = array[0] if array.ndim > 1 and array.shape[:2] == (1, size) else array
    return found


def warn_of_own_fields(
    fields: Mapping[str, npt.NDArray[Any]], lengths: IntArray, warn: Warn
) -> None:
    """Warns of fields that mask or bound something elsewhere, and nothing here."""
    for name, values in fields.items():
        names = grammar.names_elsewhere(name)
        if names and _says_something(names, values, lengths):
            meaning = grammar.plain_text(grammar.KNOWN[names[0]].meaning)
            warn(name, f"travels as a field of your own; such fields {meaning}")


def _says_something(names: tuple[str, ...], values: npt.NDArray[Any], lengths: IntArray) -> bool:
    """Returns whether values of a known name say what the sequences of these lengths do not."""
    if names is grammar.NUMBERS_OF_SEQUENCES:
        return values.ndim == 1 and np.count_nonzero(np.diff(values)) + 1 != lengths.size
    if names is grammar.SIZES:
        return values.size == 1 and values.item() != lengths.sum()
    return names is not grammar.TOKEN_TYPES or bool(values.any())


def rows_of(
    name: str,
    values: npt.NDArray[Any],
    size: int,
    index: IntArray | None,
    lengths: IntArray,
    *,
    is_moved: bool,
) -> Rows:
    """Returns a field's rows per token and per sequence: both where each sequence has one token.

    Args:
        size: tokens of the sample with its padding.
        index: places of the real ones; None for all.
        lengths: int64 [n], tokens of each sequence or tree.
        is_moved: whether labels stand above their own tokens, and rows with them.

    Raises ValueError where the field has neither.
    """
    num_sequences = lengths.size
    per_token = per_sequence = None
    if values.shape[:1] == (num_sequences,):
        per_sequence = values
    elif values.size == 1:
        # A number stands for all sequences of its sample: reward 0.5, 3 sequences -> 0.5 0.5 0.5
        per_sequence = np.repeat(values.reshape(1), num_sequences)
    if values.shape[:1] == (size,):
        per_token = values if index is None else values[index]
        per_token = moved_left(per_token, np.cumsum(lengths), 0) if is_moved else per_token
    elif size == num_sequences:
        per_token = per_sequence
    if per_token is None and per_sequence is None:
        row = grammar.KNOWN.get(name)
        way_out = "" if row is None else f"; such fields {grammar.plain_text(row.meaning)}"
        raise ValueError(
            f"'{name}' must have one row per token ({size}) or per sequence ({num_sequences}), but "
            f"has shape {list(values.shape)}{way_out}"
        )
    return Rows(per_token, per_sequence)


def moved_left(values: npt.NDArray[Any], ends: IntArray, fill: int) -> npt.NDArray[Any]:
    """Returns rows moved one to the left in sequences that end at `ends`, the last of each `fill`.

    values 1 2 3 4, ends 3 4, fill 0    ->    2 3 0 0
    """
    moved = np.empty_like(values)
    moved[:-1] = values[1:]
    moved[ends - 1] = fill
    return moved


def column_of(name: str, items: Sequence[Rows]) -> tuple[Column, npt.NDArray[Any]]:
    """Returns the column of all samples' rows, and its values, one sample after the other.

    It is per sequence if all samples can be read so: rows of sequences of one token could be either
    (see `unified`). Raises ValueError where some are per token and others per sequence, where
    shapes of rows differ, and for integers that would be rounded.
    """
    for scope, parts in (
        (SEQUENCE, [rows.per_sequence for rows in items]),
        (TOKEN, [rows.per_token for rows in items]),
        (PATH, [rows.per_path for rows in items]),
    ):
        found = [part for part in parts if part is not None]
        if len(found) < len(items):
            continue
        shapes = {part.shape[1:] for part in found}
        if len(shapes) > 1:
            raise ValueError(
                f"rows of '{name}' must have one shape, but have {sorted(map(list, shapes))}"
            )
        values = np.concatenate(found)
        if values.dtype.kind == "f" and any(_is_rounded(part) for part in found):
            raise ValueError(
                f"'{name}' must be integers in all samples or below 2**53, but some are floats"
            )
        return Column(name, values.dtype.name, scope, values.shape[1:], extra=True), values
    raise ValueError(
        f"'{name}' must have one row per token in all samples, or one per sequence in all"
    )


def _is_rounded(part: npt.NDArray[Any]) -> bool:
    """Returns whether some integer is too large for a float64."""
    return part.dtype.kind in "iu" and part.size > 0 and bool(abs(int(part.max())) > MAX_EXACT)


def unified(name: str, columns: Sequence[tuple[Column, bool]]) -> Column:
    """Returns the column that takes the rows of all: of the smallest type that holds them.

    Args:
        columns: those of one name, and for each whether all its sequences have one token: then a
            row per sequence is one per token, too.

    Raises ValueError where shapes, or scopes, differ.
    """
    shapes = {column.shape for column, _ in columns}
    sure = {
        column.scope
        for column, is_either in columns
        if not (is_either and column.scope == SEQUENCE)
    }
    scopes = sure or {column.scope for column, _ in columns}
    if len(shapes) > 1 or len(scopes) > 1:
        first, second = sorted({column for column, _ in columns})[:2]
        raise ValueError(
            f"'{name}' must have one scope and shape in all samples of a run, but is "
            f"{description(first)} in some and {description(second)} in others"
        )
    dtype = np.result_type(*(column.dtype for column, _ in columns))
    return Column(name, dtype.name, scopes.pop(), shapes.pop(), extra=True)


def description(column: Column) -> str:
    """Returns a column's shape, type and scope for an error."""
    shape = f"[{', '.join(map(str, column.shape))}] " if column.shape else ""
    return f"{shape}{column.dtype} per {column.scope}"


def _numbers(value: Any) -> npt.NDArray[Any] | None:
    """Returns an array of numbers in the machine's byte order; None for anything else."""
    if hasattr(value, "detach"):  # a tensor, without importing torch
        value = value.detach().cpu()
        value = (value.float() if "bfloat16" in str(value.dtype) else value).numpy()
    try:
        array = np.asarray(value)
    except ValueError:  # lists of several lengths
        return None
    if array.dtype.kind not in "biuf" or array.dtype.itemsize > 8:
        return None
    return array.astype(array.dtype.newbyteorder("="), copy=False)
