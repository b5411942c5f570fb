"""tensor. The rotary embedding of positions along time, height and width.

Qwen3-VL: pair i of a head's channels turns by the position along axis i mod 3, as long as that axis
has pairs left by its section; all others turn by time. Qwen2.5-VL: one section after the other.

    sections 3 2 2, 8 pairs    ->    t h w t h w t t,  or of 7 in runs  t t t h h w w
"""

from __future__ import annotations

import torch
from torch import Tensor


class AxisRotary(torch.nn.Module):
    """Takes the place of a GPTModel's `rotary_pos_emb` for packs whose positions have axes."""

    def __init__(
        self, inv_freq: Tensor, sections: tuple[int, int, int], *, is_interleaved: bool = True
    ) -> None:
        """Takes the frequencies.

        Args:
            inv_freq: [pairs], radians per position.
            sections: pairs that turn by time, height and width; of time, those that are left.
            is_interleaved: whether the axes alternate, instead of a run for each.
        """
        super().__init__()
        # No buffer, which Float16Module would round.
        self.inv_freq = inv_freq
        self._axis = axes_of_pairs(sections, len(inv_freq))
        if not is_interleaved:
            runs = [[axis] * number for axis, number in enumerate(sections)]
            self._axis = torch.tensor([axis for run in runs for axis in run])

    def forward(self, position_ids: Tensor, *_: object, **__: object) -> Tensor:
        """Returns the angles of all tokens of a pack, float32 [T, 1, 1, 2 * pairs], each twice.

        Args:
            position_ids: [3, 1, T].
        """
        device = position_ids.device
        self.inv_freq, self._axis = self.inv_freq.to(device), self._axis.to(device)
        # [T, pairs]: the position along the axis of each pair
        positions = position_ids[:, 0].T.to(torch.float32).index_select(1, self._axis)
        angles = positions * self.inv_freq
        return torch.cat((angles, angles), -1)[:, None, None]


def axes_of_pairs(sections: tuple[int, int, int], num_pairs: int) -> Tensor:
    """Returns the axis that each pair of channels turns by, int64 [pairs]: 0 time, 1 height, 2
    width.
    """
    axis = torch.zeros(num_pairs, dtype=torch.int64)
    for number in (1, 2):
        axis[number : 3 * sections[number] : 3] = number
    return axis
