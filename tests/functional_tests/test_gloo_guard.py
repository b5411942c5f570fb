"""Every test of ranks runs with collectives that refuse what gloo answers wrongly in silence."""

from __future__ import annotations

import math

import torch
import torch.distributed as dist

from tests.functional_tests.gloo_guard import LEFT_OVER
from tests.functional_tests.ranks import run_ranks


def _refusals() -> list[str]:
    row = torch.arange(8.0)
    nan = torch.tensor([math.nan, 1.0])
    messages = []
    for call in (
        lambda: dist.all_reduce(row[::2]),
        lambda: dist.broadcast(row.view(2, 4).t(), 0),
        lambda: dist.all_gather([row[::2], row[1::2]], torch.zeros(4)),
        lambda: dist.all_reduce(nan, dist.ReduceOp.MAX),
        lambda: dist.all_reduce(nan, op=dist.ReduceOp.MIN),
    ):
        try:
            call()
            messages.append("taken")
        except AssertionError as error:
            messages.append(str(error).split(" of a ")[1].split(" ")[0])
    dist.all_reduce(nan)
    sums, counts = torch.ones(2), torch.ones(2, dtype=torch.int64)
    dist.reduce(sums, 0)
    dist.reduce(counts, dst=0)
    return [*messages, str(sums.tolist()), str(counts.tolist())]


def test_collectives_refuse_what_gloo_answers_wrongly() -> None:
    """Without it a view with gaps would be reduced with its neighbors in memory, half of the NaNs
    be lost, and a rank could read the half sum that `reduce` leaves to it.
    """
    chosen, other = run_ranks(_refusals, 2)
    refused = ["tensor", "tensor", "tensor", "NaN", "NaN"]
    assert chosen == [*refused, "[2.0, 2.0]", "[2, 2]"]
    assert other == [*refused, "[nan, nan]", f"[{LEFT_OVER}, {LEFT_OVER}]"]
