"""pure. Weights of blends whose children have an end: what is left of them is blended on where one
runs out.
"""

import math
from collections.abc import Iterable, Sequence
from fractions import Fraction

import numpy as np
import numpy.typing as npt

from megatron.blending.order.weights import MAX_PERIOD, Weight, exact_weight, integer_weights

Segments = Sequence[tuple[int | Fraction, Sequence[Weight]]]
"""(first output, weights) of each stretch of constant weights, the first at 0."""

_PERIOD = 2**16
"""Denominator of weights that are rounded."""
_MAX_EXACT = 16
"""Children whose segments may end between two outputs: denominators grow with each segment."""
_ENDLESS = 2**62
_PRECISION = 40
"""Bits of a weight before it is rounded to a segment's period."""


def until_exhausted(weights: Sequence[Weight], sizes: Sequence[int | None]) -> Segments:
    """Returns segments that read each child once, in proportion to weights for as long as it lasts;
    None: endless.

    A segment ends, maybe between two outputs, where a child runs out. Too long periods are rounded
    to 2**16, and what that leaves over is blended last. Weights in proportion to the sizes make all
    children last to the end.
    """
    exact = [exact_weight(weight, number) for number, weight in enumerate(weights)]
    left = {
        child: Fraction(size)
        for child, size in enumerate(sizes)
        if exact[child] and size is not None
    }
    endless = [int(weight > 0 and size is None) for weight, size in zip(exact, sizes)]
    is_by_size = (
        not any(endless) and len({exact[child] / size for child, size in left.items() if size}) == 1
    )
    # Exact fractions multiply their denominators with each segment, so many children take 64-bit
    # integers instead. Equal shares of the sizes are one segment and stay exact.
    if len(exact) > _MAX_EXACT and not (is_by_size and _period(left.values()) <= MAX_PERIOD):
        return _rounded_segments(exact, sizes, is_by_size)
    segments: list[tuple[Fraction, Sequence[Weight]]] = []
    start = Fraction(0)
    while any(left.values()):
        wanted = [
            left.get(c, 0) if is_by_size else weight * bool(left.get(c, 1))
            for c, weight in enumerate(exact)
        ]
        whole = integer_weights(wanted)
        if sum(whole) == MAX_PERIOD:
            whole = integer_weights(wanted, _PERIOD)
        segments.append((start, whole))
        # Outputs until the first child runs out: sizes 3 and 8 with weights 1 and 2 give min(3 *
        # 3/1, 8 * 3/2) = 9, of which 3 and 6.
        length = min(size * sum(whole) / whole[child] for child, size in left.items() if size)
        left = {child: size - length * whole[child] / sum(whole) for child, size in left.items()}
        start += length
    return [*segments, (start, endless)] if any(endless) else segments


def _period(sizes: Iterable[Fraction]) -> int:
    whole = [int(size) for size in sizes]
    return sum(whole) // max(math.gcd(*whole), 1)


def _rounded_segments(
    exact: Sequence[Fraction], sizes: Sequence[int | None], is_by_size: bool
) -> Segments:
    """Returns segments of whole outputs, whose weights sum to 2**16 each: all is arithmetic of
    64-bit integers.

    Where a child has less left than its share of one output, that output is a segment in which it
    gives all that it has: [5/8 left of weight 3/4 per output] -> one output with weight 5/8.
    """
    total = sum(exact)
    weights = np.array(
        [weight and max(int(weight * 2**_PRECISION / total), 1) for weight in exact], np.int64
    )
    is_finite = np.array([size is not None for size in sizes])
    left = np.array([_ENDLESS if size is None else size * _PERIOD for size in sizes], np.int64)
    left[weights == 0] = 0
    segments: list[tuple[int, Sequence[Weight]]] = []
    start = 0
    while (remaining := left[is_finite]).any():
        wanted = left if is_by_size else weights * (left > 0)
        whole = _rounded(wanted)
        given = whole > 0
        length = int((left[given] // whole[given]).min())
        # Some child has less than its share of one output left.
        if length == 0:
            whole, length = _within(whole, left), 1
        segments.append((start, tuple(whole.tolist())))
        left = np.where(is_finite, left - whole * length, left)
        start += length
        assert (left >= 0).all(), remaining
    endless = tuple(int(weight > 0 and size is None) for weight, size in zip(exact, sizes))
    return [*segments, (start, endless)] if any(endless) else segments


def _rounded(wanted: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Returns whole numbers that sum to 2**16, by largest remainder; none but a 0 becomes 0."""
    shift = max(int(wanted.sum()).bit_length() - 46, 0)  # 64 bits hold the products
    scaled = np.where(wanted > 0, np.maximum(wanted >> shift, 1), 0)
    whole, remainder = np.divmod(scaled * _PERIOD, scaled.sum())
    raised = (whole == 0) & (wanted > 0)
    whole[raised], remainder[raised] = 1, 0
    missing = _PERIOD - int(whole.sum())
    if missing > 0:
        whole[np.argsort(-remainder, kind="stable")[:missing]] += 1
    else:
        whole[whole.argmax()] += missing  # those that were raised are paid for by the largest
    return whole


def _within(whole: npt.NDArray[np.int64], left: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Returns weights of one output, none above what its child has left; the largest are raised.

    With a period of 4: weights 3 1, of which 1 and 9 are left -> 1 3.
    """
    whole = np.minimum(whole, left)
    order = np.argsort(-whole, kind="stable")
    room = (left - whole)[order]
    rest = _PERIOD - int(whole.sum())
    before = np.minimum(np.cumsum(np.minimum(room, rest)), rest)
    whole[order] += np.diff(before, prepend=0)
    return whole
