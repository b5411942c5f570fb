"""pure. Speeds and memory of GPUs, for modelled times; `--pack-cost` replaces the arithmetic by a
measurement.

Peaks and bandwidths are the vendors'. The share of a peak that matrix products reach depends on
their size and is a round figure after public measurements. A whole step of one model was compared
with an H200 (see the README of the planner).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

GIB = 2**30
_WIDTHS = (256, 512, 1024, 2048, 4096, 8192)
_SHARES = (0.20, 0.35, 0.50, 0.62, 0.70, 0.74)
"""Share of the peak that a product reaches whose smallest side is that wide."""
ATTENTION_SHARE = 0.45
"""Share that FlashAttention 2 reaches in long sequences, forward and backward. In chats of some 700
tokens it was 0.13 to 0.15 on an H200.
"""


@dataclass(frozen=True, kw_only=True)
class GPUSpec:
    """Data sheet of a GPU, and of its links to others."""

    name: str
    memory_bytes: int
    flops: float
    """Peak of bfloat16 matrix products, per second."""
    memory_bandwidth: float
    """Bytes per second."""
    node_bandwidth: float
    """Bytes per second to GPUs of the same machine, in each direction."""
    network_bandwidth: float
    """Bytes per second to GPUs of others, in each direction."""
    gpus_per_node: int = 8

    def matmul_flops(self, width: int) -> float:
        """Returns what products reach whose smallest side is `width`."""
        return self.flops * float(np.interp(np.log2(width), np.log2(_WIDTHS), _SHARES))

    def bandwidth(self, span: int, world_size: int) -> float:
        """Returns that of groups of ranks of which each lies within `span` GPUs, next to one
        another, of `world_size`: of 3 some lie on two machines, unless there is one machine.
        """
        within = world_size <= self.gpus_per_node or self.gpus_per_node % span == 0
        return self.node_bandwidth if within else self.network_bandwidth


DEVICES = {
    device.name: device
    for device in (
        GPUSpec(
            name="a100",
            memory_bytes=80 * GIB,
            flops=312e12,
            memory_bandwidth=2.0e12,
            node_bandwidth=300e9,
            network_bandwidth=25e9,
        ),
        GPUSpec(
            name="h100",
            memory_bytes=80 * GIB,
            flops=989e12,
            memory_bandwidth=3.35e12,
            node_bandwidth=450e9,
            network_bandwidth=50e9,
        ),
        GPUSpec(
            name="h200",
            memory_bytes=141 * 10**9,
            flops=989e12,
            memory_bandwidth=4.8e12,
            node_bandwidth=450e9,
            network_bandwidth=50e9,
        ),
        GPUSpec(
            name="b200",
            memory_bytes=180 * 10**9,
            flops=2250e12,
            memory_bandwidth=8.0e12,
            node_bandwidth=900e9,
            network_bandwidth=50e9,
        ),
    )
}
