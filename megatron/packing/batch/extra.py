"""pure. Extra fields of a user's samples: numbers per token or per sample that travel with their
sequence.

    {"tokens": [5, 6, 7], "advantages": [.1, .2, .3], "sample_id": 12}
                           one row per token           one per sequence

A row may itself be an array. A sample with several sequences gives one number for all of them, or
one row for each. Fields that samples of Megatron-LM, HuggingFace and energon have for their own
purposes are RESERVED. A field without numbers is named once in a warning and does not travel.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from megatron.packing.batch.columns import PATH, SEQUENCE, TOKEN, Column

RESERVED = frozenset(
    (
        *("tokens", "input_ids", "labels", "loss_mask", "position_ids", "attention_mask", "source"),
        *("parents", "num_paths", "axis_positions", "first_path", "path_tokens"),
        *("payloads", "payload_key", "costs"),
        *("__key__", "__restore_key__", "__subflavors__", "__sources__"),
        *(
            "original_seq_len",
            "padded_seq_len",
            "cu_seqlens",
            "cu_seqlens_padded",
            "cu_seqlens_argmin",
            "max_seqlen",
        ),
        *("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k"),
    )
)
"""Names that are never extra columns."""


class Rows(NamedTuple):
    """One sample's values of an extra field, in each reading that its shape allows."""

    per_token: npt.NDArray[Any] | None
    """[L, *shape]"""
    per_sequence: npt.NDArray[Any] | None
    """[sequences, *shape]"""
    per_path: npt.NDArray[Any] | None = None
    """[paths, *shape], of fields that are named so (see `paths`)"""


def extra_fields(item: Mapping[str, Any], size: int) -> dict[str, npt.NDArray[Any]]:
    """Returns the extra fields of a sample of `size` tokens as arrays; [1, L] is taken for [L]."""
    found = {}
    for name, value in item.items():
        if name in RESERVED or value is None:
            continue
        array = _numbers(value)
        if array is None:
            warnings.warn(f"'{name}' of a sample is left out: it holds no numbers", stacklevel=2)
            continue
        found[name] = array[0] if array.ndim > 1 and array.shape[:2] == (1, size) else array
    return found


def rows_of(name: str, values: npt.NDArray[Any], size: int, num_sequences: int) -> Rows:
    """Returns a field's rows per token and per sequence, for a sample of so many of them.

    Raises ValueError where it has neither.
    """
    per_token = values if values.shape[:1] == (size,) else None
    per_sequence = values if values.shape[:1] == (num_sequences,) else None
    # A number stands for all sequences of its sample: reward 0.5, 3 sequences -> 0.5 0.5 0.5
    if per_sequence is None and values.size == 1:
        per_sequence = np.repeat(values.reshape(1), num_sequences)
    if per_token is None and per_sequence is None:
        raise ValueError(
            f"'{name}' must have one row per token ({size}) or per sequence ({num_sequences}), but "
            f"has shape {list(values.shape)}"
        )
    return Rows(per_token, per_sequence)


def column_of(name: str, items: list[Rows]) -> tuple[Column, npt.NDArray[Any]]:
    """Returns the column of all samples' rows, and its values, one sample after the other.

    It is per token if all samples can be read so: a lone token's number could be either. Raises
    ValueError where some are per token and others per sequence, or shapes of rows differ.
    """
    for scope, parts in (
        (TOKEN, [rows.per_token for rows in items]),
        (SEQUENCE, [rows.per_sequence for rows in items]),
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
        return Column(name, values.dtype.name, scope, values.shape[1:], extra=True), values
    raise ValueError(
        f"'{name}' must have one row per token in all samples, or one per sequence in all"
    )


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
