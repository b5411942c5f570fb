"""pure. The lengths that a plan is made for, and the options that name their source.
`sft.commands.length_sources` reads them.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import ClassVar, Literal, Protocol

import numpy as np
import numpy.typing as npt

from megatron.packing.batch.layout import OverLengthPolicy
from megatron.packing.rules import Rule, at_least, check_rules
from megatron.planner.sequences import Sequences
from megatron.planner.step_record import StepRecord

OPTIONS_FILE = "options.json"
"""File with the options of a run, in its folder."""
IntArray = npt.NDArray[np.int64]
TokenizerType = Literal["ByteLevelTokenizer", "HuggingFaceTokenizer", "NullTokenizer"]


@dataclass(frozen=True, kw_only=True)
class RunSource:
    """The run that lengths were read from, with the parallel layout of its last packs."""

    folder: Path
    num_ranks: int
    """Data-parallel ranks."""
    capacity: int | None
    """Capacity of its packs in tokens; None if the run did not write it."""
    num_forward_passes: int = 0
    """Forward passes of its steps beside those of training."""


@dataclass(frozen=True, kw_only=True)
class Lengths:
    """The samples of a source, in its order."""

    sequences: Sequences
    described: str
    dropped: int = 0
    """Number of records that were skipped: broken, or without a token to train on."""
    record: StepRecord | None = None
    """The step, if the source is a scheduled step."""
    run: RunSource | None = None
    """The run, if the source is a run's folder."""

    def costing(self, num_ranks: int) -> Lengths:
        """Returns the same with the cost of payloads for each of `num_ranks` ranks, which encode
        them as well or wait meanwhile.
        """
        costs = self.sequences.payload_costs
        if costs is None:
            return self
        return replace(self, sequences=replace(self.sequences, payload_costs=costs * num_ranks))

    @property
    def lengths(self) -> IntArray:
        """Tokens of each sample without padding, int64 [N]."""
        return self.sequences.lengths


@dataclass(frozen=True, kw_only=True)
class LengthOptions:
    """Lengths."""

    source: str | None = field(default=None, metadata={"positional": True})
    """Lengths, one per line; or chats (.jsonl, .json, .parquet); a mock config, as JSON or its
    file; the folder of a run, which also gives model and layout; a schedule that --dump-schedule
    wrote.
    """
    tokenizer_type: TokenizerType | None = None
    """For chats; default: HuggingFaceTokenizer with --tokenizer-model, else ByteLevelTokenizer."""
    tokenizer_model: str | None = None
    """Folder of a HuggingFace tokenizer."""
    chat_template: str | None = None
    """File with a chat template, instead of the tokenizer's."""
    template_date: str | None = None
    """Date YYYY-MM-DD for chat templates that ask for today's, as in training."""
    chat_template_kwargs: str | None = field(default=None, metadata={"is_json": True})
    """Variables of the chat template, as JSON, as in training."""
    train_turns: Literal["served", "all", "last"] | None = None
    """Turns of chats that are trained, as in training, whose default it has."""
    loss: Literal["sft", "dpo", "simpo", "orpo", "cpo", "kto", "reward"] = "sft"
    """Loss to train with: preference data, whose pairs are trees, for any but sft."""
    forward_passes: int | None = None
    """Forward passes of a step beside those of training, as of a reference (default: as in
    training, 1 of dpo and 2 of kto, and 0 with --reference-file).
    """
    data_columns: str | None = None
    """Column renames of the chats, as in training."""
    images: bool = False
    """Read chats with images, for the vision model whose folder is --tokenizer-model: lengths, and
    what its tower costs, from the headers of image files.
    """
    image_max_pixels: int = field(default=1024 * 1024, metadata={"only_with": "images"})
    """Size that larger images are resized to, as in training."""
    image_root: str | None = field(default=None, metadata={"only_with": "images"})
    """Folder of relative image paths, as in training."""
    image_url_cache: str | None = field(default=None, metadata={"only_with": "images"})
    """Folder of fetched images, as in training."""
    image_url_hosts: tuple[str, ...] = field(default=(), metadata={"only_with": "image_url_cache"})
    """Hosts in private networks, as in training."""
    tower_lr: float | None = field(default=None, metadata={"only_with": "images"})
    """The vision tower is trained, and costs three times as much."""
    projector_lr: float | None = field(default=None, metadata={"only_with": "images"})
    """The projector is trained."""
    seq_length: int | None = None
    """Tokens of a sequence, at most (default: no limit)."""
    over_length_policy: OverLengthPolicy = "error"
    """Treatment of a sequence longer than --seq-length or than a pack."""
    skip_bad_samples: bool = False
    """Count and skip records that cannot be read."""
    seed: int = 1234
    """Random seed of the order of sequences."""

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            when=lambda options: options.source is None,
            why="lengths are missing",
            way_out="name a file of lengths or chats, before the options: plan FILE --dp 8",
        ),
        Rule(
            when=lambda options: options.images and options.tokenizer_model is None,
            why="{images.flag} needs the folder of the vision model",
            way_out="pass it as {tokenizer_model.flag}",
        ),
        Rule(
            when=lambda options: options.images and options.loss != "sft",
            why="{images.flag} trains answers by imitation, not {loss}",
            way_out="drop one",
        ),
        *at_least(1, "image_max_pixels"),
        *at_least(0, "seed", "forward_passes"),
        *at_least(1, "seq_length"),
    )

    def __post_init__(self) -> None:
        check_rules(self.rules, options=self)


class LengthReader(Protocol):
    """Function that reads the lengths of `options.source`. Mock data has `needed` of them. It
    raises ValueError if the source cannot be read.
    """

    def __call__(self, options: LengthOptions, vocab_size: int | None, needed: int) -> Lengths: ...
