"""pure. Lengths that a plan is made for; `sft.data.length_sources` reads them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

import numpy as np
import numpy.typing as npt

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
class Tokenization:
    """Says how text becomes tokens."""

    tokenizer_type: TokenizerType | None
    """None: HuggingFace's where a model is given, else bytes."""
    tokenizer_model: str | None
    vocab_size: int | None
    skip_bad_samples: bool
    chat_template: str | None = None
    data_columns: str | None = None


class LengthReader(Protocol):
    """Reads the lengths that `source` names; mock data gives `needed` of them. ValueError for what cannot be read."""

    def __call__(
        self, source: str, tokenization: Tokenization, seq_length: int | None, seed: int, needed: int
    ) -> Lengths: ...
