"""pure. Reads records that were tokenized before, as TRL, Axolotl and LLaMA-Factory take them.

    input_ids          [N] ids
    labels             [N] the same ids, or -100 where the loss does not count; not shifted
    attention_mask     [N] 0 for padding, which is left out
    completion_mask    [N] TRL: 1 for what is trained
    assistant_masks    [N] TRL: the same

Without labels and masks all ids are trained. A record is one sequence: one of several, packed, is
refused, since they would read each other.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from megatron.packing.quoting import shown
from megatron.sft.data.records.content import TokenIds
from megatron.sft.data.records.values import SampleError

_IGNORED = -100
_MASKS = ("completion_mask", "assistant_masks")
TOKEN_COLUMNS = ("input_ids", "labels", "attention_mask", "position_ids", *_MASKS)
_OTHER_MASKS = ("loss_mask", "loss_masks", "loss_weights")
_PACKED = ("seq_lengths", "cu_seqlens", "cu_seq_lens", "original_seq_len")


def read_token_ids(fields: Mapping[str, Any]) -> TokenIds:
    """Returns the ids of a record without padding, and which of them are trained."""
    refuse_masks(fields, ())
    for name in _PACKED:
        if name in fields and np.size(fields[name]) > 1:
            raise _packed(name)
    columns = {name: whole_numbers(fields[name], name) for name in TOKEN_COLUMNS if name in fields}
    ids = columns["input_ids"]
    for name, column in columns.items():
        if len(column) != len(ids):
            raise SampleError(
                f"{name} must have one number for each of {len(ids)} input_ids, but has "
                f"{len(column)}"
            )
    if "attention_mask" in columns:
        kept = _kept(columns["attention_mask"])
        columns = {name: column[kept] for name, column in columns.items()}
    if "position_ids" in columns and (np.diff(columns["position_ids"]) != 1).any():
        raise _packed("position_ids")
    return TokenIds(columns["input_ids"], _is_trained(columns), "input_ids")


def refuse_masks(fields: Mapping[str, Any], others: tuple[str, ...] = ("labels", *_MASKS)) -> None:
    """Raises SampleError for masks of the loss beside ids that no mask is read with.

    others: masks that are read beside input_ids only.
    """
    ids = "input_ids" if "input_ids" in fields else "tokens"
    for name in (*_OTHER_MASKS, *others):
        if isinstance(fields.get(name), (list, tuple, np.ndarray)):
            way_out = (
                "rename the ids, input_ids=tokens"
                if name in others
                else f"write it as labels of input_ids, {_IGNORED} for ids that are not trained"
            )
            raise SampleError(
                f"record has {name} beside {ids}, which would be lost; {way_out}, or leave it out "
                f"by none={name}"
            )


def whole_numbers(numbers: object, where: str) -> npt.NDArray[Any]:
    """Returns a list of at least one whole number as an array [N]."""
    try:
        array = np.asarray(numbers)
    except ValueError:  # lists of unlike lengths
        array = np.empty(0, np.object_)
    if array.dtype.kind == "f" and (array == array.astype(np.int64)).all():
        array = array.astype(np.int64)  # as pandas and DuckDB write columns that lack some
    if array.ndim != 1 or array.dtype.kind not in "iub" or not array.size:
        raise SampleError(f"{where} must be at least one whole number, but is {shown(numbers)}")
    return array.astype(np.int64) if array.dtype.kind == "b" else array


def _kept(mask: npt.NDArray[Any]) -> slice:
    """Returns the ids that are not padding: `0 0 1 1 1 -> slice(2, 5)`."""
    if not np.isin(mask, (0, 1)).all():
        raise _packed("attention_mask")
    places = np.flatnonzero(mask)
    if not len(places) or places[-1] - places[0] >= len(places):
        raise SampleError(
            "attention_mask must be 1 but for padding at the ends, but is 0 "
            + ("between ids" if len(places) else "everywhere")
            + "; correct it, or leave it out by none=attention_mask"
        )
    return slice(int(places[0]), int(places[-1]) + 1)


def _is_trained(columns: Mapping[str, npt.NDArray[Any]]) -> npt.NDArray[np.bool_]:
    ids = columns["input_ids"]
    is_trained = np.ones(len(ids), np.bool_)
    for name in _MASKS:
        if name in columns:
            if not np.isin(columns[name], (0, 1)).all():
                raise SampleError(f"{name} must be 0 or 1, but is {columns[name].max()}")
            is_trained &= columns[name] == 1
    if "labels" not in columns:
        return is_trained
    labels = columns["labels"]
    has_label = labels != _IGNORED
    wrong = np.flatnonzero(has_label & (labels != ids))
    if len(wrong):
        at = int(wrong[0])
        ahead = has_label[:-1]
        is_shifted = bool(ahead.any() and (labels[:-1] == ids[1:])[ahead].all())
        raise SampleError(
            f"labels must be those of input_ids or {_IGNORED}, but number {at} is {labels[at]} "
            f"beside {ids[at]}"
            + ("; they are one ahead: give them unshifted, as transformers reads them" * is_shifted)
        )
    return is_trained & has_label


def _packed(name: str) -> SampleError:
    return SampleError(
        f"{name} says that input_ids are several sequences, packed, which would be one here; give "
        "each as a record: they are packed in training"
    )
