"""pure. Options of training: steps, batches, optimizer, learning rate, evaluations."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal

from megatron.packing.flags import flag_of
from megatron.packing.memory_size import parse_memory
from megatron.packing.rules import Rule, at_least, check_rules, exclude, from_zero_to_below_one

_WARMUPS = ("lr_warmup_iters", "lr_warmup_samples", "lr_warmup_fraction")


def _several_warmups(options: Any) -> dict[str, str]:
    flags = [flag_of(name) for name in _WARMUPS if getattr(options, name)]
    return {"flags": " or ".join(flags)} if len(flags) > 1 else {}


def _wsd_decay_is_too_long(options: Any) -> dict[str, str]:
    decay = options.decay_samples / options.global_batch_size
    warmup = options.warmup_samples / options.global_batch_size
    if decay and warmup + (options.lr_wsd_decay_iters or 0) > decay > warmup:
        return {"warmup": f"{warmup:g}", "decay": f"{decay:g}"}
    return {}


def _warmup_is_too_long(options: Any) -> dict[str, str]:
    if 0 <= options.warmup_samples < (options.decay_samples or math.inf):
        return {}
    name = next((name for name in _WARMUPS if getattr(options, name)), "lr_warmup_iters")
    decay = options.decay_samples / options.global_batch_size
    return {"warmup": f"{flag_of(name)} {getattr(options, name)}", "decay": f"{decay:g}"}


@dataclass(frozen=True, kw_only=True)
class TrainingConfig:
    """Training."""

    train_iters: int = 0
    """Training steps."""
    train_epochs: float | None = None
    """Passes over the training data, in place of --train-iters."""
    train_samples: int | None = None
    """Sequences to train on, in place of --train-iters; rounded down to whole steps."""
    global_batch_size: int
    """Sequences per optimizer step, over all ranks."""
    lr: float
    """Peak learning rate."""
    micro_batch_size: int = 1
    """Sequences per microbatch without packing, padded to the longest of them. With packing:
    samples loaded at a time.
    """
    min_lr: float = field(default=0.0, metadata={"idle_without": "lr_decay_style!=constant"})
    """Lowest learning rate."""
    lr_decay_style: Literal["constant", "linear", "cosine", "inverse-square-root", "WSD"] = "linear"
    """Learning rate schedule after the warmup. WSD stays at the peak until the last --lr-wsd-
    decay-iters.
    """
    lr_decay_iters: int | None = field(
        default=None, metadata={"idle_without": "lr_decay_style!=constant|lr_warmup_fraction"}
    )
    """Step at which the learning rate is lowest (default: --train-iters)."""
    lr_decay_samples: int | None = field(
        default=None, metadata={"idle_without": "lr_decay_style!=constant|lr_warmup_fraction"}
    )
    """The same in sequences, in place of --lr-decay-iters."""
    lr_warmup_iters: int = 0
    """Linear warmup steps."""
    lr_warmup_samples: int | None = None
    """Linear warmup in sequences, in place of --lr-warmup-iters."""
    lr_warmup_fraction: float | None = None
    """Linear warmup as a share of the steps, in place of --lr-warmup-iters; none for less than a
    step.
    """
    lr_wsd_decay_style: Literal["exponential", "linear", "cosine", "minus_sqrt"] = field(
        default="exponential", metadata={"idle_without": "lr_decay_style=WSD"}
    )
    """Shape of the final decay of WSD."""
    lr_wsd_decay_iters: int | None = None
    """Steps of the final decay of WSD."""
    weight_decay: float = 0.01
    """Weight decay (matrices only)."""
    clip_grad: float = 1.0
    """Gradient clipping norm (0 disables)."""
    adam_beta1: float = 0.9
    """Adam's beta 1."""
    adam_beta2: float = 0.999
    """Adam's beta 2."""
    adam_eps: float = 1e-8
    """Adam's epsilon."""
    bf16: bool = False
    """Compute in bfloat16, with float32 main parameters."""
    logits_of_masked_tokens: bool = False
    """Compute the output layer and the loss of all tokens at once, masked ones included. Losses
    are equal; this is for comparison.
    """
    keep_logits: bool = False
    """Keep logits for the backward pass, which otherwise computes them again where they take more
    than 1 GiB. Saves a quarter of the output layer's arithmetic for 2 bytes per token that has a
    loss and word (4 without --cross-entropy-loss-fusion).
    """
    fit_to_memory: str = "off"
    """Memory of a GPU, such as 24GB, or "found" for that of the GPUs that are here. A run that is
    estimated to take more gets options that take less and leave losses as they are, cheapest first,
    and a line that says which. Options stay as given with "off"; the default is "found" for a
    released model without --recompute-granularity.
    """
    deterministic_mode: bool = False
    """Use deterministic kernels on GPUs, at some cost in speed, so that equal runs are equal to
    the bit. CPU runs always are.
    """
    seed: int = 1234
    """Random seed (weights, data order, dropout)."""
    eval_interval: int = field(default=1000, metadata={"idle_without": "eval_iters>=1"})
    """Steps between evaluations."""
    eval_iters: int = 100
    """Global batches per evaluation (0 disables)."""
    sample_prompts: str | None = field(default=None, metadata={"only_with": "eval_iters>=1"})
    """File of prompts that the model answers at each evaluation, in a format of --data-path.
    Answers in it are ignored.
    """
    sample_tokens: int = field(default=64, metadata={"idle_without": "sample_prompts"})
    """Maximum tokens of an answer to --sample-prompts. Each is a forward pass of all prompts."""
    early_stopping: int | None = field(default=None, metadata={"only_with": "eval_iters>=1"})
    """Stop after this many evaluations in a row without a lower validation loss."""
    exit_interval: int | None = None
    """Save and exit every N steps."""
    exit_duration_in_mins: float | None = None
    """Save and exit after N minutes."""
    skip_nan_steps: int = 0
    """Steps with a NaN or infinite loss or gradient norm to skip before the run fails."""

    rules: ClassVar[tuple[Rule, ...]] = (
        *at_least(1, "global_batch_size"),  # others divide by it
        Rule(
            when=lambda options: options.train_iters and options.train_epochs is not None,
            why="pass either {train_iters.flag} or {train_epochs.flag}, not both",
        ),
        Rule(
            when=lambda options: (
                options.train_samples is not None
                and options.train_samples < options.global_batch_size
            ),
            why="{train_samples.flag} must be at least {global_batch_size.value}, but is "
            "{train_samples.value}",
        ),
        Rule(
            when=lambda options: options.train_iters < 1 and options.train_epochs is None,
            why="{train_iters.flag} must be at least 1 without {train_epochs.flag}, but is "
            "{train_iters.value}",
        ),
        Rule(
            when=lambda options: (
                options.train_samples is not None
                and options.train_samples // options.global_batch_size != options.train_iters
            ),
            why="pass either {train_iters.flag} or {train_samples.flag}, not both",
        ),
        *at_least(1e-9, "train_epochs"),
        *at_least(1, "micro_batch_size", "eval_interval", "sample_tokens"),
        exclude("keep_logits", "logits_of_masked_tokens", way_out=""),
        exclude("sample_prompts", "logits_of_masked_tokens", way_out=""),
        *at_least(1, "lr_decay_iters", "lr_decay_samples", "early_stopping", "exit_interval"),
        *at_least(0, "lr", "weight_decay", "clip_grad", "adam_eps", "eval_iters", "seed"),
        *at_least(0, "exit_duration_in_mins", "skip_nan_steps"),
        *at_least(1, "lr_wsd_decay_iters"),
        *from_zero_to_below_one("adam_beta1", "adam_beta2"),
        Rule(
            when=lambda options: not 0 <= options.min_lr <= options.lr,
            why="{min_lr} must be from 0 to {lr}",
        ),
        Rule(
            when=lambda options: (
                (options.lr_decay_style == "WSD") != (options.lr_wsd_decay_iters is not None)
            ),
            why="{lr_decay_style.flag} WSD and {lr_wsd_decay_iters.flag} belong together",
            way_out="pass both or none",
        ),
        Rule(when=_several_warmups, why="pass either {flags}, not both"),
        Rule(
            when=lambda options: options.lr_decay_iters and options.lr_decay_samples,
            why="pass either {lr_decay_iters.flag} or {lr_decay_samples.flag}, not both",
        ),
        *from_zero_to_below_one("lr_warmup_fraction"),
        Rule(
            when=_wsd_decay_is_too_long,
            why="{lr_wsd_decay_iters} must fit behind the warmup into the steps of decay, {warmup} "
            "of {decay}",
            way_out="lower it or raise {lr_decay_iters.flag}",
        ),
        Rule(
            when=_warmup_is_too_long,
            why="{warmup} must be less than the steps of decay, {decay}",
            way_out="lower it or raise {lr_decay_iters.flag}",
        ),
    )

    def __post_init__(self) -> None:
        check_rules(self.rules, options=self)
        # No rule: it needs text that is parsed.
        if self.fit_to_memory not in ("off", "found"):
            parse_memory(self.fit_to_memory, "--fit-to-memory")

    @property
    def decay_samples(self) -> int:
        """Samples until the learning rate is lowest; 0 as long as the steps of --train-epochs are
        not known.
        """
        return (
            self.lr_decay_samples
            or (self.lr_decay_iters or self.train_iters) * self.global_batch_size
        )

    @property
    def warmup_samples(self) -> int:
        """Samples of the linear warmup."""
        if self.lr_warmup_fraction is not None:
            samples = int(self.lr_warmup_fraction * self.decay_samples)
            # The first step of a warmup trains at 0, and a short run has few others, or none.
            return samples if samples >= self.global_batch_size else 0
        return self.lr_warmup_samples or self.lr_warmup_iters * self.global_batch_size

    def for_records(self, num_records: int) -> TrainingConfig:
        """Returns these options for training data of `num_records` records, with --train-epochs
        turned into whole steps.

        Raises ValueError if other options contradict that number of steps.
        """
        if self.train_epochs is None:
            return self
        steps = math.ceil(self.train_epochs * num_records / self.global_batch_size)
        # Set the samples as well, by which a run continued with another batch size is recognised.
        samples = steps * self.global_batch_size
        return replace(self, train_iters=steps, train_samples=samples, train_epochs=None)
