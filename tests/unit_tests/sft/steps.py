"""A training step's metrics, and a source's."""

import math

from megatron.sft.report.metrics import StepMetrics
from megatron.sft.report.source_metrics import SourceMetrics

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
    cut_samples=0,
)

SOURCE = SourceMetrics(sequences=3, tokens=40, num_loss_tokens=30, loss=1.25)
