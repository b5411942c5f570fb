"""pure. What a run achieved, in numbers, from its `metrics.jsonl`.

"Padded baseline" is the same sequences trained without packing, each padded to `seq_length`.
"""

import math
import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import NamedTuple

from megatron.sft.report.metrics import Evaluation, StepMetrics
from megatron.sft.report.metrics_file import METRICS_FILE, read_metrics
from megatron.sft.report.source_metrics import SourceMetrics

STEPS_PER_MEAN = 5


class Change(NamedTuple):
    """A loss at the start and at the end of a run."""

    before: float
    after: float
    first_step: int
    last_step: int


class SourceSummary(NamedTuple):
    """What a source was in a run."""

    num_sequences: int
    num_tokens: int
    before: float
    """Per-token mean loss over the first few steps that it was in."""
    after: float
    """The same over the last few."""


@dataclass(frozen=True, kw_only=True)
class Summary:
    """A run in numbers. Shares are in 0..1; NaN where there is nothing to divide by."""

    run_dir: Path
    num_steps: int
    num_sequences: int
    num_tokens: int
    """Real ones."""
    training_loss: Change
    """Means of the first and the last few steps."""
    held_out_loss: dict[str, Change]
    """Per split, its first and last evaluation."""
    tokens_per_second: float
    """Median step."""
    tflops_per_device: float
    """Median step."""
    data_share: float
    """Share of the time that steps waited for data."""
    padding: float
    """Share of the computed tokens that was padding."""
    baseline_padding: float
    """The same for the padded baseline."""
    padding_removed: float
    """Share of the baseline's padding tokens that this run did not compute."""
    fewer_tokens: float
    """Tokens that the baseline computes for each one computed here."""
    balance_mean: float
    balance_worst: float
    num_ranks: int
    """Data-parallel size of the last step."""
    num_stages: int
    """Pipeline stages of the last step."""
    bubble: float
    """Mean share of the modelled time in which nothing is computed."""
    moved: float
    """Share of the tokens that changed data-parallel ranks."""
    prediction_error: float
    """Mean absolute error of the predicted time of the passes; NaN where nothing was predicted."""
    passes_share: float
    """Share of the steps' time that the passes took."""
    fill: float
    """Share of the packs' capacity that real tokens took."""
    dropped_samples: int
    dropped: dict[str, dict[str, int]]
    """Of each source, how many by which reason."""
    sources: dict[str, SourceSummary]
    """Those of most tokens first; empty where there is one source."""
    cut_samples: int
    skipped_steps: int
    delays: list[int]
    """Sequences trained on 0, 1, 2 ... steps later than drawn; empty where none could wait."""
    waiting: int
    """Sequences drawn that still wait."""
    files: list[Path]


def summarize(run_dir: Path | str) -> Summary:
    """The summary of the run in a folder; ValueError if its metrics are absent or hold no training step."""
    run_dir = Path(run_dir)
    steps, evaluations, events = read_metrics(run_dir)
    runs = [event for event in events if event["event"] in ("run", "resumed")]
    if not steps or not runs:
        missing = "training step" if runs else '"run" event'
        raise ValueError(f"{run_dir / METRICS_FILE} must hold at least one {missing}, but has none; train first")
    tokens = sum(step.tokens for step in steps)
    padded = sum(step.padded_tokens for step in steps)
    sequences = sum(step.sequences for step in steps)
    baseline = sequences * runs[-1]["seq_length"]
    return Summary(
        run_dir=run_dir,
        num_steps=len(steps),
        num_sequences=sequences,
        num_tokens=tokens,
        training_loss=training_change(steps),
        held_out_loss=held_out_changes(evaluations),
        tokens_per_second=statistics.median(step.tokens_per_second for step in steps),
        tflops_per_device=statistics.median(step.tflops_per_device for step in steps),
        data_share=ratio(sum(step.data_seconds for step in steps), sum(step.step_seconds for step in steps)),
        padding=1 - ratio(tokens, padded),
        baseline_padding=1 - ratio(tokens, baseline),
        padding_removed=1 - ratio(padded - tokens, baseline - tokens),
        fewer_tokens=ratio(baseline, padded),
        balance_mean=statistics.fmean(step.balance for step in steps),
        balance_worst=max(step.balance for step in steps),
        num_ranks=steps[-1].num_ranks,
        num_stages=steps[-1].num_stages,
        bubble=statistics.fmean(step.bubble for step in steps),
        moved=ratio(sum(step.moved_tokens for step in steps), tokens),
        prediction_error=mean_of_finite(abs(step.prediction_error) for step in steps),
        passes_share=ratio(sum(step.passes_seconds for step in steps), sum(step.step_seconds for step in steps)),
        fill=ratio(tokens, sum(step.capacity_tokens for step in steps)),
        dropped_samples=sum(step.dropped_samples for step in steps),
        dropped=dropped_by_source(steps),
        sources=source_summaries(steps),
        cut_samples=sum(step.cut_samples for step in steps),
        skipped_steps=sum(step.skipped for step in steps),
        delays=[sum(counts) for counts in zip_longest(*(step.delays for step in steps), fillvalue=0)],
        waiting=steps[-1].waiting,
        files=sorted(run_dir.iterdir()),
    )


def ratio(numerator: float, denominator: float) -> float:
    """NaN rather than an error over zero."""
    return numerator / denominator if denominator else math.nan


def mean_of_finite(values: Iterable[float]) -> float:
    """One overflowed step shall not hide the others."""
    finite = [value for value in values if math.isfinite(value)]
    return statistics.fmean(finite) if finite else math.nan


def training_change(steps: Sequence[StepMetrics]) -> Change:
    """Means over `STEPS_PER_MEAN` steps at each end, over fewer in a run so short that they would overlap."""
    count = max(1, min(STEPS_PER_MEAN, len(steps) // 2))
    before = mean_of_finite(step.loss for step in steps[:count])
    after = mean_of_finite(step.loss for step in steps[-count:])
    return Change(before, after, steps[0].iteration, steps[-1].iteration)


def held_out_changes(evaluations: Sequence[Evaluation]) -> dict[str, Change]:
    """`[valid 5.6 @ 0, valid 3.1 @ 50, valid 2.4 @ 100] -> {"valid": (5.6, 2.4, 0, 100)}`."""
    changes: dict[str, Change] = {}
    for evaluation in evaluations:
        now = Change(evaluation.loss, evaluation.loss, evaluation.iteration, evaluation.iteration)
        first = changes.setdefault(evaluation.split, now)
        changes[evaluation.split] = Change(first.before, now.after, first.first_step, now.last_step)
    return changes


def dropped_by_source(steps: Sequence[StepMetrics]) -> dict[str, dict[str, int]]:
    """`{"chats": {"over length": 2}}`, over all steps."""
    totals: dict[str, Counter[str]] = {}
    for step in steps:
        for name, reasons in step.dropped.items():
            totals.setdefault(name, Counter()).update(reasons)
    return {name: dict(reasons) for name, reasons in totals.items()}


def source_summaries(steps: Sequence[StepMetrics]) -> dict[str, SourceSummary]:
    """Of each source that was drawn from, where there were several."""
    parts: dict[str, list[SourceMetrics]] = {}
    for step in steps:
        for name, source in step.sources.items():
            parts.setdefault(name, []).append(source)
    found = {}
    for name in sorted(parts, key=lambda name: -sum(part.tokens for part in parts[name])):
        with_loss = [part for part in parts[name] if math.isfinite(part.loss)]
        count = max(1, min(STEPS_PER_MEAN, len(with_loss) // 2))
        found[name] = SourceSummary(
            sum(part.sequences for part in parts[name]),
            sum(part.tokens for part in parts[name]),
            mean_of_tokens(with_loss[:count]),
            mean_of_tokens(with_loss[-count:]),
        )
    return found


def mean_of_tokens(parts: Sequence[SourceMetrics]) -> float:
    """A small step counts for little."""
    return ratio(sum(part.loss * part.num_loss_tokens for part in parts), sum(part.num_loss_tokens for part in parts))
