"""pure. Reads the sample dicts of a user's iterator, in the three shapes of Megatron-LM's data
sets.

    several sequences   `cu_seqlens` (repeated entries at its tail are padding; `cu_seqlens_padded`
                        says where each sequence starts)
    one padded          real up to `original_seq_len`
    one plain

and as trees (see `tree`): `parents` names the parent of each of the sequences that `cu_seqlens`
bounds, by number, -1 for none. Then `labels` are needed, and `num_paths` says how often each token
counts in the number of tokens that a loss is divided by (default: once where it has a loss).

`tokens` is needed. Missing `labels` are the next tokens (the last one is unknown, so masked), and
labels of -100 are masked; a missing `loss_mask` is one, missing `position_ids` count from zero, a
missing `source` is 0. A field is a numpy array, a tensor or a list, [L] or [1, L]; arrays and
tensors [B, L] are B samples. `position_ids` may also be [3, L] (see `axes`). A dict with
`input_ids` and no `tokens` comes from HuggingFace's collators (see `huggingface`).

Any other field of numbers is an extra column (see `extra`), and travels with its sample.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from megatron.packing.batch.axes import has_axes, without_axes
from megatron.packing.batch.columns import (
    AXIS_POSITIONS,
    NODE,
    NODE_LENGTHS,
    NUM_AXES,
    NUM_PATHS,
    PARENTS,
    POSITION_IDS,
    Column,
    IntArray,
    count_from_zero,
    depths_of_nodes,
    expand_ranges,
    next_tokens,
)
from megatron.packing.batch.extra import Rows, column_of, extra_fields, rows_of
from megatron.packing.batch.huggingface import IGNORED, as_megatron_sample
from megatron.packing.batch.samples import Samples
from megatron.packing.batch.tree import Trees, checked_trees

_LIMIT = 2**31
"""Ids travel as int32. Larger ones are refused, as they would be changed."""
_FIELDS = ("tokens", "labels", "loss_mask", "position_ids", "num_paths")
_HUGGINGFACE = (
    "input_ids",
    "labels",
    "loss_mask",
    "position_ids",
    "attention_mask",
    "cu_seq_lens_q",
)


class SampleError(ValueError):
    """A sample that cannot be trained on, and the number of the `next` call that gave it."""

    def __init__(self, fetch: int, text: str) -> None:
        super().__init__(text)
        self.fetch = fetch


class SampleReader:
    """Gathers the samples of many `next` calls; `samples` makes one `Samples` of them."""

    def __init__(self) -> None:
        self._items: list[dict[str, npt.NDArray[Any]]] = []
        """Fields of each sample by name; a sample may hold several sequences."""
        self._extra: list[dict[str, Rows]] = []
        self._trees: dict[int, Trees] = {}
        """Nodes of the items that have parents, by the item's number."""
        self._num_samples: list[int] = []
        """Sequences or trees of each item."""
        self._lengths: list[int] = []
        self._sources: list[int] = []
        self._fetches: list[int] = []

    def add(self, given: Mapping[str, Any] | Iterable[Mapping[str, Any]], fetch: int) -> None:
        """Adds what `next` call number `fetch` returned: a dict, or any number of them.

        Raises ValueError for a dict that is no sample.
        """
        for item in (given,) if isinstance(given, Mapping) else given:
            shape: tuple[int, ...] = getattr(item.get("tokens", item.get("input_ids")), "shape", ())
            if len(shape) == 2 and shape[0] > 1:
                for row in range(shape[0]):
                    self._add_item(_row(item, row, shape[0]), fetch)
            else:
                self._add_item(item, fetch)

    def _add_item(self, item: Mapping[str, Any], fetch: int) -> None:
        if item.get("tokens") is None and item.get("input_ids") is not None:
            item = _from_huggingface(without_axes(item))
        given = _given_fields(without_axes(item))
        size = given["tokens"].size
        source = _number(item.get("source", 0))
        if not 0 <= source < _LIMIT:
            raise ValueError(f"'source' must be from 0 to {_LIMIT - 1}, but is {source}")
        extra, lengths = extra_fields(item, size), [size]
        has_layout = item.get("cu_seqlens") is not None or item.get("original_seq_len") is not None
        if size == 0 or has_layout or item.get("parents") is not None:
            starts, sizes = _sequences(item, size)
            lengths = sizes[sizes > 0].tolist()
            if item.get("parents") is not None:
                trees = _trees(item, sizes)
                if trees.parents.size > trees.rows.size:
                    self._trees[len(self._items)] = trees
                starts, sizes, lengths = (
                    starts[trees.order],
                    sizes[trees.order],
                    trees.lengths.tolist(),
                )
            index = expand_ranges(starts, sizes)  # of the real tokens
            given = {name: values[index] for name, values in given.items()}
            extra = {
                name: values[index] if values.shape[:1] == (size,) else values
                for name, values in extra.items()
            }
        num_tokens = given["tokens"].size
        self._extra.append(
            {name: rows_of(name, its, num_tokens, len(lengths)) for name, its in extra.items()}
        )
        self._items.append(given)
        self._num_samples.append(len(lengths))
        self._lengths += lengths
        self._sources += [source] * len(lengths)
        self._fetches += [fetch] * len(lengths)

    def samples(self) -> Samples:
        """Returns all sequences that were added.

        Raises SampleError for values that cannot be trained on.
        """
        if not self._items:
            return Samples.none()
        lengths = np.array(self._lengths, np.int64)
        num_tokens, ends = int(lengths.sum()), np.cumsum(lengths)
        tokens = np.concatenate([item["tokens"] for item in self._items])
        self._check_ids("tokens", tokens, ends)
        tokens = tokens.astype(np.int32)
        labels = self._column("labels", lambda: next_tokens(tokens, tokens[ends - 1], ends))
        loss_mask = self._column("loss_mask", lambda: np.ones(num_tokens, np.float32))
        loss_mask = loss_mask.astype(np.float32, copy=False)
        least_label = self._check_ids("labels", labels, ends)
        position_ids = None
        if any("position_ids" in item for item in self._items):
            position_ids = self._column("position_ids", lambda: self._positions(lengths))
            self._check_ids("position_ids", position_ids, ends)
        # One sum finds a NaN or an infinity; only then are all values looked at for its place.
        if not np.isfinite(loss_mask.sum(dtype=np.float64)):
            place = int(np.isfinite(loss_mask).argmin())
            raise SampleError(self._fetch_of(place, ends), "'loss_mask' must be finite, but is not")
        # Labels that were not given are the next tokens. Nothing follows a sequence's last token,
        # so that its label is unknown and must not count.
        has_labels = ["labels" in item for item in self._items]
        if not all(has_labels):
            unlabelled = ~np.repeat(has_labels, [item["tokens"].size for item in self._items])
            loss_mask[ends[unlabelled[ends - 1]] - 1] = 0
        if least_label <= IGNORED:  # -100 is a mask in HuggingFace's labels, and no id of a token
            ignored = labels == IGNORED
            loss_mask, labels = (
                np.where(ignored, np.float32(0), loss_mask),
                np.where(ignored, 0, labels),
            )
        sources = np.array(self._sources, np.int32)
        samples = Samples.of(lengths, sources, tokens, labels, loss_mask, position_ids)
        if any("axis_positions" in item for item in self._items):
            samples = samples.with_columns({AXIS_POSITIONS: self._axis_positions(samples, ends)})
        return self._with_nodes(samples, loss_mask, ends).with_columns(self._extra_columns())

    def _with_nodes(
        self, samples: Samples, loss_mask: npt.NDArray[np.float32], ends: IntArray
    ) -> Samples:
        """Returns the samples with the columns of trees, where there are any."""
        if any("num_paths" in item for item in self._items):
            counts = self._column("num_paths", lambda: (loss_mask != 0).astype(np.int32))
            if self._check_ids("num_paths", counts, ends) < 0:
                place = int((counts < 0).argmax())
                raise SampleError(
                    self._fetch_of(place, ends),
                    f"'num_paths' must be at least 0, but is {counts[place]}",
                )
            if not np.array_equal(counts, loss_mask != 0):
                samples = samples.with_columns({NUM_PATHS: counts.astype(np.int32)})
        if not self._trees:
            return samples
        rows, parents, node_lengths = self._nodes(samples.lengths)
        columns = {PARENTS: parents, NODE_LENGTHS: node_lengths}
        return samples.with_columns(columns, {NODE: rows})

    def _nodes(self, lengths: IntArray) -> tuple[IntArray, npt.NDArray[Any], npt.NDArray[Any]]:
        """Returns the nodes of all samples as columns: nodes of each, parents, lengths."""
        parts: list[tuple[npt.NDArray[Any], ...]] = []
        start = 0
        for number, num_samples in enumerate(self._num_samples):
            of_item = lengths[start : start + num_samples]
            start += num_samples
            trees = self._trees.get(number)
            if trees is None:
                ones = np.ones(num_samples, np.int64)
                parts.append((ones, -ones, of_item))
            else:
                parts.append((trees.rows, trees.parents, trees.node_lengths))
        rows, parents, node_lengths = (np.concatenate(values) for values in zip(*parts))
        return rows, parents.astype(np.int32), node_lengths.astype(np.int32)

    def _axis_positions(self, samples: Samples, ends: IntArray) -> npt.NDArray[np.int32]:
        def default() -> npt.NDArray[Any]:
            positions = samples.columns.get(POSITION_IDS)
            positions = self._positions(samples.lengths) if positions is None else positions
            return np.repeat(positions[:, None], NUM_AXES, axis=1)

        positions = self._column("axis_positions", default)
        self._check_ids("position_ids", positions, ends)
        return positions.astype(np.int32)

    def _positions(self, lengths: IntArray) -> npt.NDArray[np.int32]:
        """Returns positions along the path, of all tokens."""
        if not self._trees:
            return count_from_zero(lengths)
        rows, parents, node_lengths = self._nodes(lengths)
        depths = depths_of_nodes(rows, parents.astype(np.int64), node_lengths.astype(np.int64))
        return count_from_zero(node_lengths) + depths.repeat(node_lengths).astype(np.int32)

    def _extra_columns(self) -> dict[Column, npt.NDArray[Any]]:
        names = dict.fromkeys(name for item in self._extra for name in item)
        try:
            for name in names:
                if not all(name in item for item in self._extra):
                    raise ValueError(
                        f"'{name}' must be in all samples or in none, but some lack it"
                    )
            return dict(
                column_of(name, [item[name] for item in self._extra]) for name in sorted(names)
            )
        except ValueError as error:
            raise SampleError(self._fetches[0], str(error)) from None

    @property
    def fetch(self) -> IntArray:
        """int64 [n]: number of the `next` call that gave each sequence."""
        return np.array(self._fetches, np.int64)

    def _column(self, name: str, make_default: Callable[[], npt.NDArray[Any]]) -> npt.NDArray[Any]:
        """Returns the values of all items, in a new array; the default's for items without them."""
        values = [item.get(name) for item in self._items]
        if any(its is None for its in values):
            ends = np.cumsum([item["tokens"].size for item in self._items])[:-1]
            defaults = np.split(make_default(), ends)
            values = [default if its is None else its for its, default in zip(values, defaults)]
        return np.concatenate(values)  # type: ignore[arg-type]

    def _check_ids(self, name: str, ids: npt.NDArray[Any], ends: IntArray) -> int:
        """Returns the least id; SampleError for ids that are no integers, or too large."""
        if ids.dtype.kind not in "iu":
            raise SampleError(self._fetches[0], f"'{name}' must be integers, but are {ids.dtype}")
        least = int(ids.min())
        if ids.max() >= _LIMIT or least <= -_LIMIT:
            place = int((np.abs(ids.ravel()) >= _LIMIT).argmax())
            raise SampleError(
                self._fetch_of(place // ids[0].size, ends),
                f"'{name}' must be below 2**31, but has {ids.ravel()[place]}",
            )
        return least

    def _fetch_of(self, place: int, ends: IntArray) -> int:
        return self._fetches[int(np.searchsorted(ends, place, side="right"))]


def read_samples(given: Mapping[str, Any] | Iterable[Mapping[str, Any]]) -> Samples:
    """Returns the sequences of one `next` call's result.

    Raises ValueError for values that cannot be trained on.
    """
    reader = SampleReader()
    reader.add(given, 0)
    return reader.samples()


def _given_fields(item: Mapping[str, Any]) -> dict[str, npt.NDArray[Any]]:
    """Returns the fields that an item has, [L] each; ValueError where lengths differ."""
    given = {name: _flat(item[name]) for name in _FIELDS if item.get(name) is not None}
    if "tokens" not in given:
        raise ValueError(
            f"a sample must have the key 'tokens' or 'input_ids', but has {sorted(item)}"
        )
    if item.get("axis_positions") is not None:
        given["axis_positions"] = np.asarray(item["axis_positions"])
    size = given["tokens"].size
    for name, values in given.items():
        if len(values) != size:
            raise ValueError(f"'{name}' must be as long as 'tokens' ({size}), but is {len(values)}")
    return given


def _from_huggingface(item: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a sample of HuggingFace's collators in Megatron-LM's form, with its other fields."""
    given = {name: _flat(item[name]) for name in _HUGGINGFACE if item.get(name) is not None}
    size = given["input_ids"].size
    if item.get("axis_positions") is not None:
        given["axis_positions"] = item["axis_positions"]
    extra = extra_fields(item, size)
    per_token = {name: values for name, values in extra.items() if values.shape[:1] == (size,)}
    return {**extra, "source": item.get("source", 0), **as_megatron_sample({**given, **per_token})}


def _sequences(item: Mapping[str, Any], size: int) -> tuple[IntArray, IntArray]:
    """Returns the first token and the length of each sequence in an item of `size` tokens.

    At least one has tokens. Repeated entries at the tail of `cu_seqlens` are sequences without any:

        cu_seqlens 0 3 5 5, cu_seqlens_padded 0 4 8 8    ->    starts 0 4 8, lengths 3 2 0
    """
    if item.get("cu_seqlens") is None:
        length = _number(item.get("original_seq_len", size))
        if not 0 < length <= size:
            raise ValueError(
                f"a sample must have at least one token, but has {length} of {size} tokens"
            )
        return np.zeros(1, np.int64), np.array([length])
    ends = _flat(item["cu_seqlens"]).astype(np.int64)
    lengths = np.diff(ends)
    if ends.size < 2 or ends[0] != 0 or lengths.min() < 0 or not 0 < ends[-1] <= size:
        raise ValueError(
            f"'cu_seqlens' must rise from 0 to 1 to {size} tokens, but is {ends.tolist()}"
        )
    starts = ends[:-1]
    if item.get("cu_seqlens_padded") is not None:
        padded = _flat(item["cu_seqlens_padded"]).astype(np.int64)
        if padded.size != ends.size:
            raise ValueError(
                f"'cu_seqlens_padded' must have {ends.size} entries, but has {padded.size}"
            )
        starts = padded[:-1]
        if (starts < 0).any() or (starts + lengths > size).any():
            raise ValueError(
                f"'cu_seqlens_padded' must place sequences within {size} tokens, but is "
                f"{padded.tolist()}"
            )
    return starts, lengths


def _trees(item: Mapping[str, Any], lengths: IntArray) -> Trees:
    """Returns the trees of an item, whose nodes have these lengths.

    ValueError for `parents` that make no tree, and without labels: the token after a node's last
    is another one in each path.
    """
    if item.get("cu_seqlens") is None or item.get("labels") is None:
        raise ValueError("'parents' must come with 'cu_seqlens' and 'labels', but one is missing")
    return checked_trees(lengths, _flat(item["parents"]).astype(np.int64))


def _row(item: Mapping[str, Any], row: int, num_rows: int) -> dict[str, Any]:
    """Returns one sample of a batch; a value without an entry for each row is the same for all."""
    sample = {
        name: value[row] if tuple(np.shape(value))[:1] == (num_rows,) else value
        for name, value in item.items()
    }
    positions: Any = item.get("position_ids")
    if np.ndim(positions) == 3 and has_axes(positions):  # [3, B, L], also where B is 3
        sample["position_ids"] = positions[:, row]
    return sample


def _number(value: Any) -> int:
    """Returns a number, or the only one of an array or a tensor."""
    return int(value.item() if hasattr(value, "item") else value)


def _flat(values: Any) -> npt.NDArray[Any]:
    if isinstance(values, np.ndarray) and values.ndim == 1:
        return values
    if hasattr(values, "detach"):  # a tensor, without importing torch
        values = values.detach().cpu()
        values = (values.float() if values.is_floating_point() else values).numpy()
    array = np.asarray(values)
    if array.ndim > 1 and array.size != array.shape[-1]:
        raise ValueError(
            f"a sample's fields must be [L] or [1, L], but one is {list(array.shape)}; "
            "hand rows over as a list of samples"
        )
    return array.reshape(-1)
