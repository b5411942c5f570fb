"""pure. `megatron-sft report RUN_DIR`: the results of a run, as a table and a picture.

It reads `metrics.jsonl`, and `packs.jsonl` if it exists. A row of the table is a pair in one of the
functions named `..._rows`. "Without packing" stands for the same sequences, each padded to the
longest one of its microbatch (see `packing.step.stats.padded_rows`).
"""

import importlib.util
import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

from megatron.sft.report.metrics import (
    Evaluation,
    SourceMetrics,
    StepMetrics,
    answer_line,
    dropped_line,
    mean_of_finite,
)
from megatron.sft.report.metrics_file import (
    METRICS_FILE,
    PACKS_FILE,
    Metrics,
    is_packs,
    read_jsonl,
    read_metrics,
)

PLOT_FILE = "report.png"
STEPS_PER_MEAN = 5
MAX_SOURCES = 10
MAX_ANSWERS = 8

Rows = list[tuple[str, str]]
"""(name, value) of each row; a row without a name belongs to the one before it."""


def report(run_dir: Path | str, last: int | None = None) -> None:
    """Prints the table, and draws `RUN_DIR/report.png` if matplotlib is installed. Raises
    ValueError for a run without a training step.

    last: last step of the run, whose lines may be missing; None if it is not known.
    """
    run_dir = Path(run_dir)
    metrics = read_metrics(run_dir)
    rows = table(metrics, run_dir, last)
    if importlib.util.find_spec("matplotlib") is None:
        print_rows([*rows, files_row(run_dir)])
        print("no plot: matplotlib is missing; do pip install matplotlib")
        return
    from megatron.sft.report.plot import plot

    lines = read_jsonl(run_dir / PACKS_FILE, is_packs) if (run_dir / PACKS_FILE).is_file() else []
    packs = [line for line in lines if any(any(rank) for rank in line["packs"])]
    line = f"plot: {run_dir / PLOT_FILE}"
    try:
        plot(run_dir / PLOT_FILE, metrics, packs, padding_without_packing(metrics))
    except Exception as error:
        # Numbers too large to draw, or a full disk. The run itself has ended well.
        line = f"no plot: {type(error).__name__}: {' '.join(str(error).split()):.200}"
        if not (run_dir / PLOT_FILE).is_symlink():  # which is refused, and stays
            (run_dir / PLOT_FILE).unlink(missing_ok=True)  # half of it
    print_rows([*rows, files_row(run_dir)])
    print(line)


def table(metrics: Metrics, run_dir: Path, last: int | None = None) -> Rows:
    """Returns the rows of the table, for a run until step `last` (None: that of the last line).
    Raises ValueError if there is no training step.
    """
    steps, evaluations, _ = metrics
    runs = [event for event in metrics.events if event["event"] in ("run", "resumed")]
    if not steps or not runs:
        missing = "training step" if runs else '"run" event'
        raise ValueError(
            f"{run_dir / METRICS_FILE} must hold at least one {missing}, but has none; train "
            "first, on a disk that is not full"
        )
    return [
        *_missing_rows(steps, last),
        *loss_rows(steps, evaluations),
        *source_rows(steps),
        *speed_rows(steps),
        *padding_rows(metrics),
        *schedule_rows(steps),
        *sample_rows(steps),
        *answer_rows(metrics.events),
    ]


def _missing_rows(steps: Sequence[StepMetrics], last: int | None) -> Rows:
    """Returns a row about steps without a line, as a full disk leaves them; none without such."""
    found = {step.iteration for step in steps}
    num_missing = max(last or 0, *found) - min(found) + 1 - len(found)
    if not num_missing:
        return []
    return [("missing", f"the lines of {num_missing:,} steps; all figures are of the others")]


def loss_rows(steps: Sequence[StepMetrics], evaluations: Sequence[Evaluation]) -> Rows:
    """Returns rows about the amount of training, and the losses at its start and end."""
    sequences, tokens = sum(step.sequences for step in steps), sum(step.tokens for step in steps)
    count = steps_of_mean(len(steps))
    before, after = (
        mean_of_finite(step.loss for step in part) for part in (steps[:count], steps[-count:])
    )
    rows = [
        ("trained", f"{len(steps):,} steps, {sequences:,} sequences, {tokens:,} tokens"),
        ("training loss", f"{before:.4f} -> {after:.4f}   (means of the first and the last steps)"),
    ]
    return rows + _evaluation_rows(evaluations)


def _evaluation_rows(evaluations: Sequence[Evaluation]) -> Rows:
    """Returns a row per split with its losses at the first and the last evaluation."""
    rows: Rows = []
    for split in dict.fromkeys(evaluation.split for evaluation in evaluations):
        # The list twice, so that a single evaluation is both the first and the last.
        first, *_, last = [each for each in evaluations if each.split == split] * 2
        if first.iteration == last.iteration or split == "test":
            rows.append((f"{split} loss", f"{last.loss:.4f}   (after step {last.iteration})"))
            continue
        when = f"(after step {first.iteration} and step {last.iteration})"
        rows.append((f"{split} loss", f"{first.loss:.4f} -> {last.loss:.4f}   {when}"))
    return rows


def source_rows(steps: Sequence[StepMetrics]) -> Rows:
    """Returns a row for each of the largest sources; none if there is only one source."""
    parts: dict[str, list[SourceMetrics]] = {}
    for step in steps:
        for name, source in step.sources.items():
            parts.setdefault(name, []).append(source)
    tokens = {name: sum(part.tokens for part in parts[name]) for name in parts}
    all_tokens = sum(step.tokens for step in steps)
    rows = [
        (f"source {name}", _source_line(parts[name], all_tokens))
        for name in sorted(parts, key=lambda name: -tokens[name])[:MAX_SOURCES]
    ]
    left = len(parts) - len(rows)
    return [*rows, ("", f"and {left} sources more")] if left else rows


def _source_line(parts: Sequence[SourceMetrics], all_tokens: int) -> str:
    with_loss = [part for part in parts if math.isfinite(part.loss)]
    count = steps_of_mean(len(with_loss))
    before, after = mean_of_tokens(with_loss[:count]), mean_of_tokens(with_loss[-count:])
    samples, tokens = (
        sum(getattr(part, name) for part in parts) for name in ("sequences", "tokens")
    )
    share = ratio(tokens, all_tokens)
    return f"{samples:,} samples, {tokens:,} tokens ({share:.1%}), loss {before:.4f} -> {after:.4f}"


def answer_rows(events: Sequence[Mapping[str, Any]]) -> Rows:
    """Returns a row for each of the last answers to --sample-prompts."""
    found = [event for event in events if event["event"] == "answers"]
    if not found:
        return []
    last = found[-1]
    lines = [answer_line(pair["prompt"], pair["answer"]) for pair in last["answers"]]
    title = f"answers after step {last['iteration']}"
    rows = [("" if number else title, line) for number, line in enumerate(lines[:MAX_ANSWERS])]
    return [*rows, ("", f"and {len(lines) - len(rows)} more")] if len(lines) > len(rows) else rows


def speed_rows(steps: Sequence[StepMetrics]) -> Rows:
    """Returns rows about the speed of steps."""
    waited = ratio(
        sum(step.data_seconds for step in steps), sum(step.step_seconds for step in steps)
    )
    return [
        (
            "speed",
            f"{statistics.median(step.tokens_per_second for step in steps):,.0f} tokens/s   "
            "(median step)",
        ),
        (
            "",
            f"{statistics.median(step.tflops_per_device for step in steps):.3g} TFLOP/s per device "
            "  (median step)",
        ),
        ("", f"{waited:.1%} of the time waiting for data"),
    ]


def padding_rows(metrics: Metrics) -> Rows:
    """Returns rows about padding, and the padding that packing has removed."""
    tokens, padded = (
        sum(getattr(step, name) for step in metrics.steps) for name in ("tokens", "padded_tokens")
    )
    baseline = tokens_without_packing(metrics)
    removed = "none to remove"
    if baseline != tokens:
        share = 1 - (padded - tokens) / (baseline - tokens)
        removed = f"{share:.1%}, for {ratio(baseline, padded):.2f}x fewer tokens computed"
    without = padding_without_packing(metrics)
    return [
        (
            "padding",
            f"{1 - ratio(tokens, padded):.1%} of the tokens computed, "
            f"{without:.1%} without packing",
        ),
        ("padding removed", removed),
        *prefix_rows(metrics.steps),
    ]


def prefix_rows(steps: Sequence[StepMetrics]) -> Rows:
    """Returns a row about the tokens that shared prefixes have saved; none without trees."""
    computed = sum(step.tokens for step in steps)
    # path_tokens is 0 in a step without trees.
    apart = sum(step.path_tokens or step.tokens for step in steps)
    if apart == computed:
        return []
    times = f"{ratio(apart, computed):.2f}x the tokens"
    return [("shared prefixes", f"computed once; separate sequences would have {times}")]


def tokens_without_packing(metrics: Metrics) -> int:
    """Returns the number of tokens that training without packing would have computed, padding
    included.
    """
    return sum(step.row_tokens or step.padded_tokens for step in metrics.steps)


def padding_without_packing(metrics: Metrics) -> float:
    """Returns the share of padding in the tokens of training without packing."""
    return 1 - ratio(sum(step.tokens for step in metrics.steps), tokens_without_packing(metrics))


def schedule_rows(steps: Sequence[StepMetrics]) -> Rows:
    """Returns rows about the quality of schedules, for the parallel layout of the last step."""
    mean = statistics.fmean(step.balance for step in steps)
    worst = max(step.balance for step in steps)
    tokens = sum(step.tokens for step in steps)
    if steps[-1].num_stages == 1:
        rows = [
            ("balance", f"{mean:.4f} mean, {worst:.4f} worst   (modelled step time / lower bound)")
        ]
    else:
        bubble = statistics.fmean(step.bubble for step in steps)
        even = "modelled step time / least of even packs"
        rows = [
            ("balance", f"{mean:.3f} mean, {worst:.3f} worst   ({even})"),
            ("bubble", f"{bubble:.1%} mean"),
        ]
    if steps[-1].num_ranks > 1:
        moved = ratio(sum(step.moved_tokens for step in steps), tokens)
        rows.append(("moved", f"{moved:.1%} of the tokens, between data-parallel ranks"))
    fill = ratio(tokens, sum(step.capacity_tokens for step in steps))
    return [*rows, ("fill", f"{fill:.1%} of the packs' capacity")]


def sample_rows(steps: Sequence[StepMetrics]) -> Rows:
    """Returns rows about deviations: dropped, truncated and delayed samples, mispredicted times,
    skipped steps.
    """
    reasons: dict[str, Counter[str]] = {}
    for step in steps:
        for name, numbers in step.dropped.items():
            reasons.setdefault(name, Counter()).update(numbers)
    dropped = sum(step.dropped_samples for step in steps)
    truncated = sum(step.truncated_samples for step in steps)
    rows = [
        (
            "samples",
            f"{dropped:,} dropped{f' ({dropped_line(reasons)})' if reasons else ''}, "
            f"{truncated:,} truncated",
        )
    ]
    skipped = sum(step.skipped for step in steps)
    rows += [*_prediction_rows(steps), *_delay_rows(steps)]
    return (
        [*rows, ("optimizer", f"{skipped:,} steps skipped, as gradients overflowed")]
        if skipped
        else rows
    )


def _prediction_rows(steps: Sequence[StepMetrics]) -> Rows:
    """Returns a row about the error of predicted times; none without --pack-cost."""
    rows: Rows = []
    error = mean_of_finite(abs(step.prediction_error) for step in steps)
    if math.isfinite(error):
        share = ratio(
            sum(step.passes_seconds for step in steps), sum(step.step_seconds for step in steps)
        )
        line = f"{error:.1%} mean absolute error of the passes, which were {share:.0%} of the time"
        rows.append(("prediction", line))
    return rows


def _delay_rows(steps: Sequence[StepMetrics]) -> Rows:
    """Returns a row about delays of sequences; none without --outlier-delay-steps."""
    rows: Rows = []
    delays = [sum(counts) for counts in zip_longest(*(step.delays for step in steps), fillvalue=0)]
    if delays:
        histogram = ", ".join(
            f"{waited}: {count:,}" for waited, count in enumerate(delays) if count
        )
        rows.append(
            ("delay", f"sequences by steps delayed: {histogram}; {steps[-1].waiting:,} still wait")
        )
    return rows


def files_row(run_dir: Path) -> tuple[str, str]:
    """Returns a row with the files in the folder of the run."""
    names = ", ".join(
        f"{path.name}/" if path.is_dir() else path.name for path in sorted(run_dir.glob("[!.]*"))
    )
    return "files", f"{run_dir}: {names}"


def steps_of_mean(num_steps: int) -> int:
    """Returns the number of steps in the means at the start and the end of a run: 5, or fewer if
    the two would overlap.
    """
    return max(1, min(STEPS_PER_MEAN, num_steps // 2))


def ratio(numerator: float, denominator: float) -> float:
    """Returns the ratio; NaN if the denominator is zero."""
    return numerator / denominator if denominator else math.nan


def mean_of_tokens(parts: Sequence[SourceMetrics]) -> float:
    """Returns the mean loss per token. Each step counts by its number of tokens."""
    return ratio(
        sum(part.loss * part.num_loss_tokens for part in parts),
        sum(part.num_loss_tokens for part in parts),
    )


def print_rows(rows: Rows) -> None:
    """Prints the table on stdout."""
    width = max(len(name) for name, _ in rows)
    rule = "-" * max(len(value) + width + 3 for _, value in rows)
    print(rule)
    for name, value in rows:
        print(f"{name:<{width}}   {value}")
    print(rule)
