"""What a step is told by, with packing and without."""

import math

import numpy as np
import pytest

from megatron.packing.scheduling.cost import PackCost
from megatron.sft.data.counts import COLUMNS, Counts
from megatron.sft.data.stream import Share
from tests.unit_tests.sft.command_line import BASE, parse

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

SHARE = Share(rank=0, num_ranks=2, global_batch_size=16, micro_batch_size=1)


def account_of(arguments="", data="--mock-data"):
    from megatron.sft.training.step_account import StepAccount

    cost = PackCost(linear=1e9, quadratic=1e6)
    return StepAccount(
        parse(arguments, world_size=8, base=f"{BASE} {data}"), SHARE, cost, ["a", "b"]
    )


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
    stats = account_of(arguments).padded_stats(reduced(1.0, 1, Counts.none(1)))
    assert (stats.bubble, stats.balance) == (bubble, 1.0)


def test_a_padded_step_is_told_by_what_was_drawn(monkeypatch, tmp_path):
    """A speed that counts padding, or one rank of several, compares packing with a baseline that
    does not exist.
    """
    from megatron.sft.model.checkpoints.content import Progress
    from megatron.sft.training import step_account
    from megatron.sft.training.step_account import Reduced

    monkeypatch.setattr(step_account.dist, "get_world_size", lambda: 4)
    columns = {
        "sequences": [9, 7],
        "tokens": [300, 700],
        "square_sum": [20_000, 80_000],
        "cut": [0, 1],
    }
    counts = Counts.none(2)
    for column, numbers in columns.items():
        counts.table[:, COLUMNS.index(column)] = numbers
    counts.table[1, -1] = 3
    by_source = np.array([[400.0, 800.0], [200, 400]])
    reduced = Reduced(1200.0, 600, False, counts, by_source, num_padded_tokens=1500)
    update = step_account.Update(
        batch=None, data_seconds=0.5, passes_seconds=1.0, lr=0.1, grad_norm=2.0, skipped=False
    )
    step = account_of().metrics(Progress(3, 48, evaluation_due=False), update, reduced, seconds=2.0)
    assert (step.iteration, step.consumed_samples, step.loss, step.step_seconds) == (
        3,
        48,
        2.0,
        2.0,
    )
    assert (step.sequences, step.tokens, step.square_sum, step.num_loss_tokens) == (
        16,
        1000,
        100_000,
        600,
    )
    assert (step.padded_tokens, step.capacity_tokens, step.microbatches) == (1500, 2048, 8)
    assert step.tokens_per_second == 500
    assert step.tflops_per_device == pytest.approx((1000 * 1e9 + 100_000 * 1e6) / (2 * 4 * 1e12))
    of_pairs = account_of("--sequence-packing --loss dpo", "--data-path pairs.jsonl")
    with_reference = of_pairs.metrics(Progress(3, 48, False), update, reduced, seconds=2.0)
    assert with_reference.tflops_per_device == pytest.approx(step.tflops_per_device * 4 / 3)
    (tmp_path / "cost.json").write_text('{"linear": 1, "quadratic": 0, "fixed": 0, "model": {}}')
    packed = f"--sequence-packing --pack-cost {tmp_path / 'cost.json'}"
    times = []
    for loss in ("dpo", "orpo"):
        account = account_of(f"{packed} --loss {loss}", "--data-path pairs.jsonl")
        metrics = account.metrics(Progress(3, 48, False), update, reduced, seconds=2.0)
        times.append(metrics.predicted_seconds)
    assert times[0] == pytest.approx(times[1] * 4 / 3) != 0
    assert (step.dropped_samples, step.truncated_samples) == (3, 1)
    assert (step.delays, step.waiting) == ([], 0)
    assert math.isnan(step.predicted_seconds)
    assert [source.loss for source in step.sources.values()] == [2.0, 2.0]
    assert [sum(reasons.values()) for reasons in step.dropped.values()] == [3]


def reduced(loss_sum, num_tokens, counts, source_losses=()):
    from megatron.sft.training.step_account import Reduced

    return Reduced(
        loss_sum, num_tokens, False, counts, np.array(source_losses, np.float64).reshape(2, -1)
    )


@pytest.mark.parametrize(
    ("loss_sum", "num_tokens", "expected"), [(6.0, 4, 1.5), (0.0, 4, 0.0), (0.0, 0, 0.0)]
)
def test_loss_is_the_mean_per_token(loss_sum, num_tokens, expected):
    """A batch of prompts only has no token in the loss: NaN would end in every metric after it."""
    assert reduced(loss_sum, num_tokens, Counts.none(1)).loss == expected


def test_by_source():
    """A mean over another source's tokens, or a loss of 0 where there is none, says that a source
    is learned.
    """
    table = np.zeros((4, len(COLUMNS)), np.int64)
    table[:, 0], table[:, 1] = (3, 1, 0, 2), (30, 10, 0, 20)
    table[2, -1] = 5
    result = reduced(9.0, 8, Counts(table), [[6.0, 3.0, 0.0, 0.0], [2, 6, 0, 0]])
    sources = result.by_source("abcd")
    assert list(sources) == ["a", "b", "d"]
    assert (sources["a"].loss, sources["b"].loss, sources["b"].sequences, sources["b"].tokens) == (
        3.0,
        0.5,
        1,
        10,
    )
    assert math.isnan(sources["d"].loss)
    assert result.dropped_by_source("abcd") == {"c": {"bad sample": 5}}


def test_one_source_is_not_told_apart():
    """Its loss is the loss."""
    table = np.ones((1, len(COLUMNS)), np.int64)
    assert reduced(1.0, 1, Counts(table)).by_source(["only"]) == {}
