"""pure. The sequences of a global batch as schedulers and bounds count them: by descending cost, in exact integers.

Sums of integers do not depend on their order, so that every machine and Python version finds the same ties and the
same schedule, and bounds hold without a tolerance.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from megatron.packing.scheduling import native
from megatron.packing.scheduling.cost import PackCost
from megatron.packing.scheduling.native import address as _at

IntArray = npt.NDArray[np.int64]

_BITS = 42
"""Of the sum of all costs: fine enough to tell apart what any measurement could, and products with small factors still
fit 63 bits.
"""

MANY = 1 << 14
"""Sequences, of more of which schedulers try fewer ways: each way takes milliseconds."""


@dataclass(frozen=True, kw_only=True)
class Work:
    """Sequences by descending cost, equal ones in global order."""

    order: IntArray
    """int64 [N], global number of each sequence."""
    length: IntArray
    """int64 [N], tokens, descending."""
    cost: IntArray
    """int64 [N], in units; at least 1."""
    fixed: int
    """Cost of a microbatch besides its sequences', in units."""
    unit: float
    """What one unit is in units of the PackCost."""

    @classmethod
    def of(cls, lengths: IntArray, cost: PackCost) -> Work:
        """Rounded to the nearest unit, a power of two of the cost's own."""
        order = stable_order(-lengths)
        length = lengths[order]
        costs = cost.of_sequences(length)
        # N * costliest is at least the sum, and needs no sum of floats, which would depend on its order.
        largest = max(float(costs[0]) * costs.size, cost.fixed) if costs.size else max(cost.fixed, cost.linear)
        exponent = _BITS - math.frexp(largest)[1]
        return cls(
            order=order,
            length=length,
            cost=np.maximum(np.rint(np.ldexp(costs, exponent)).astype(np.int64), 1),
            fixed=round(math.ldexp(cost.fixed, exponent)),
            unit=math.ldexp(1.0, -exponent),
        )

    @property
    def total(self) -> int:
        """Cost of all sequences."""
        return int(self.cost.sum())

    def pack_costs(self, pack: IntArray, num_ranks: int, num_microbatches: int) -> IntArray:
        """int64 [num_ranks, num_microbatches], fixed cost included; `pack` [N] is in this order."""
        costs = pack_costs(self.cost, pack, num_ranks * num_microbatches, self.fixed)
        return costs.reshape(num_ranks, num_microbatches)


def pack_costs(cost: IntArray, pack: IntArray, num_packs: int, fixed: int = 0) -> IntArray:
    """The sum of each pack's costs, and `fixed`: int64 [num_packs]. ValueError for a pack that is none of these."""
    if native.LIBRARY is not None and pack.size == cost.size:
        costs = np.empty(num_packs, np.int64)
        pack = np.ascontiguousarray(pack, np.int64)
        if native.LIBRARY.pack_costs(pack.size, _at(cost), _at(pack), num_packs, fixed, _at(costs)):
            return costs
    if pack.size and (pack.min() < 0 or pack.max() >= num_packs):
        raise ValueError(f"packs must be 0 to {num_packs - 1}, but span {pack.min()} to {pack.max()}")
    # Sums of integers below 2^53 are exact in float64 too.
    return np.bincount(pack, weights=cost, minlength=num_packs).astype(np.int64) + fixed


def stable_order(values: IntArray) -> IntArray:
    """The indices that sort `values`, equal ones in order: `np.argsort(values, kind="stable")`, several times faster.

    Compiled, by their digits, in linear time. So does numpy sort 16-bit numbers stably: by the low half first, then by
    the high one. Larger numbers are sorted with their index in the low bits, for which it has vector instructions.
    """
    if native.LIBRARY is not None:
        order = np.empty(values.size, np.int64)
        native.LIBRARY.stable_order(values.size, _at(np.ascontiguousarray(values)), _at(order))
        return order
    smallest = int(values.min(initial=0))
    above = values - smallest
    bits = int(above.max(initial=0)).bit_length()
    if bits <= 16:
        return np.argsort(above.astype(np.uint16), kind="stable")
    if bits <= 32:
        by_low = np.argsort(above.astype(np.uint16), kind="stable")  # the cast takes the low half
        return by_low[np.argsort((above >> 16).astype(np.uint16)[by_low], kind="stable")]
    index_bits = max(values.size - 1, 1).bit_length()
    if bits + index_bits > 62:
        return np.argsort(values, kind="stable")
    return np.sort((above << index_bits) + np.arange(values.size)) & ((1 << index_bits) - 1)


def by_cost_per_token(length: IntArray, cost: IntArray) -> IntArray:
    """The indices that sort sequences by descending cost per token: descending length, but for costs being rounded.

    Float division may swap only what differs by less than a unit in all.
    """
    return np.argsort(-(cost / length), kind="stable")
