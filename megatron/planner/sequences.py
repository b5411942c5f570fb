"""pure. The samples that a plan schedules: lengths of sequences, sizes of trees, costs of payloads
(images).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from megatron.packing.batch.layout import Alignment
from megatron.packing.batch.nodes import SampleSizes
from megatron.packing.quoting import shown

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]
_MAX_NUMBER = 1 << 62


@dataclass(frozen=True, eq=False)
class Sequences:
    """N samples; int64 [N] each."""

    lengths: IntArray
    """Tokens without padding."""
    trees: SampleSizes | None = None
    """Sizes of trees, in the parallel layout that they were read in; None without trees."""
    loss_tokens: IntArray | None = None
    """Tokens with loss, which are rows of the output layer; None if only lengths are known."""
    payload_costs: FloatArray | None = None
    """float64 [N], see `ScheduleRequest`; None without payloads."""

    @property
    def size(self) -> int:
        """Number of samples."""
        return self.lengths.size

    @property
    def num_tokens(self) -> int:
        """Tokens of all samples, without padding."""
        return int(self.lengths.sum())

    @property
    def squares(self) -> IntArray | None:
        """Twice the number of attending pairs of tokens in each sample; None if it is L^2."""
        return None if self.trees is None else self.trees.squares

    def take(self, ids: npt.NDArray[Any]) -> Sequences:
        """Returns some of the samples, in this order."""
        return Sequences(
            self.lengths[ids],
            None if self.trees is None else SampleSizes(*(each[ids] for each in self.trees)),
            None if self.loss_tokens is None else self.loss_tokens[ids],
            None if self.payload_costs is None else self.payload_costs[ids],
        )

    def truncated(self, limit: int) -> Sequences:
        """Returns all samples, truncated to at most `limit` tokens.

        Trees are not truncated: the limit is for their paths, which may be shorter, and the trainer
        cuts larger trees into parts.
        """
        if self.trees is not None:
            return self
        loss_tokens = self.loss_tokens
        return Sequences(
            np.minimum(self.lengths, limit),
            loss_tokens=None if loss_tokens is None else np.minimum(loss_tokens, limit),
            payload_costs=self.payload_costs,
        )

    def padded(self, alignment: Alignment) -> tuple[IntArray, IntArray | None]:
        """Returns the padded tokens of each sample, and the padded squares; None if they are L^2.

        The nodes of a tree are not known, only its padded size in the parallel layout it was read
        in. If that padded less, the tree is padded like one sequence.
        """
        tokens = alignment.padded_length(self.lengths)
        if self.trees is None:
            return tokens, None
        tokens = np.maximum(alignment.padded_length(self.trees.padded), tokens)
        # Samples that are plain sequences, among trees, have the squares of their padded length.
        return tokens, np.where(
            self.trees.squares == self.lengths**2, tokens**2, self.trees.padded_squares
        )

    @classmethod
    def joined(cls, parts: Sequence[Sequences]) -> Sequences:
        """Returns the samples of all parts, in order."""
        loss = [part.loss_tokens for part in parts if part.loss_tokens is not None]
        trees = None
        if any(part.trees is not None for part in parts):
            whole = [
                part.trees or SampleSizes.of_sequences(part.lengths, Alignment()) for part in parts
            ]
            trees = SampleSizes(*(np.concatenate(each) for each in zip(*whole)))
        costs = [
            np.zeros(part.size) if part.payload_costs is None else part.payload_costs
            for part in parts
        ]
        has_payloads = any(part.payload_costs is not None for part in parts)
        return cls(
            np.concatenate([part.lengths for part in parts]),
            trees,
            np.concatenate(loss) if len(loss) == len(parts) else None,
            np.concatenate(costs) if has_payloads else None,
        )


def sizes_of(sequences: Sequences) -> dict[str, list[Any]] | None:
    """Returns the sizes of trees and the costs of payloads as JSON values; None without any."""
    arrays: dict[str, npt.NDArray[Any] | None] = {"payload_costs": sequences.payload_costs}
    if sequences.trees is not None:
        arrays |= {**sequences.trees._asdict(), "loss_tokens": sequences.loss_tokens}
    return {name: each.tolist() for name, each in arrays.items() if each is not None} or None


def sequences_of(lengths: IntArray, sizes: Any) -> Sequences:
    """Returns samples of these lengths, with the sizes that `sizes_of` returned. Raises ValueError
    if the sizes are not those of these samples.
    """
    if sizes is None:
        return Sequences(lengths)
    costs = None
    if isinstance(sizes, dict) and "payload_costs" in sizes:
        costs = _costs_of(sizes["payload_costs"], lengths.size)
        sizes = {name: each for name, each in sizes.items() if name != "payload_costs"}
        if not sizes:
            return Sequences(lengths, payload_costs=costs)
    names = (*SampleSizes._fields, "loss_tokens")
    known = isinstance(sizes, dict) and {*SampleSizes._fields} <= sizes.keys() <= {*names}
    if not known or not all(_are_sizes(each, lengths.size) for each in sizes.values()):
        raise ValueError(
            f"sizes must be {', '.join(names)}: {lengths.size} whole numbers each, but are "
            f"{shown(sizes)}"
        )
    arrays = {name: np.array(each, np.int64) for name, each in sizes.items()}
    loss_tokens = arrays.pop("loss_tokens", None)
    return Sequences(lengths, SampleSizes(**arrays), loss_tokens, costs)


def _costs_of(values: object, count: int) -> FloatArray:
    is_known = isinstance(values, list) and len(values) == count
    if not is_known or not all(
        type(each) in (int, float) and 0 <= each < _MAX_NUMBER
        for each in values  # type: ignore[attr-defined]
    ):
        raise ValueError(
            f"payload_costs must be {count} numbers of at least 0, but are {shown(values)}"
        )
    return np.array(values, np.float64)


def _are_sizes(values: object, count: int) -> bool:
    if not isinstance(values, list) or len(values) != count:
        return False
    return all(type(each) is int and 0 <= each < _MAX_NUMBER for each in values)
