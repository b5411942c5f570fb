"""pure. Bytes at a depth that was not traced, from depths that were.

A rank's peak is affine in its layers and in the microbatches that are in flight there, and in their
product: `f(layers, microbatches) = a + b layers + c microbatches + d layers microbatches`. `fitted`
finds the four integers from traced points, and refuses where a further point differs by one byte.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction


class NotAffineError(ValueError):
    """A traced point is not on the surface of the others."""


@dataclass(frozen=True)
class Surface:
    """See the module."""

    constant: Fraction
    per_layer: Fraction
    per_microbatch: Fraction
    per_both: Fraction

    def at(self, layers: int, microbatches: int) -> int:
        """Returns the bytes; NotAffineError for a number that is no integer."""
        value = (
            self.constant
            + self.per_layer * layers
            + (self.per_microbatch + self.per_both * layers) * microbatches
        )
        if value.denominator != 1:
            raise NotAffineError(f"{value} bytes at {layers} layers, {microbatches} microbatches")
        return int(value)


def fitted(points: Mapping[tuple[int, int], int]) -> Surface:
    """Returns the surface through all of `points`, {(layers, microbatches): bytes}.

    At least three depths and a fourth that checks them must be among them; NotAffineError where a
    point differs. With one number of microbatches the surface is a line.

        {(1, 1): 5, (2, 1): 7, (3, 1): 9, (4, 1): 11} -> 3 + 2 layers
    """
    depths = sorted({layers for layers, _ in points})
    counts = sorted({microbatches for _, microbatches in points})
    assert len(depths) >= 4, depths
    low, high = depths[0], depths[1]
    lines = {}
    for count in counts[:2]:
        at_low, at_high = points[low, count], points[high, count]
        slope = Fraction(at_high - at_low, high - low)
        lines[count] = at_low - slope * low, slope
    if len(counts) == 1:
        start, slope = lines[counts[0]]
        surface = Surface(start, slope, Fraction(0), Fraction(0))
    else:
        few, more = counts[:2]
        (start, slope), (next_start, next_slope) = lines[few], lines[more]
        gap = more - few
        per_microbatch = (next_start - start) / gap
        per_both = (next_slope - slope) / gap
        surface = Surface(
            start - per_microbatch * few,
            slope - per_both * few,
            per_microbatch,
            per_both,
        )
    for (layers, microbatches), size in points.items():
        if surface.at(layers, microbatches) != size:
            raise NotAffineError(
                f"{size:,} bytes at {layers} layers and {microbatches} microbatches in flight, but "
                f"{surface.at(layers, microbatches):,} by the others"
            )
    return surface
