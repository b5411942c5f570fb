"""What a step is told by, with packing and without."""

import math

import numpy as np
import pytest

from megatron.packing.scheduling.cost import PackCost
from megatron.sft.data.counts import COLUMNS, Counts
from megatron.sft.data.stream import Share
from tests.unit_tests.sft.command_line import parse

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

SHARE = Share(rank=0, num_ranks=2, global_batch_size=16, micro_batch_size=1)


def account_of(arguments=""):
    from megatron.sft.step_account import StepAccount

    cost = PackCost(linear=1e9, quadratic=1e6)
    return StepAccount(parse(arguments, world_size=8), SHARE, cost, ["a", "b"])


@pytest.mark.parametrize(
    ("arguments", "bubble"),
    [
        ("", 0.0),
        ("--pipeline-model-parallel-size 4", 3 / 11),
        ("--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 2", 1 / 17),
    ],
)
def test_padded_steps_have_the_bubble_of_even_microbatches(arguments, bubble):
    """The baseline's pipelines would be said to have none, and packing to be worse than it."""
    stats = account_of(arguments).padded_stats(Counts.none(1))
    assert (stats.bubble, stats.balance, stats.num_padded_tokens) == (bubble, 1.0, 2 * 8 * 128)


def test_a_padded_step_is_told_by_what_was_drawn(monkeypatch):
    """A speed that counts padding, or one rank of several, compares packing with a baseline that does not exist."""
    from megatron.sft import step_account
    from megatron.sft.model.checkpoint import Progress
    from megatron.sft.reduction import Reduced

    monkeypatch.setattr(step_account.dist, "get_world_size", lambda: 4)
    columns = {"sequences": [9, 7], "tokens": [300, 700], "square_sum": [20_000, 80_000], "cut": [0, 1]}
    counts = Counts.none(2)
    for column, numbers in columns.items():
        counts.table[:, COLUMNS.index(column)] = numbers
    counts.table[1, -1] = 3
    reduced = Reduced(1200.0, 600, False, counts, np.array([[400.0, 800.0], [200, 400]]))
    update = step_account.Update(losses=[], data_seconds=0.5, passes_seconds=1.0, lr=0.1, grad_norm=2.0, skipped=False)
    step = account_of().metrics(Progress(3, 48, evaluation_due=False), update, reduced, seconds=2.0)
    assert (step.iteration, step.consumed_samples, step.loss, step.step_seconds) == (3, 48, 2.0, 2.0)
    assert (step.sequences, step.tokens, step.square_sum, step.num_loss_tokens) == (16, 1000, 100_000, 600)
    assert (step.padded_tokens, step.capacity_tokens, step.microbatches) == (2048, 2048, 8)
    assert step.tokens_per_second == 500
    assert step.tflops_per_device == pytest.approx((1000 * 1e9 + 100_000 * 1e6) / (2 * 4 * 1e12))
    assert (step.dropped_samples, step.cut_samples, step.delays, step.waiting) == (3, 1, [], 0)
    assert math.isnan(step.predicted_seconds)
    assert [source.loss for source in step.sources.values()] == [2.0, 2.0]
    assert [sum(reasons.values()) for reasons in step.dropped.values()] == [3]
