"""tensor. Take one rank's part of a global batch from the user's iterator, and put down what goes wrong instead of
raising it.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from torch import Tensor

from megatron.packing.batch.sample import encode, samples_of


@dataclass(kw_only=True)
class Draw:
    """What was drawn: samples on the wire, and a row (length, kind, draw) for each."""

    words: list[Tensor] = field(default_factory=list)
    rows: list[tuple[int, int, int]] = field(default_factory=list)
    num_dropped: int = 0
    num_cut: int = 0
    ended: bool = False
    """The iterator had no more."""
    error: str | None = None
    """Why drawing was given up."""

    def checksum(self) -> int:
        """Equal where the same samples were drawn in the same order."""
        checksum = zlib.crc32(self.table.tobytes())
        for words in self.words:
            checksum = zlib.crc32(words.numpy().tobytes(), checksum)
        return checksum

    @property
    def table(self) -> np.ndarray:
        """int64 [n, 3]: the rows."""
        return np.array(self.rows, dtype=np.int64).reshape(-1, 3)


def draw_samples(
    iterator: Iterator[Any] | None,
    num_draws: int,
    longest: int,
    policy: Literal["error", "truncate", "drop"],
    rank_name: str,
) -> Draw:
    """Call `next` up to `num_draws` times. A sample of more than `longest` tokens is an error, cut, or dropped, by
    `policy`.

    `rank_name` begins each error's text: all ranks will read it.
    """
    draw = Draw()
    if iterator is None:
        draw.error = f"{rank_name} must have a data iterator, but has none; build one where owns_data() is true"
        return draw
    for number in range(num_draws):
        try:
            samples = samples_of(next(iterator))
        except StopIteration:
            draw.ended = True
            return draw
        except Exception as failure:  # the edge to the user's data: whatever it is, all ranks must hear of it
            draw.error = f"{rank_name}, draw {number}: {type(failure).__name__}: {failure}"
            return draw
        for sample in samples:
            if len(sample) > longest and policy == "drop":
                draw.num_dropped += 1
                continue
            if len(sample) > longest and policy == "truncate":
                sample = sample.first(longest)
                draw.num_cut += 1
            if len(sample) > longest:
                draw.error = (
                    f"{rank_name}, draw {number}: a sample of {len(sample)} tokens does not fit a pack of {longest}; "
                    "raise --max-seqlen-per-dp-cp-rank or --context-parallel-size, or pass --over-length-policy "
                    "truncate or drop"
                )
                return draw
            kind, words = encode(sample)
            draw.words.append(words)
            draw.rows.append((len(sample), kind, number))
    return draw
