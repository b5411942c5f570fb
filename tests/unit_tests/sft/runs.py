"""A step's metrics, a source's, and those of a run small enough to check by hand."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

from megatron.sft.report.metrics import Evaluation, SourceMetrics, StepMetrics
from megatron.sft.report.metrics_writer import MetricsWriter

STEP = StepMetrics(
    iteration=7,
    consumed_samples=112,
    loss=2.34567,
    lr=3e-4,
    grad_norm=0.5,
    skipped=False,
    step_seconds=0.5,
    data_seconds=0.0125,
    passes_seconds=0.4,
    predicted_seconds=math.nan,
    sequences=16,
    tokens=6000,
    square_sum=3_000_000,
    num_loss_tokens=4000,
    padded_tokens=6400,
    row_tokens=12800,
    capacity_tokens=8000,
    microbatches=4,
    num_ranks=1,
    num_stages=1,
    step_cost=20.4,
    step_cost_bound=20.0,
    bubble=0.02,
    moved_tokens=750,
    tokens_per_second=12_000.0,
    tflops_per_device=0.0312,
    dropped_samples=0,
    truncated_samples=0,
)

SOURCE = SourceMetrics(sequences=3, tokens=40, num_loss_tokens=30, loss=1.25)


def step(iteration: int, **changes: Any) -> StepMetrics:
    """8 sequences of 250 tokens on 2 ranks x 2 microbatches of 1000 tokens, each padded to 256;
    without packing four times their tokens.
    """
    values: dict[str, Any] = {
        "iteration": iteration,
        "loss": 10.0 - iteration,
        "step_seconds": 2.0,
        "data_seconds": 0.1,
        "passes_seconds": 1.5,
        "sequences": 8,
        "tokens": 2000,
        "padded_tokens": 2048,
        "row_tokens": 8000,
        "capacity_tokens": 4000,
        "num_ranks": 2,
        "step_cost": 10.0,
        "step_cost_bound": 10.0,
        "bubble": 0.0,
        "moved_tokens": 250,
        "tokens_per_second": 1000.0,
        "tflops_per_device": 0.5,
    }
    return replace(STEP, **{**values, **changes})


def write_run(folder: Path) -> None:
    """Four steps of a run."""
    writer = MetricsWriter(folder, train_iters=4, log_interval=100)
    writer.event("run", iteration=0, seq_length=1000, global_batch_size=8)
    writer.evaluation(Evaluation(iteration=0, split="valid", loss=9.5, num_tokens=100))
    writer.step(step(1, tokens_per_second=10.0, dropped_samples=2))
    writer.step(step(2, step_cost=12.0, truncated_samples=1))
    writer.evaluation(Evaluation(iteration=2, split="valid", loss=8.5, num_tokens=100))
    writer.step(step(3, loss=float("nan"), skipped=True))
    writer.step(step(4))
    writer.evaluation(Evaluation(iteration=4, split="valid", loss=6.5, num_tokens=100))
    writer.evaluation(Evaluation(iteration=4, split="test", loss=6.0, num_tokens=100))
    writer.close()
