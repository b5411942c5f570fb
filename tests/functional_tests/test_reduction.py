"""Numbers of a step over real processes: each slot comes out under its own name."""

import numpy as np
import torch
import torch.distributed as dist

from megatron.packing.device import CPU
from megatron.sft.training.reduction import SlotReduction
from tests.functional_tests.ranks import run_ranks


def reduced() -> dict[str, list[float]]:
    rank = dist.get_rank()
    slots = SlotReduction(
        {
            "tokens": 10.0 * (rank + 1),
            "none": np.zeros(0),
            "table": np.array([[rank, 1], [2, 3]]),
            "loss": torch.tensor([rank / 8, 1.0]),
        },
        {"longest": 7.0 - rank, "negative": -1.0 - rank},
        CPU,
    )
    sums_alone = SlotReduction({"one": 1.0}, {}, CPU).result()
    return {name: values.tolist() for name, values in {**slots.result(), **sums_alone}.items()}


def test_slots_of_sums_and_maxima() -> None:
    """A metric under another's name, or a sum where the largest was meant, is no error anywhere."""
    expected = {
        "tokens": [60.0],
        "none": [],
        "table": [3.0, 3.0, 6.0, 9.0],
        "loss": [3 / 8, 3.0],
        "longest": [7.0],
        "negative": [-1.0],
        "one": [3.0],
    }
    assert run_ranks(reduced, 3) == [expected] * 3
