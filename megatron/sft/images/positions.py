"""pure. Positions of a sequence's tokens along time, height and width.

    tokens    a  b  [image of 2 x 3 tokens]  c
    time      0  1  2  2  2  2  2  2         5
    height    0  1  2  2  2  3  3  3         5
    width     0  1  2  3  4  2  3  4         5

Words count on along all axes. An image begins where the last word ended, and the next word follows
its longer side. Positions begin at zero in each sequence.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from megatron.sft.images.sizes import Grid


def axis_positions(
    num_tokens: int, starts: Sequence[int], grids: Sequence[Grid]
) -> npt.NDArray[np.int32]:
    """Returns the positions of a sequence, int32 [3, num_tokens].

    Args:
        starts: place of the first token of each image, in order.
        grids: tokens of each image.
    """
    positions = np.empty((3, num_tokens), np.int32)
    place = following = 0
    for start, grid in zip(starts, grids, strict=True):
        positions[:, place:start] = np.arange(following, following + start - place)
        following += start - place
        place = start + grid.num_tokens
        rows, columns = np.divmod(np.arange(grid.num_tokens), grid.columns)
        positions[0, start:place] = following
        positions[1, start:place] = following + rows
        positions[2, start:place] = following + columns
        following += max(grid)
    positions[:, place:] = np.arange(following, following + num_tokens - place)
    return positions
