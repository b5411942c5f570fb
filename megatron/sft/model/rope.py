"""tensor. Frequencies of rotary embeddings under each kind of --rope-scaling, rounded as
transformers rounds them.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from megatron.sft.options.rope_scaling import RopeScaling


def plain_frequencies(dim: int, base: float) -> Tensor:
    """Radians per position of each pair of a head's `dim` channels, for the contexts that the base
    was made for; float32 [dim / 2].
    """
    return 1.0 / base ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)


def inverse_frequencies(dim: int, base: float, scaling: RopeScaling, seq_length: int = 0) -> Tensor:
    """Radians per position of each pair of a head's `dim` channels; float32 [dim / 2].

    seq_length: the longest sequence of the run, by which longrope takes one of its two lists.
    """
    if scaling.rope_type == "proportional":
        num_rotated = int(scaling.partial_rotary_factor * dim // 2)
        rotated = 1.0 / base ** (torch.arange(0, 2 * num_rotated, 2, dtype=torch.float32) / dim)
        return torch.nn.functional.pad(rotated, (0, dim // 2 - num_rotated)) / scaling.factor
    wavelengths = base ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)
    if scaling.rope_type == "linear":
        return 1.0 / wavelengths / scaling.factor
    if scaling.rope_type == "llama3":
        return _llama3(1.0 / wavelengths, scaling)
    if scaling.rope_type == "longrope":
        factors = scaling.long_factor if scaling.is_long(seq_length) else scaling.short_factor
        return 1.0 / (torch.tensor(factors, dtype=torch.float32) * wavelengths)
    if scaling.rope_type == "dynamic":  # up to the original length, beyond which it is refused
        return 1.0 / wavelengths
    return _yarn(wavelengths, dim, base, scaling)


def _llama3(plain: Tensor, scaling: RopeScaling) -> Tensor:
    """Frequencies with a wavelength beyond the original context are divided by the factor, short
    ones stay.
    """
    low = scaling.low_freq_factor
    high = scaling.high_freq_factor
    original = scaling.original_max_position_embeddings
    wavelength = 2 * math.pi / plain
    share = (original / wavelength - low) / (high - low)
    between = (1 - share) * plain / scaling.factor + share * plain
    slow, fast = wavelength > original / low, wavelength < original / high
    return torch.where(slow, plain / scaling.factor, torch.where(fast, plain, between))


def _yarn(wavelengths: Tensor, dim: int, base: float, scaling: RopeScaling) -> Tensor:
    """A ramp over the channels leads from frequencies that stay to ones divided by the factor."""

    def channel(rotations: float) -> float:
        """Returns the channel that turns so many times in the original context."""
        context = scaling.original_max_position_embeddings
        return dim * math.log(context / (rotations * 2 * math.pi)) / (2 * math.log(base))

    first, last = channel(scaling.beta_fast), channel(scaling.beta_slow)
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, dim - 1)
    width = last - first or 0.001
    ramp = ((torch.arange(dim // 2, dtype=torch.float32) - first) / width).clamp(0, 1)
    kept = 1 - ramp
    return 1.0 / (scaling.factor * wavelengths) * (1 - kept) + 1.0 / wavelengths * kept
