"""pure. Samples of HuggingFace's collators -> samples of Megatron-LM's data sets.

A label stands above its own token there, and above the token before it here. None of them leaves
its sequence.

    input_ids  5 6 7 8 0        tokens  5 6 7 8
    labels     . . 7 8 .   ->   labels  . 7 8 .
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

IGNORED = -100
"""The label that HuggingFace's collators give to tokens without a loss."""


def as_megatron_sample(item: Mapping[str, npt.NDArray[Any]]) -> dict[str, Any]:
    """Returns `tokens`, `labels`, `cu_seqlens` and the item's other fields, without its padding.

    Sequences begin where positions are 0, as they do in HuggingFace's models.

    Args:
        item: `input_ids`, and where it has them `labels`, `attention_mask` (0 is padding),
            `loss_mask`, `position_ids` and `cu_seq_lens_q`, [L] each; other fields [L, ...].
    """
    sample = dict(item)
    ends = sample.pop("cu_seq_lens_q", None)
    for name, values in sample.items():
        if len(values) != sample["input_ids"].size:
            raise ValueError(
                f"'{name}' must be as long as 'input_ids' ({sample['input_ids'].size}), but is "
                f"{len(values)}"
            )
    sample["tokens"] = sample.pop("input_ids")
    is_real = sample.pop("attention_mask", None)
    if is_real is not None:
        sample = {name: values[is_real != 0] for name, values in sample.items()}
    size = sample["tokens"].size
    if not size:
        raise ValueError(
            "a sample must have at least one token, but 'attention_mask' says that all of it is "
            "padding"
        )
    if ends is None:
        starts = np.flatnonzero(sample.get("position_ids", np.arange(size)) == 0)
        ends = np.append(np.union1d([0], starts), size)
    # Each label moves to the token before it, and the last token of each sequence has none.
    if "labels" in sample:
        sample["labels"] = np.append(sample["labels"][1:], IGNORED)
        sample["labels"][np.clip(ends[1:], 1, size) - 1] = IGNORED
    if "loss_mask" in sample:
        sample["loss_mask"] = np.append(sample["loss_mask"][1:], 0)
    return {**sample, "cu_seqlens": ends}
