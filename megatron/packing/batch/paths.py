"""pure. Paths of trees that are distinguished: fields with a row per path, and which paths train a
token.

The paths of a tree are numbered in the order in which its nodes stand, so that those that go
through a token are neighbours: from `first_path` on, as many as `num_paths` says where it is
trained. For that, paths with fields are merged while it also agrees whether they train a token.

    paths 7 8 9 | 7 8 5 6    ->    tokens 7 | 8 9 | 8 5 6    first_path 0 | 0 0 | 1 1 1
    ids   40    | 41                                         path_ids   40 41
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from megatron.packing.batch.columns import (
    FIRST_PATH,
    NUM_PATHS,
    PATH,
    Column,
    IntArray,
    expand_ranges,
)
from megatron.packing.batch.samples import Samples
from megatron.packing.batch.tree import MergedPaths, Path, TreeError, merge

PREFIX = "path_"
"""Fields of a sample whose names begin so have one row per path."""
PATH_TOKENS = Column("path_tokens", "int32", PATH, extra=True)
"""Number of trained tokens of each path, also where a pack has only a part of its tree."""


def merge_with_fields(paths: Sequence[Path], **of_paths: Any) -> dict[str, npt.NDArray[Any]]:
    """Merges paths, as `tree.merge` does, into a sample with fields of each path.

    Args:
        of_paths: one row per path each: ids=[7, 8] and reward=[.5, 1] become `path_ids` and
            `path_reward`, in the order of the tree's paths.

    A first token that no path trains is shared whatever its label.

    Raises TreeError for other numbers of rows, for paths that do not begin alike, which no pack
    would have to keep together, and for weights below 0: a token that a path trains must have a
    loss.
    """
    for name, rows in of_paths.items():
        if len(rows) != len(paths):
            raise TreeError(
                f"'{name}' must have one row per path ({len(paths)}), but has {len(rows)}"
            )
    trained = [path.weights != 0 for path in paths]
    if any((path.weights < 0).any() for path in paths):
        raise TreeError("paths with fields must have weights of at least 0")
    # Merged by label and whether it is trained: 2 l, or 2 l + 1.
    marked = [
        path._replace(
            labels=np.asarray(path.labels, np.int64) * 2 + mask,
            loss_mask=path.weights,
        )
        for path, mask in zip(paths, trained)
    ]
    marked = _begun_alike(marked)
    merged = merge(marked)
    ends = _ends(merged, marked)
    order = np.argsort(ends, kind="stable")
    rows_of = {f"{PREFIX}{name}": np.asarray(rows)[order] for name, rows in of_paths.items()}
    whole = merged._replace(labels=merged.labels // 2)._asdict()
    return {**whole, "first_path": _first_paths(merged, ends[order]), **rows_of}


def _begun_alike(marked: Sequence[Path]) -> list[Path]:
    """Returns paths whose first pair of token and label is one; TreeError where it cannot be."""
    if any(not len(path.tokens) for path in marked):
        return [*marked]  # `merge` refuses an empty one
    first_labels = [int(path.labels[0]) for path in marked]
    if all(label % 2 == 0 for label in first_labels):  # trained by none
        marked = [
            path._replace(labels=np.append(first_labels[0], path.labels[1:])) for path in marked
        ]
    begins = [(int(path.tokens[0]), int(path.labels[0])) for path in marked]
    for number, (token, label) in enumerate(begins):
        if (token, label) != begins[0]:
            raise TreeError(
                "paths with fields must begin with one token, label and mask, but path 0 begins "
                f"with {_shown(*begins[0])} and path {number} with {_shown(token, label)}; mask "
                "the first token, begin both with one more token, or merge each group apart"
            )
    return [*marked]


def _shown(token: int, label: int) -> str:
    return f"token {token}, label {label // 2}, {'trained' if label % 2 else 'masked'}"


def _ends(merged: MergedPaths, paths: Sequence[Path]) -> IntArray:
    """Returns for each path the place behind its last token: node * T + tokens of the node.

    They rise as nodes do, and a path that ends within a node comes before those that go on.
    """
    bounds, size = merged.cu_seqlens.tolist(), merged.tokens.size + 1
    node_of: dict[tuple[int, int, int], int] = {}  # by parent and first token and label
    for node, (start, parent) in enumerate(zip(bounds, merged.parents.tolist())):
        node_of[parent, int(merged.tokens[start]), int(merged.labels[start])] = node
    ends = []
    for path in paths:
        node, at, taken = -1, 0, 0
        while at < len(path.tokens):
            node = node_of[node, int(path.tokens[at]), int(path.labels[at])]
            taken = min(bounds[node + 1] - bounds[node], len(path.tokens) - at)
            at += taken
        ends.append(node * size + taken)
    return np.array(ends, np.int64)


def _first_paths(merged: MergedPaths, ends: IntArray) -> npt.NDArray[np.int32]:
    """Returns the number of the first path through each token, of paths sorted by their ends: as
    many as end before it.
    """
    lengths = np.diff(merged.cu_seqlens)
    nodes = np.arange(lengths.size) * (merged.tokens.size + 1)
    places = expand_ranges(nodes, lengths)
    return np.searchsorted(ends, places, side="right").astype(np.int32)


def rows_of_paths(
    fields: dict[str, npt.NDArray[Any]], of_paths: Mapping[str, npt.NDArray[Any]], lengths: IntArray
) -> IntArray:
    """Returns how many paths each sequence or tree of a sample has; none without fields `of_paths`.

    `first_path` in `fields`, which counts through the sample, then counts from each one's first.

    Raises ValueError for fields of other numbers of rows.
    """
    given = fields.pop("first_path", None)
    if not of_paths:
        return np.empty(0, np.int64)
    name, num_paths = next((name, len(values)) for name, values in of_paths.items())
    for other, values in of_paths.items():
        if len(values) != num_paths:
            raise ValueError(f"'{other}' must have one row per path, as '{name}' ({num_paths})")
    if given is None:
        if num_paths != lengths.size:
            raise ValueError(
                f"'{name}' must have one row per sequence ({lengths.size}), but has {num_paths}; "
                "make trees whose paths have fields with merge_with_fields"
            )
        return np.ones_like(lengths)
    # Two trees of 3 and 2 tokens, first_path 0 0 1 2 2 of 3 paths    ->    rows 2 1, and from each
    # tree's own first path 0 0 1 0 0
    starts = np.cumsum(lengths) - lengths
    rows = np.diff(np.append(given[starts], num_paths)).astype(np.int64)
    first = given - np.repeat(given[starts], lengths)
    counts = fields.get("num_paths", np.ones_like(first))
    if (
        given[0]
        or (rows < 1).any()
        or (first < 0).any()
        or (first + counts > np.repeat(rows, lengths)).any()
    ):
        raise ValueError(
            f"'first_path' must number {num_paths} paths in the order of the nodes, as "
            "merge_with_fields does"
        )
    fields["first_path"] = first.astype(np.int32)
    return rows


class TrainedBy(NamedTuple):
    """Pairs of a token and a path that trains it; int64 [m] each."""

    token: IntArray
    path: IntArray


def trained_by(samples: Samples) -> TrainedBy:
    """Returns the pairs of samples, tokens and paths numbered over all of them, by token."""
    whole = samples.with_schema((FIRST_PATH, NUM_PATHS))
    rows = samples.sizes.rows(PATH)
    before = np.repeat(np.cumsum(rows) - rows, samples.lengths)  # paths of earlier samples
    counts = whole.columns[NUM_PATHS].astype(np.int64)
    first = whole.columns[FIRST_PATH] + before
    # Two tokens, first 0 1, counts 2 1    ->    token 0 0 1, path 0 1 1
    return TrainedBy(np.repeat(np.arange(counts.size), counts), expand_ranges(first, counts))


def with_path_tokens(samples: Samples) -> Samples:
    """Returns samples with PATH_TOKENS, where their paths have fields."""
    if PATH not in samples.sizes.ragged:
        return samples
    num_paths = samples.sizes.num_rows(PATH)
    tokens = np.bincount(trained_by(samples).path, minlength=num_paths).astype(np.int32)
    return samples.with_columns({PATH_TOKENS: tokens})
