"""Optimizers that are described: bytes on the device and on the host, weight by weight."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron.sft.fit.counter import ByteCounter
from megatron.sft.fit.fake.optimizers import FusedAdam, HybridDeviceOptimizer

SIZE = 1000


def bytes_of(
    optimizer: type[Any], dtype: torch.dtype, num_weights: int = 2, **options: Any
) -> tuple[int, int, int]:
    """Returns the bytes that a step leaves on the device, has at most, and has on the host."""
    weights = [torch.nn.Parameter(torch.zeros(SIZE, dtype=dtype)) for _ in range(num_weights)]
    counter = ByteCounter()
    with counter, counter.phase("step"):
        made = optimizer([{"params": weights}], **options)
        made.step()
        made.step()  # makes no state again
    (phase,) = counter.phases
    return phase.end, phase.peak, phase.host_peak


@pytest.mark.parametrize(
    ("dtype", "options", "per_weight", "meanwhile"),
    [
        # Two moments, and the lower half of a float32 weight.
        (torch.bfloat16, {"store_param_remainders": True}, 4 + 4 + 2, 0),
        (torch.bfloat16, {}, 4 + 4 + 4, 0),
        (torch.float32, {}, 4 + 4, 0),
        (
            torch.bfloat16,
            {"exp_avg_dtype": torch.bfloat16, "exp_avg_sq_dtype": torch.bfloat16},
            2 + 2 + 4,
            0,
        ),
        # What is scaled is widened for the step.
        (
            torch.bfloat16,
            {"exp_avg_dtype": torch.uint8, "master_weight_dtype": torch.float16},
            1 + 4 + 2,
            4 + 4,
        ),
    ],
)
def test_fused_adam_has_states_in_their_types(
    dtype: torch.dtype, options: dict[str, Any], per_weight: int, meanwhile: int
) -> None:
    """States in float32 that are none would send away a run that fits."""
    end, peak, on_host = bytes_of(FusedAdam, dtype, **options)
    assert (end, on_host) == (2 * SIZE * per_weight, 0)
    assert peak == end + 2 * SIZE * meanwhile


@pytest.mark.parametrize(
    ("fraction", "num_offloaded"), [(1.0, 4), (0.5, 2), (0.3, 2), (0.25, 1), (0.0, 0)]
)
def test_a_share_of_the_state_is_on_the_host(fraction: float, num_offloaded: int) -> None:
    """Whole weights, until the share is reached. On the host they have a gradient, too; on the
    device that is widened in each step.
    """
    end, peak, on_host = bytes_of(
        HybridDeviceOptimizer, torch.bfloat16, 4, offload_fraction=fraction
    )
    assert on_host == num_offloaded * SIZE * (4 + 4 + 4 + 4)
    assert end == (4 - num_offloaded) * SIZE * (4 + 4 + 4)
    assert peak == end + (4 - num_offloaded) * SIZE * 4
