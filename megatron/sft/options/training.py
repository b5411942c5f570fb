"""pure. Options of training: steps, batches, optimizer, learning rate, evaluations."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from megatron.packing.flags import check_range, flag_of


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

    def __post_init__(self) -> None:
        if self.train_iters and self.train_epochs is not None:
            raise ValueError("pass either --train-iters or --train-epochs, not both")
        check_range(self, self.global_batch_size, None, "train_samples")
        if self.train_iters < 1 and self.train_epochs is None:
            raise ValueError(
                "--train-iters must be at least 1 without --train-epochs, but is "
                f"{self.train_iters}"
            )
        if (
            self.train_samples is not None
            and self.train_samples // self.global_batch_size != self.train_iters
        ):
            raise ValueError("pass either --train-iters or --train-samples, not both")
        check_range(self, 1e-9, None, "train_epochs")
        check_range(self, 1, None, "global_batch_size", "micro_batch_size", "eval_interval")
        check_range(self, 1, None, "sample_tokens")
        if self.keep_logits and self.logits_of_masked_tokens:
            raise ValueError("--keep-logits and --logits-of-masked-tokens exclude one another")
        if self.sample_prompts is not None and self.logits_of_masked_tokens:
            raise ValueError("--sample-prompts and --logits-of-masked-tokens exclude one another")
        check_range(
            self, 1, None, "lr_decay_iters", "lr_decay_samples", "early_stopping", "exit_interval"
        )
        check_range(
            self, 0, None, "lr", "weight_decay", "clip_grad", "adam_eps", "eval_iters", "seed"
        )
        check_range(self, 0, None, "exit_duration_in_mins", "skip_nan_steps")
        check_range(self, 1, None, "lr_wsd_decay_iters")
        self._check_optimizer()
        self._check_warmup()

    def _check_optimizer(self) -> None:
        for name in ("adam_beta1", "adam_beta2"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(
                    f"{flag_of(name)} must be from 0 to below 1, but is {getattr(self, name)}"
                )
        if not 0 <= self.min_lr <= self.lr:
            raise ValueError(f"--min-lr {self.min_lr} must be from 0 to --lr {self.lr}")
        if (self.lr_decay_style == "WSD") != (self.lr_wsd_decay_iters is not None):
            raise ValueError(
                "--lr-decay-style WSD and --lr-wsd-decay-iters belong together; pass both or none"
            )

    def _check_warmup(self) -> None:
        ways = {
            "--lr-warmup-iters": self.lr_warmup_iters,
            "--lr-warmup-samples": self.lr_warmup_samples,
            "--lr-warmup-fraction": self.lr_warmup_fraction,
        }
        given = [flag for flag, value in ways.items() if value]
        if len(given) > 1:
            raise ValueError(f"pass either {' or '.join(given)}, not both")
        if self.lr_decay_iters and self.lr_decay_samples:
            raise ValueError("pass either --lr-decay-iters or --lr-decay-samples, not both")
        if not 0 <= (self.lr_warmup_fraction or 0) < 1:
            raise ValueError(
                f"--lr-warmup-fraction must be from 0 to below 1, but is {self.lr_warmup_fraction}"
            )
        self._check_decay({flag: ways[flag] for flag in given or ["--lr-warmup-iters"]})

    def _check_decay(self, given: Mapping[str, float | None]) -> None:
        """given: the option that sets the warmup, with its value."""
        decay = self.decay_samples / self.global_batch_size
        warmup = self.warmup_samples / self.global_batch_size
        if self.decay_samples and warmup + (self.lr_wsd_decay_iters or 0) > decay > warmup:
            raise ValueError(
                f"--lr-wsd-decay-iters {self.lr_wsd_decay_iters} must fit behind the warmup into "
                f"the steps of decay, {warmup:g} of {decay:g}; lower it or raise --lr-decay-iters"
            )
        if not 0 <= self.warmup_samples < (self.decay_samples or math.inf):
            ((flag, value),) = given.items()
            raise ValueError(
                f"{flag} {value} must be less than the steps of decay, {decay:g}; lower it or "
                "raise --lr-decay-iters"
            )

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
