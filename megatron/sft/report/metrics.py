"""pure. Metrics of a training step and of an evaluation, and their log lines.

A field of `StepMetrics` is a column of `metrics.jsonl`. A new column needs a default, so that older
files can be read, and a value in `training/step_account.py`. A column about packs is a field of
`PackingStats` instead.
"""

import math
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from megatron.packing.step.stats import PackingStats

_MAX_IN_A_LINE = 4
_MAX_SHOWN = 100
"""Characters of a prompt or an answer in a line."""


@dataclass(frozen=True, kw_only=True)
class SourceMetrics:
    """Metrics of one source in a step or an evaluation, summed over all ranks. Counts are exact
    integers.
    """

    sequences: int
    tokens: int
    """Tokens without padding: the sum of the sequences' lengths."""
    num_loss_tokens: int
    """Tokens with loss."""
    loss: float
    """Mean over the tokens with loss, without weights of samples. NaN if there are none."""

    def described(self, name: str) -> str:
        """Returns `"chats 2.3141 (6 samples, 3,012 tokens)"`."""
        loss = "" if math.isnan(self.loss) and not self.num_loss_tokens else f" {self.loss:.4f}"
        return f"{name}{loss} ({self.sequences} samples, {self.tokens:,} tokens)"


@dataclass(frozen=True, kw_only=True)
class StepMetrics(PackingStats):
    """Metrics of one training step and its packs, over all ranks. Counts are exact integers."""

    iteration: int
    """Number of the step, from 1."""
    consumed_samples: int
    """Samples taken from the data since the first step of the run, delayed ones included. The
    learning rate schedule counts in them.
    """
    loss: float
    """Mean per token over the global batch."""
    lr: float
    grad_norm: float
    """Norm of the gradients before clipping."""
    skipped: bool
    """True if the optimizer skipped this step because gradients overflowed."""
    step_seconds: float
    """Wall time of the whole step, `data_seconds` included."""
    data_seconds: float
    """Time that the step waited for its data."""
    passes_seconds: float
    """Time of the forward and backward passes and the reduction of gradients, without
    `data_seconds` and without the optimizer.
    """
    predicted_seconds: float
    """`passes_seconds` as the cost of --pack-cost predicts it; NaN without --pack-cost."""
    num_stages: int
    """Pipeline-parallel size."""
    tokens_per_second: float
    """Tokens without padding, of all devices together."""
    tflops_per_device: float
    epoch: float = math.nan
    """Consumed samples over the number of records; NaN for mock data."""
    token_accuracy: float = math.nan
    """Share of the tokens with loss that the model predicts best; NaN if it is not measured."""
    dropped: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    """Source -> reason -> number of dropped samples, pairs dropped alone from a record of several
    among them.
    """
    sources: Mapping[str, SourceMetrics] = field(default_factory=dict)
    """Metrics by source; empty if there is only one source."""
    figures: Mapping[str, float] = field(default_factory=dict)
    """Further numbers by name: a sum or a maximum over all ranks (`sft.training.figures`)."""

    @property
    def perplexity(self) -> float:
        """Exponential of the loss."""
        return perplexity(self.loss)

    @property
    def prediction_error(self) -> float:
        """Predicted over measured time of the passes, less 1; NaN without a prediction."""
        return self.predicted_seconds / self.passes_seconds - 1 if self.passes_seconds else math.nan

    def to_line(self, train_iters: int) -> str:
        """Returns the step as one line of a log."""
        parts = [
            f"step {self.iteration:>{len(str(train_iters))}}/{train_iters}",
            *([f"epoch {self.epoch:.2f}"] if math.isfinite(self.epoch) else []),
            f"loss {self.loss:.4f}",
            *accuracy_parts(self.token_accuracy),
            *figure_parts(self.figures),
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
                f"passes {self.passes_seconds * 1000:.1f} ms, predicted "
                f"{self.predicted_seconds * 1000:.1f} ms "
                f"({self.prediction_error:+.1%})"
            )
        if self.sources:
            parts.append(sources_line(self.sources))
        if self.dropped_samples:
            parts.append(
                f"{self.dropped_samples} dropped"
                + (f": {dropped_line(self.dropped)}" if self.dropped else "")
            )
        if self.truncated_samples:
            parts.append(f"{self.truncated_samples} truncated")
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
        """Returns the text behind a progress bar."""
        return f"loss {self.loss:.4f}, {self.tokens_per_second:,.0f} tokens/s, fill {self.fill:.0%}"


DERIVED = ("perplexity", "fill", "padding", "balance", "moved", "prediction_error")
"""Properties of a step that are columns of `metrics.jsonl`, too; they are not read back."""
DRAWN = (
    *(
        "loss",
        "perplexity",
        "token_accuracy",
        "epoch",
        "lr",
        "grad_norm",
        "tokens_per_second",
        "tflops_per_device",
    ),
    *(
        "microbatches",
        "fill",
        "padding",
        "balance",
        "bubble",
        "moved",
        "data_seconds",
        "step_seconds",
    ),
)
"""Columns that are sent to boards (TensorBoard, Weights & Biases)."""
IN_LINES = {
    "rewards/accuracies": ".1%",
    "rewards/margins": ".4f",
    "kl": ".4f",
    "sft_loss": ".4f",  # of chats beside pairs
    "accuracy": ".1%",
    "margin": ".4f",
    "mean_reward": ".4f",  # of reward models
}
"""Figures that log lines show, and their format."""
DRAWN_OF_EVALUATIONS = ("loss", "perplexity", "token_accuracy")


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """Metrics of an evaluation: the loss of a split, valid or test."""

    iteration: int
    """Number of training steps before the evaluation."""
    split: str
    loss: float
    """Mean per token over all batches of the evaluation."""
    num_tokens: int
    """Tokens with loss."""
    token_accuracy: float = math.nan
    """Share of the tokens with loss that the model predicts best; NaN if it is not measured."""
    dropped_samples: int = 0
    truncated_samples: int = 0
    dropped: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    """Source -> reason -> number of dropped samples, pairs dropped alone from a record of several
    among them.
    """
    sources: Mapping[str, SourceMetrics] = field(default_factory=dict)
    """Metrics by source; empty if there is only one source."""
    figures: Mapping[str, float] = field(default_factory=dict)
    """Further numbers of the objective, by name."""

    @property
    def perplexity(self) -> float:
        """Exponential of the loss."""
        return perplexity(self.loss)

    def to_line(self) -> str:
        """Returns the evaluation as one line of a log."""
        left_out = f", {self.dropped_samples} dropped" * bool(self.dropped_samples)
        left_out += f", {self.truncated_samples} truncated" * bool(self.truncated_samples)
        compared = figure_parts(self.figures)  # a loss of pairs has no perplexity
        parts = compared or [f"perplexity {self.perplexity:,.4g}"]
        parts += accuracy_parts(self.token_accuracy)
        pairs = self.figures.get("pairs")
        counted = f"{self.num_tokens:,} loss tokens" if pairs is None else f"{pairs:,.0f} pairs"
        line = (
            f"{self.split} loss {self.loss:.4f} after step {self.iteration} "
            f"({counted}{left_out}, {', '.join(parts)})"
        )
        return f"{line} | {sources_line(self.sources)}" if self.sources else line


def perplexity(loss: float) -> float:
    """Returns the exponential of a loss; infinity if it is too large for a float."""
    return math.exp(loss) if loss < 700 else loss if math.isnan(loss) else math.inf


def accuracy_parts(token_accuracy: float) -> list[str]:
    """`0.5 -> ["token accuracy 50.0%"]`; [] for NaN."""
    return [] if math.isnan(token_accuracy) else [f"token accuracy {token_accuracy:.1%}"]


def figure_parts(figures: Mapping[str, float]) -> list[str]:
    """Returns what a log line has of figures: those of preference tuning."""
    return [f"{name} {figures[name]:{form}}" for name, form in IN_LINES.items() if name in figures]


def sources_line(sources: Mapping[str, SourceMetrics]) -> str:
    """Returns a line about the sources with the most tokens: `"chats 2.3141 (6 samples, 3,012
    tokens), code 1.9020 (2 samples, ...)"`.
    """
    most = sorted(sources, key=lambda name: -sources[name].tokens)
    parts = [sources[name].described(name) for name in most[:_MAX_IN_A_LINE]]
    if len(most) > _MAX_IN_A_LINE:
        parts.append(f"{len(most) - _MAX_IN_A_LINE} more")
    return ", ".join(parts)


def dropped_line(dropped: Mapping[str, Mapping[str, int]]) -> str:
    """`{"chats": {"over length": 2}} -> "2 over length of chats"`."""
    return ", ".join(
        f"{number:,} {reason} of {name}"
        for name, reasons in dropped.items()
        for reason, number in reasons.items()
    )


def mean_of_finite(values: Iterable[float]) -> float:
    """Returns the mean of the finite values. A single step that overflowed does not make it NaN."""
    finite = [value for value in values if math.isfinite(value)]
    return statistics.fmean(finite) if finite else math.nan


def answer_line(prompt: str, answer: str) -> str:
    """Returns `prompt -> answer`, each cut to 100 characters in one line."""

    def short(text: str) -> str:
        line = " ".join(text.split())
        return line if len(line) <= _MAX_SHOWN else f"{line[: _MAX_SHOWN - 3]}..."

    return f"{short(prompt)} -> {short(answer)}"
