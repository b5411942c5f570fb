"""pure. Cost of what sequences have beside their tokens, such as images that a vision tower
encodes.

A pack costs what its tokens cost (`cost`) and, added to that, what its payloads cost. A payload of
n units (patches of an image) costs `linear * n + quadratic * n^2`: products over its patches, and
attention within it, or within windows of it. So payloads cost the same in any pack.

    PayloadCost(linear=2.0, quadratic=1.0), images of 3 and 5 patches    ->    15 and 35
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from megatron.packing.quoting import shown

FloatArray = npt.NDArray[np.float64]
PayloadCosts = Mapping[str, Callable[[npt.NDArray[np.int64]], npt.NDArray[Any]]]
"""By kind, a function of the units of a sample's payloads, int64 [n], to the cost of each: a
`PayloadCost`, or any other.
"""
_FLOPS_PER_MULTIPLY_ADD = 2
_BACKWARD = 2
"""Times the forward pass."""


@dataclass(frozen=True, kw_only=True)
class PayloadCost:
    """Cost of payloads by their units, in the unit of the pack's cost; each factor at least 0."""

    linear: float
    quadratic: float = 0.0
    windows: tuple[tuple[int, float], ...] = ()
    """(w, factor of the squares) of layers that attend within windows of w units."""

    def __post_init__(self) -> None:
        factors = (self.linear, self.quadratic, *(factor for _, factor in self.windows))
        if not all(0 <= factor < math.inf for factor in factors):
            raise ValueError(f"a payload cost needs finite factors of at least 0, but is {self}")
        if any(window < 1 for window, _ in self.windows):
            raise ValueError(f"a payload cost needs windows of at least 1 unit, but is {self}")

    def __call__(self, units: npt.NDArray[np.int64]) -> FloatArray:
        """Returns the cost of each payload, float64 of the shape of `units`."""
        costs = units * (self.linear + self.quadratic * units.astype(np.float64))
        for window, factor in self.windows:
            whole, rest = np.divmod(units, window)  # 11 in windows of 4: 4 4 3
            costs = costs + factor * (whole * window**2 + rest**2)
        return costs

    def times(self, number: float) -> PayloadCost:
        """Returns so many times the cost."""
        return replace(
            self,
            linear=self.linear * number,
            quadratic=self.quadratic * number,
            windows=tuple((window, factor * number) for window, factor in self.windows),
        )


def vision_cost(
    *,
    num_layers: int,
    hidden_size: int,
    ffn_hidden_size: int,
    is_gated: bool = False,
    window: int | None = None,
    num_full_layers: int = 0,
    is_trained: bool = True,
    num_ranks: int = 1,
) -> PayloadCost:
    """Returns the FLOPs of a vision transformer per patch and per pair of patches.

    Args:
        window: patches that attend to one another in all but `num_full_layers`; None for all
            patches of an image, in every layer.
        is_trained: whether there is a backward pass.
        num_ranks: ranks of a data-parallel replica that encode the image as well, or wait for the
            one that does: tensor times context times pipeline size.
    """
    per_patch = 4 * hidden_size**2 + (3 if is_gated else 2) * hidden_size * ffn_hidden_size
    flops = _FLOPS_PER_MULTIPLY_ADD * (1 + _BACKWARD * is_trained) * num_ranks
    per_pair = flops * 2 * hidden_size  # scores and values; no pair is masked
    num_full = num_layers if window is None else num_full_layers
    return PayloadCost(
        linear=float(flops * num_layers * per_patch),
        quadratic=float(per_pair * num_full),
        windows=() if window is None else ((window, float(per_pair * (num_layers - num_full))),),
    )


def cost_of_payloads(given: Mapping[str, Any], costs: PayloadCosts) -> float:
    """Returns the cost of one sample's payloads.

    Args:
        given: by kind, the units of each payload: {"vision": [256, 64]}.

    Raises ValueError for a kind without a function, units that are no whole numbers, and a cost
    that is negative or not finite.
    """
    total = 0.0
    for kind, numbers in given.items():
        if kind not in costs:
            raise ValueError(
                f"'costs' of a sample has '{kind}', but there is no function for it; pass "
                f"PayloadStore(costs={{'{kind}': PayloadCost(linear=...)}})"
            )
        units = np.asarray(numbers).reshape(-1)
        if units.size and (units.dtype.kind not in "iu" or units.min() < 0):
            raise ValueError(
                f"'costs' of a sample must be whole numbers of at least 0, but '{kind}' is "
                f"{shown(numbers)}"
            )
        total += float(np.sum(costs[kind](units.astype(np.int64))))
    if not 0 <= total < math.inf:
        raise ValueError(f"the cost of a sample's payloads must be at least 0, but is {total}")
    return total
