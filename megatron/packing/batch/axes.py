"""pure. Positions along several axes, as models of images have them: time, height, width.

    position_ids [3, L], as HuggingFace's and Megatron-LM's models take them    ->    [L, 3]

HuggingFace's packed ones are [4, L]: the first row counts along each sequence, which it bounds.

They restart in each sequence, so they travel with its tokens like any other column.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from megatron.packing.batch.columns import NUM_AXES


def has_axes(positions: Any) -> bool:
    """Returns whether these are positions along axes, [3 or 4, ..., L]; [L] and [1, L] are not."""
    shape = getattr(positions, "shape", None)
    if isinstance(positions, list) and positions and isinstance(positions[0], list):
        shape = np.shape(positions)
    return shape is not None and len(shape) > 1 and shape[0] in (NUM_AXES, NUM_AXES + 1)


def without_axes(item: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns a sample whose positions along axes, if it has such, are `axis_positions` [L, 3].

    Raises ValueError for rows of several samples, or numbers that are no integers.
    """
    positions: Any = item.get("position_ids")
    if not has_axes(positions):
        return item
    if hasattr(positions, "detach"):  # a tensor, without importing torch
        positions = positions.detach().cpu().numpy()
    array: npt.NDArray[Any] = np.asarray(positions)
    if array.size != len(array) * array.shape[-1]:
        raise ValueError(
            f"'position_ids' along axes must be [{NUM_AXES}, L] or [{NUM_AXES}, 1, L], but are "
            f"{list(array.shape)}; hand rows over as a list of samples"
        )
    rows = array.reshape(len(array), -1)
    others = {name: value for name, value in item.items() if name != "position_ids"}
    along_sequence = {"position_ids": rows[0]} if len(rows) > NUM_AXES else {}
    return {**others, **along_sequence, "axis_positions": rows[-NUM_AXES:].T}
