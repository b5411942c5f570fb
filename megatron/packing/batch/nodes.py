"""pure. The nodes of samples that are trees (see `tree`): their places and what they cost."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from megatron.packing.batch.columns import (
    NODE,
    NODE_LENGTHS,
    PARENTS,
    IntArray,
    depths_of_nodes,
)
from megatron.packing.batch.layout import Alignment
from megatron.packing.batch.samples import Samples


class Nodes(NamedTuple):
    """The m nodes of n samples, one sample after the other; int64 [m] each."""

    lengths: IntArray
    """Tokens of each, at least 1."""
    parents: IntArray
    """Number of each node's parent among all m; -1 for the first node of a sample."""
    depths: IntArray
    """Tokens of each node's path before its first."""
    sample: IntArray
    """Number of each node's sample, rising."""

    @classmethod
    def of(cls, samples: Samples) -> Nodes:
        """Returns the nodes of all samples; a sequence is one node."""
        rows = samples.sizes.rows(NODE)
        if PARENTS not in samples.columns:
            return cls(
                samples.lengths, -np.ones_like(rows), np.zeros_like(rows), np.arange(rows.size)
            )
        local, lengths = (samples.columns[one].astype(np.int64) for one in (PARENTS, NODE_LENGTHS))
        sample = np.repeat(np.arange(rows.size), rows)
        # Parents count from the first node of their sample: rows 1 3, parents -1 -1 0 0
        # become -1 -1 1 1.
        parents = np.where(local < 0, -1, local + (np.cumsum(rows) - rows)[sample])
        return cls(lengths, parents, depths_of_nodes(rows, local, lengths), sample)

    def longest_paths(self, num_samples: int) -> IntArray:
        """Returns the tokens of the longest path of each sample, int64 [n]."""
        longest = np.zeros(num_samples, np.int64)
        np.maximum.at(longest, self.sample, self.depths + self.lengths)
        return longest

    def tokens(self, num_samples: int, alignment: Alignment) -> IntArray:
        """Returns the tokens that each sample's nodes occupy in a pack, int64 [n]."""
        tokens = np.zeros(num_samples, np.int64)
        np.add.at(tokens, self.sample, alignment.padded_length(self.lengths))
        return tokens

    def squares(self, num_samples: int, alignment: Alignment) -> IntArray:
        """Returns twice the pairs of tokens that attend in each sample, int64 [n]: the sum over
        nodes of l^2 + 2 l d, for l tokens below d others. A sequence has L^2.
        """
        squares = np.zeros(num_samples, np.int64)
        padded = alignment.padded_length(self.lengths)
        np.add.at(squares, self.sample, padded * (padded + 2 * self.depths))
        return squares

    def path_tokens(self, num_samples: int) -> IntArray:
        """Returns the tokens of all paths from root to leaf of each sample, int64 [n]: what
        separate sequences would compute.
        """
        # Whoever is a parent is no leaf: parents -1 0 0 2    ->    F T F T
        is_leaf = np.ones(self.lengths.size, np.bool_)
        is_leaf[self.parents[self.parents >= 0]] = False
        tokens = np.zeros(num_samples, np.int64)
        np.add.at(tokens, self.sample[is_leaf], (self.depths + self.lengths)[is_leaf])
        return tokens


class SampleSizes(NamedTuple):
    """Sizes of n samples that schedulers and accounts look at; int64 [n] each."""

    padded: IntArray
    """Tokens that each occupies in a pack."""
    squares: IntArray
    """Twice the pairs of tokens that attend, without padding (see `Nodes.squares`)."""
    padded_squares: IntArray
    """The same with padding."""
    path_tokens: IntArray
    """Tokens of all paths."""

    @classmethod
    def of_trees(cls, samples: Samples, alignment: Alignment) -> SampleSizes | None:
        """Returns the sizes of samples among which may be trees; None where there are none."""
        if PARENTS not in samples.columns:
            return None
        nodes, num_samples = Nodes.of(samples), samples.lengths.size
        return cls(
            nodes.tokens(num_samples, alignment),
            nodes.squares(num_samples, Alignment()),
            nodes.squares(num_samples, alignment),
            nodes.path_tokens(num_samples),
        )

    @classmethod
    def of_sequences(cls, lengths: IntArray, alignment: Alignment) -> SampleSizes:
        """Returns the sizes of samples of which none is a tree."""
        padded = alignment.padded_length(lengths)
        return cls(padded, lengths**2, padded**2, lengths)
