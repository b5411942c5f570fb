"""pure. What a training step measured, and the files and lines that it is written to.

A run's folder holds `metrics.jsonl`, one JSON object per line, told apart by "kind":

    {"kind": "event", "event": "run", "iteration": 0, "seq_length": 1024, ...}
    {"kind": "train", "iteration": 1, "loss": 5.61, ...}
    {"kind": "evaluation", "iteration": 1, "split": "valid", "loss": 5.2, "num_tokens": 8192}

Lines stand in the order of their steps, and each is written when its call returns. A run that was killed and resumed
leaves the same steps as one that was never stopped. NaN and infinity are null, so that every line is valid JSON.
"""

import json
import math
import os
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from megatron.sft.source_metrics import SourceMetrics, dropped_line, sources_line, sources_of_record

METRICS_FILE = "metrics.jsonl"
TENSORBOARD_SCALARS = (
    *("loss", "lr", "grad_norm", "tokens_per_second", "tflops_per_device"),
    *("microbatches", "fill", "padding", "balance", "bubble", "moved", "data_seconds", "step_seconds"),
)


T = TypeVar("T", "StepMetrics", "Evaluation")


@dataclass(frozen=True, kw_only=True)
class StepMetrics:
    """One training step, summed over all ranks. Counts are exact integers."""

    iteration: int
    """Steps done, this one included."""
    consumed_samples: int
    """Samples taken from the data since the run's first step, those that wait for a later one among them; the learning
    rate's schedule goes by it.
    """
    loss: float
    """Per-token mean over the global batch."""
    lr: float
    grad_norm: float
    """Before clipping."""
    skipped: bool
    """The optimizer left this step out, as the gradients overflowed."""
    step_seconds: float
    """Wall time of the whole step, `data_seconds` included."""
    data_seconds: float
    """Time that the step waited for its data."""
    passes_seconds: float
    """Of the forward and backward passes, with the reduction of gradients; without `data_seconds` and optimizer."""
    predicted_seconds: float
    """The same as the fitted cost of --pack-cost predicts it; NaN without one."""
    sequences: int
    """Sequences trained on."""
    tokens: int
    """Real tokens: sum of the sequences' lengths."""
    square_sum: int
    """Sum of the squared lengths, which attention's cost follows."""
    num_loss_tokens: int
    """Tokens that the loss is taken on."""
    padded_tokens: int
    """Tokens computed: real ones and padding."""
    capacity_tokens: int
    """Tokens that the packs had room for: microbatches * capacity * data-parallel size."""
    microbatches: int
    """Microbatches of each data-parallel rank."""
    num_ranks: int
    """Data-parallel size."""
    num_stages: int
    """Pipeline-parallel size."""
    step_cost: float
    """Modelled time of the step: in seconds with a fitted cost, else in FLOPs."""
    step_cost_bound: float
    """The least that any schedule takes; in pipelines, the least that packs of even size take."""
    bubble: float
    """Share of the modelled time, over all ranks and stages, in which nothing is computed."""
    moved_tokens: int
    """Of sequences that another data-parallel rank computes than the one that drew them; padding included."""
    tokens_per_second: float
    """Real tokens of all devices together."""
    tflops_per_device: float
    dropped_samples: int
    """Samples of this step that were left out: too long, broken, or without a token that counts."""
    cut_samples: int
    """Samples of this step that were cut."""
    delays: list[int] = field(default_factory=list)
    """Sequences of this step that have waited 0, 1, 2 ... steps for others of their kind; empty where none may wait."""
    waiting: int = 0
    """Sequences drawn that wait for a later step."""
    dropped: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    """Of each source that had some: reason -> samples that were left out."""
    sources: Mapping[str, SourceMetrics] = field(default_factory=dict)
    """Of each source that was drawn from; empty where there is one."""

    @property
    def fill(self) -> float:
        """Share of the packs' room that real tokens take."""
        return self.tokens / self.capacity_tokens

    @property
    def padding(self) -> float:
        """Share of the computed tokens that is padding."""
        return 1 - self.tokens / self.padded_tokens

    @property
    def balance(self) -> float:
        """Modelled time over its bound: 1 cannot be beaten, but in pipelines by packs of uneven size."""
        return self.step_cost / self.step_cost_bound if self.step_cost_bound else 1.0

    @property
    def moved(self) -> float:
        """Share of the tokens that change data-parallel ranks."""
        return self.moved_tokens / self.tokens if self.tokens else 0.0

    @property
    def prediction_error(self) -> float:
        """Predicted over measured time of the passes, less 1; NaN without a prediction."""
        return self.predicted_seconds / self.passes_seconds - 1 if self.passes_seconds else math.nan

    def to_line(self, train_iters: int) -> str:
        """The step as one line of a log."""
        parts = [
            f"step {self.iteration:>{len(str(train_iters))}}/{train_iters}",
            f"loss {self.loss:.4f}",
            f"lr {self.lr:.2e}",
            f"grad norm {self.grad_norm:.3f}",
            f"{self.tokens_per_second:,.0f} tokens/s",
            f"{self.tflops_per_device:.3g} TFLOP/s per device",
            f"{self.microbatches} microbatches",
            f"fill {self.fill:.1%}",
            f"padding {self.padding:.1%}",
            *self._schedule_parts(),
            f"data {self.data_seconds * 1000:.1f} ms",
        ]
        if math.isfinite(self.predicted_seconds):
            parts.append(
                f"passes {self.passes_seconds * 1000:.1f} ms, predicted {self.predicted_seconds * 1000:.1f} ms "
                f"({self.prediction_error:+.1%})"
            )
        if self.sources:
            parts.append(sources_line(self.sources))
        if self.dropped_samples:
            parts.append(
                f"{self.dropped_samples} dropped" + (f": {dropped_line(self.dropped)}" if self.dropped else "")
            )
        if self.cut_samples:
            parts.append(f"{self.cut_samples} cut")
        if self.delays:
            parts.append(f"{sum(self.delays[1:])} delayed, {self.waiting} waiting")
        if self.skipped:
            parts.append("optimizer step skipped")
        return " | ".join(parts)

    def _schedule_parts(self) -> list[str]:
        if self.num_stages == 1:
            parts = [f"balance {self.balance:.4f} of the bound"]
        else:
            parts = [f"balance {self.balance:.3f} of even packs", f"bubble {self.bubble:.1%}"]
        return parts if self.num_ranks == 1 else [*parts, f"moved {self.moved:.0%}"]

    def to_postfix(self) -> str:
        """What stands behind a progress bar."""
        return f"loss {self.loss:.4f}, {self.tokens_per_second:,.0f} tokens/s, fill {self.fill:.0%}"

    def to_json(self) -> str:
        """The step as its line of `metrics.jsonl`."""
        values = asdict(self)
        if not self.delays:
            del values["delays"], values["waiting"]
        names = ("fill", "padding", "balance", "moved", "prediction_error")
        return json_line("train", **values, **{name: getattr(self, name) for name in names})


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """A loss over held-out data."""

    iteration: int
    """Training steps done before it."""
    split: str
    loss: float
    """Per-token mean over all of the evaluation's batches."""
    num_tokens: int
    """Tokens that the loss is taken on."""
    dropped_samples: int = 0
    cut_samples: int = 0
    dropped: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    """As in a step."""
    sources: Mapping[str, SourceMetrics] = field(default_factory=dict)
    """As in a step."""

    def to_line(self) -> str:
        """The evaluation as one line of a log."""
        left_out = f", {self.dropped_samples} dropped" * bool(self.dropped_samples)
        left_out += f", {self.cut_samples} cut" * bool(self.cut_samples)
        line = f"{self.split} loss {self.loss:.4f} after step {self.iteration} ({self.num_tokens:,} tokens{left_out})"
        return f"{line} | {sources_line(self.sources)}" if self.sources else line

    def to_json(self) -> str:
        """The evaluation as its line of `metrics.jsonl`."""
        return json_line("evaluation", **asdict(self))


def json_line(kind: str, **values: Any) -> str:
    """One line of `metrics.jsonl`; a number that JSON doesn't have becomes null."""

    def valid(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: valid(part) for name, part in value.items()}
        return None if isinstance(value, float) and not math.isfinite(value) else value

    return json.dumps({"kind": kind, **{name: valid(value) for name, value in values.items()}}, allow_nan=False)


def truncate_after(path: Path, iteration: int) -> None:
    """Cuts a file of JSON lines behind its lines of steps up to `iteration`; a file that isn't there is left so.

    Lines without "iteration" stay with the step that follows them. What a killed run left half-written goes too. The
    cut is one system call, so it happens whole or not at all.
    """
    if not path.exists():
        return
    keep = end = 0
    with path.open("rb") as file:
        for line in file:
            if not line.endswith(b"\n"):
                break
            end += len(line)
            line_iteration = json.loads(line).get("iteration")
            if line_iteration is None:
                continue
            if line_iteration > iteration:
                break
            keep = end
    os.truncate(path, keep)


def open_tensorboard(tensorboard_dir: Path | str, first_step: int) -> Any:
    """A SummaryWriter that hides what the folder has of `first_step` and later ones, left by a run that was killed."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise ValueError("--tensorboard-dir needs the package tensorboard; do pip install tensorboard") from error
    return SummaryWriter(str(tensorboard_dir), purge_step=first_step)


class MetricsWriter:
    """Writes a run's metrics to its file and to TensorBoard, and shows a progress bar on a terminal or else log lines.

    Made by one process of the run. Price: one small write per call, no host sync.
    """

    def __init__(
        self,
        run_dir: Path | str,
        *,
        train_iters: int,
        log_interval: int,
        resume_iteration: int | None = None,
        tensorboard_dir: Path | str | None = None,
    ) -> None:
        """Opens the files.

        A run that resumes after `resume_iteration` steps drops the lines of later steps; without it the run is a new
        one and its file starts empty. Where there is no terminal, every `log_interval`-th step gets a line on stdout.
        """
        path = Path(run_dir) / METRICS_FILE
        path.parent.mkdir(parents=True, exist_ok=True)
        truncate_after(path, -1 if resume_iteration is None else resume_iteration)
        self._file = path.open("a", encoding="utf-8", buffering=1)  # line-buffered: a killed run keeps its lines
        self._tensorboard = (
            None
            if tensorboard_dir is None
            else open_tensorboard(tensorboard_dir, first_step=(resume_iteration or 0) + 1)
        )
        self._train_iters = train_iters
        self._log_interval = log_interval
        self._bar = progress_bar(train_iters, resume_iteration or 0) if sys.stderr.isatty() else None

    def step(self, metrics: StepMetrics) -> None:
        """Writes and shows one training step."""
        self._file.write(metrics.to_json() + "\n")
        if self._tensorboard is not None:
            for name in TENSORBOARD_SCALARS:
                self._tensorboard.add_scalar(f"train/{name}", getattr(metrics, name), metrics.iteration)
            for name, source in metrics.sources.items():
                self._tensorboard.add_scalar(f"train/loss of {name}", source.loss, metrics.iteration)
        if self._bar is not None:
            self._bar.set_postfix_str(metrics.to_postfix(), refresh=False)
            self._bar.update(metrics.iteration - self._bar.n)
        elif metrics.iteration % self._log_interval == 0:
            print(metrics.to_line(self._train_iters), flush=True)

    def evaluation(self, evaluation: Evaluation) -> None:
        """Writes and shows the loss over held-out data."""
        self._file.write(evaluation.to_json() + "\n")
        if self._tensorboard is not None:
            self._tensorboard.add_scalar(f"{evaluation.split}/loss", evaluation.loss, evaluation.iteration)
        if self._bar is not None:
            self._bar.write(evaluation.to_line())
        else:
            print(evaluation.to_line(), flush=True)

    def event(self, name: str, **fields: Any) -> None:
        """Writes something that happened, `event("run", iteration=0, seq_length=1024, global_batch_size=16)`.

        With an `iteration` the line lasts or falls with that step when the run is resumed.
        """
        self._file.write(json_line("event", event=name, **fields) + "\n")

    def close(self) -> None:
        """Closes the files and the progress bar."""
        self._file.close()
        if self._tensorboard is not None:
            self._tensorboard.close()
        if self._bar is not None:
            self._bar.close()


def progress_bar(train_iters: int, done: int) -> Any:
    """A bar over the run's steps on stderr."""
    from tqdm import tqdm

    return tqdm(total=train_iters, initial=done, unit="step", dynamic_ncols=True)


class Metrics(NamedTuple):
    """All that `metrics.jsonl` holds."""

    steps: list[StepMetrics]
    evaluations: list[Evaluation]
    events: list[dict[str, Any]]


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """The lines of a file that may still be written to: what stands after its last newline is left out."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n")[:-1]]


def read_metrics(run_dir: Path | str) -> Metrics:
    """Reads what `MetricsWriter` wrote, null as NaN; ValueError if there is no file."""
    path = Path(run_dir) / METRICS_FILE
    if not path.is_file():
        raise ValueError(f"{path} must be the metrics of a run, but there is no such file; give the folder of a run")
    metrics = Metrics(steps=[], evaluations=[], events=[])
    for record in read_jsonl(path):
        if record["kind"] == "event":
            metrics.events.append(record)
        elif record["kind"] == "evaluation":
            metrics.evaluations.append(from_record(Evaluation, record))
        else:
            metrics.steps.append(from_record(StepMetrics, record))
    return metrics


def from_record(kind: type[T], record: dict[str, Any]) -> T:
    """The dataclass instance that a line was written from, null as NaN."""
    values: dict[str, Any] = {one.name: record[one.name] for one in fields(kind) if one.name in record}
    values.update({name: math.nan for name, value in values.items() if value is None})
    values["sources"] = sources_of_record(values.get("sources", {}))
    return kind(**values)
