"""pure. Distributions of sequence lengths, in tokens.

A distribution is its quantile function: it maps uniform numbers in [0, 1) to lengths.

    UniformLengths(3, 6).quantile(np.array([0.0, 0.5, 0.99]))    ->    3 5 6

Invariants: every length lies between the given ends. Distributions are truncated there, not
clipped, so that no length at an end is more frequent than its neighbours.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]

_BELOW_ONE = 1 - 2.0**-53
"""Largest float64 below 1."""


class LengthDistribution(Protocol):
    """Lengths of samples, in tokens."""

    @property
    def longest(self) -> int:
        """Largest length that can be drawn."""
        ...

    def quantile(self, uniform: FloatArray) -> IntArray:
        """Returns the length, int64, for each uniform number in [0, 1), float64."""
        ...


@dataclass(frozen=True)
class LognormalLengths:
    """Lognormal density at the integers from `shortest` to `longest`, shifted so that the mean
    length is `mean`.

    `sigma` is the standard deviation of the logarithm before truncation. The first use takes
    O(longest - shortest) time and memory.
    """

    shortest: int
    longest: int
    mean: float
    sigma: float

    def quantile(self, uniform: FloatArray) -> IntArray:
        return self.shortest + np.searchsorted(self._cumulative, uniform, side="right")

    @cached_property
    def _cumulative(self) -> FloatArray:
        """Entry i is the probability of a length of at most shortest + i; the last is 1.

        Shifting a lognormal density multiplies it by a power of the length, up to a constant. The
        mean grows with that power, from `shortest` to `longest`, so that bisection finds the power
        for `mean`.
        """
        tokens = np.arange(self.shortest, self.longest + 1, dtype=np.float64)
        log_tokens = np.log(tokens / math.sqrt(self.shortest * self.longest))
        log_density = -(log_tokens**2) / (2 * self.sigma**2) - log_tokens

        def probabilities(power: float) -> FloatArray:
            log_weights = log_density + power * log_tokens
            weights = np.exp(log_weights - log_weights.max())
            return weights / weights.sum()

        low, high = -1.0, 1.0  # doubled until `mean` lies between the means of both powers
        while probabilities(low) @ tokens > self.mean:
            low *= 2
        while probabilities(high) @ tokens < self.mean:
            high *= 2
        found = probabilities(0.0)
        while abs(found @ tokens / self.mean - 1) > 1e-6:
            power = (low + high) / 2
            found = probabilities(power)
            low, high = (low, power) if found @ tokens > self.mean else (power, high)
        cumulative = np.cumsum(found)
        return cumulative / cumulative[-1]


@dataclass(frozen=True)
class UniformLengths:
    """Every length from `shortest` to `longest` is equally likely."""

    shortest: int
    longest: int

    def quantile(self, uniform: FloatArray) -> IntArray:
        return self.shortest + (uniform * (self.longest - self.shortest + 1)).astype(np.int64)


@dataclass(frozen=True)
class EmpiricalLengths:
    """Lengths by a table of quantiles, interpolated linearly. `shares` and `tokens` are strictly
    ascending.
    """

    shares: FloatArray
    tokens: FloatArray

    @property
    def longest(self) -> int:
        return int(self.tokens[-1])

    def quantile(self, uniform: FloatArray) -> IntArray:
        return np.rint(np.interp(uniform, self.shares, self.tokens)).astype(np.int64)


@dataclass(frozen=True)
class MixtureLengths:
    """A mixture: a length is drawn from `first` with probability `first_share`, else from
    `second`.
    """

    first: LengthDistribution
    second: LengthDistribution
    first_share: float

    @property
    def longest(self) -> int:
        return max(self.first.longest, self.second.longest)

    def quantile(self, uniform: FloatArray) -> IntArray:
        is_first = uniform < self.first_share
        within_first = uniform[is_first] / self.first_share
        within_second = (uniform[~is_first] - self.first_share) / (1 - self.first_share)
        lengths = np.empty(uniform.shape, np.int64)
        # A quotient just below 1 may round to 1.0.
        lengths[is_first] = self.first.quantile(np.minimum(within_first, _BELOW_ONE))
        lengths[~is_first] = self.second.quantile(np.minimum(within_second, _BELOW_ONE))
        return lengths
