"""pure. Widths that Megatron derives where none is given."""

from __future__ import annotations


def ffn_hidden_size(hidden_size: int, swiglu: bool) -> int:
    """Of the MLP: 4 times the hidden size; with SwiGLU two thirds of that, down to a multiple of 64."""
    return int(4 * hidden_size * 2 / 3) // 64 * 64 or 64 if swiglu else 4 * hidden_size
