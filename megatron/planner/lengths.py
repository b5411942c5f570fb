"""pure. Lengths that a plan is made for, and the options that name them; `sft.data.length_sources`
reads them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol

import numpy as np
import numpy.typing as npt

from megatron.packing.batch.layout import OverLengthPolicy
from megatron.packing.flags import check_range
from megatron.planner.step_record import StepRecord

IntArray = npt.NDArray[np.int64]
TokenizerType = Literal["ByteLevelTokenizer", "HuggingFaceTokenizer", "NullTokenizer"]


@dataclass(frozen=True, kw_only=True)
class RunSource:
    """A run whose packs the lengths are of, and how the last of them were made."""

    folder: Path
    num_ranks: int
    """Data-parallel ranks."""
    capacity: int | None
    """Tokens that a pack could hold; None where it isn't written."""


@dataclass(frozen=True, kw_only=True)
class Lengths:
    """Lengths in the source's order, int64 [N], and what to say of them."""

    lengths: IntArray
    described: str
    dropped: int = 0
    """Records without a token to train on, or broken and skipped."""
    record: StepRecord | None = None
    """Where the source is one scheduled step."""
    run: RunSource | None = None
    """Where it is a run's folder."""


@dataclass(frozen=True, kw_only=True)
class LengthOptions:
    """Lengths."""

    source: str | None = field(default=None, metadata={"positional": True})
    """Lengths, one per line; or chats (.jsonl, .json, .parquet); a mock config, as JSON or its
    file; the folder of a run, which also tells model and layout; a schedule that --dump-schedule
    wrote.
    """
    tokenizer_type: TokenizerType | None = None
    """For chats; default: HuggingFaceTokenizer with --tokenizer-model, else ByteLevelTokenizer."""
    tokenizer_model: str | None = None
    """Folder of a HuggingFace tokenizer."""
    chat_template: str | None = None
    """File with a chat template, instead of the tokenizer's."""
    data_columns: str | None = None
    """Odd names of the chats' columns, as in training."""
    seq_length: int | None = None
    """Most tokens of a sequence (default: no limit)."""
    over_length_policy: OverLengthPolicy = "error"
    """What happens to a sequence longer than --seq-length or than a pack."""
    skip_bad_samples: bool = False
    """Count and skip records that cannot be read."""
    seed: int = 1234
    """Of the order in which global batches are drawn."""

    def __post_init__(self) -> None:
        if self.source is None:
            raise ValueError(
                "lengths are missing; name a file of lengths or chats, before the options: plan "
                "FILE --dp 8"
            )
        check_range(self, 0, None, "seed")
        check_range(self, 1, None, "seq_length")


class LengthReader(Protocol):
    """Reads the lengths that are asked for; mock data gives `needed` of them. ValueError for what
    cannot be read.
    """

    def __call__(self, options: LengthOptions, vocab_size: int | None, needed: int) -> Lengths: ...
