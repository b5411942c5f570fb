"""pure. Reads the sample dicts of a user's iterator: sequences of Megatron-LM's data sets
(`tokens`) or HuggingFace's collators (`input_ids`), plain, padded or packed. `grammar` is the table
of all fields that are known, and `bounds` says where sequences begin and end.

Trees (see `tree`) have `tokens` and `parents`: the number of the parent of each of the sequences
that `cu_seqlens` bounds, -1 for none. Then `labels` are needed, and `num_paths` says how often each
token counts in the number of tokens that a loss is divided by (default: once where it has a loss).
`tree.merge` makes all of these; its result may be given as it is.

`tokens` is needed. Missing `labels` are the next tokens (the last one is unknown, so masked), and
labels of -100 are masked; a missing `loss_mask` is one, missing `position_ids` count from zero, a
missing `source` is 0. A field is a numpy array, a tensor or a list, [L] or [1, L]; arrays and
tensors [B, L] are B samples. `position_ids` may also be [3, L] (see `axes`).

A sample may have payloads beside its tokens (see `payloads`).

Any other field of numbers is an extra column (see `extra`), and travels with its sample; one whose
name begins with `path_` has a row per path (see `paths`).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from megatron.packing.batch.columns import (
    AXIS_POSITIONS,
    FIRST_PATH,
    NODE,
    NODE_LENGTHS,
    NUM_AXES,
    NUM_PATHS,
    PARENTS,
    PATH,
    PAYLOAD_COSTS,
    PAYLOADS,
    POSITION_IDS,
    Column,
    IntArray,
    count_from_zero,
    depths_of_nodes,
    next_tokens,
    split_at,
)
from megatron.packing.batch.extra import column_of
from megatron.packing.batch.grammar import IGNORED_LABEL
from megatron.packing.batch.item import MAX_ID, Item, items_of, joined_values, plain_item, read_item
from megatron.packing.batch.paths import with_path_tokens
from megatron.packing.batch.payloads import Payload
from megatron.packing.batch.samples import Samples
from megatron.packing.batch.tree import MergedPaths

Given = Mapping[str, Any] | MergedPaths
"""A sample of a user's iterator."""


CostOfPayload = Callable[[Mapping[str, Any]], float]
"""Function of what a sample has as `costs`: units of its payloads, by kind."""


class SampleError(ValueError):
    """A sample that cannot be trained on, and the number of the `next` call that gave it."""

    def __init__(self, fetch: int, text: str) -> None:
        super().__init__(text)
        self.fetch = fetch


class SampleReader:
    """Gathers the samples of many `next` calls; `samples` makes one `Samples` of them."""

    def __init__(
        self, payload_cost: CostOfPayload | None = None, warned: set[str] | None = None
    ) -> None:
        """Takes options.

        Args:
            payload_cost: function of a sample's `costs`; None where samples may have no payloads.
            warned: fields that the run was warned of. Each is added, and named in one warning.
        """
        self._warned: set[str] = set() if warned is None else warned
        self.payloads: list[Payload] = []
        """Payloads of all samples; the column `payloads` has the number of each sequence's."""
        self._payload_cost = payload_cost
        self._of_payloads: dict[int, float] = {}
        """Cost of each payload, by the number of its sequence."""
        self._items: list[Item] = []
        self._others: list[Item] = []
        """Those among them that are not plain: only these can have more than a sequence's fields.
        """
        self._kinds: set[tuple[str, ...]] = set()
        """Names of the fields that items have: one tuple where all have the same, as nearly always.
        """
        self._fetches: list[int] = []
        """Number of the fetch that each sequence or tree came with."""

    def add(self, given: Given | Iterable[Given], fetch: int) -> None:
        """Adds what `next` call number `fetch` returned: a dict, or any number of them.

        Raises ValueError for a dict that is no sample.
        """
        if isinstance(given, (dict, Mapping, MergedPaths)):
            self._add(given, fetch)
            return
        for one in given:
            self._add(one, fetch)

    def _add(self, given: Given, fetch: int) -> None:
        plain = plain_item(given)
        if plain is not None:
            self._items.append(plain)
            self._fetches.append(fetch)
            return
        for sample in items_of(given._asdict() if isinstance(given, MergedPaths) else given):
            item = read_item(sample, self._warn)
            self._items.append(item)
            self._others.append(item)
            if item.payload is not None:
                self._add_payload(item.payload, item.costs)
            self._fetches += [fetch] * len(item.lengths)

    def _warn(self, name: str, text: str) -> None:
        """Warns of a field of samples, once in a run."""
        if name not in self._warned:
            self._warned.add(name)
            warnings.warn(f"'{name}' of a sample {text}", stacklevel=2)

    def _add_payload(self, payload: Payload, costs: Mapping[str, Any]) -> None:
        """Adds the payload of the sequence that is added next."""
        if self._payload_cost is None:
            raise ValueError(
                "a sample has payloads, but there is nothing to move and bound them; pass "
                "plugin.install(config, arguments, payloads=PayloadStore())"
            )
        self._of_payloads[len(self._fetches)] = self._payload_cost(costs)
        self.payloads.append(payload)

    def samples(self) -> Samples:
        """Returns all sequences that were added.

        Raises SampleError for values that cannot be trained on.
        """
        if not self._items:
            return Samples.none()
        self._kinds = {tuple(item.fields) for item in self._items}
        lengths = self._lengths()
        num_tokens, ends = int(lengths.sum()), np.cumsum(lengths)
        tokens = joined_values([item.fields["tokens"] for item in self._items])
        self._check_ids("tokens", tokens, ends)
        tokens = tokens.astype(np.int32)
        labels = self._column("labels", lambda: next_tokens(tokens, tokens[ends - 1], ends))
        loss_mask = self._column("loss_mask", lambda: np.ones(num_tokens, np.float32))
        loss_mask = loss_mask.astype(np.float32, copy=False)
        least_label = self._check_ids("labels", labels, ends)
        position_ids = None
        if self._any_has("position_ids"):
            position_ids = self._column("position_ids", lambda: self._positions(lengths))
            self._check_ids("position_ids", position_ids, ends)
        # A NaN is the least of all. Only then are all values looked at for its place.
        if not np.isfinite((loss_mask.min(), loss_mask.max())).all():
            place = int(np.isfinite(loss_mask).argmin())
            raise SampleError(self._fetch_of(place, ends), "'loss_mask' must be finite, but is not")
        # Labels that were not given are the next tokens. Nothing follows a sequence's last token,
        # so that its label is unknown and must not count.
        if not self._all_have("labels"):
            has_labels = ["labels" in item.fields for item in self._items]
            unlabelled = ~np.repeat(has_labels, [item.size for item in self._items])
            loss_mask[ends[unlabelled[ends - 1]] - 1] = 0
        is_ignored = None
        if least_label <= IGNORED_LABEL:
            # -100 is a mask in HuggingFace's labels, and no id of a token.
            is_ignored = labels == IGNORED_LABEL
            loss_mask = np.where(is_ignored, np.float32(0), loss_mask)
            labels = np.where(is_ignored, 0, labels)
        sources = np.repeat(
            [item.source for item in self._items], [len(item.lengths) for item in self._items]
        ).astype(np.int32)
        samples = Samples.of(lengths, sources, tokens, labels, loss_mask, position_ids)
        if self._any_has("axis_positions"):
            samples = samples.with_columns({AXIS_POSITIONS: self._axis_positions(samples, ends)})
        self._warn_of_falls(samples, ends)
        samples = samples.with_columns(self._payload_columns())
        samples = self._with_nodes(samples, loss_mask, is_ignored, ends).with_columns(
            self._extra_columns()
        )
        return self._with_paths(samples)

    def _warn_of_falls(self, samples: Samples, ends: IntArray) -> None:
        """Warns of positions that restart within a sequence, which they do not bound."""
        for column in (POSITION_IDS, AXIS_POSITIONS):
            if column not in samples.columns or self._has_trees:
                continue
            steps = np.diff(samples.columns[column].reshape(len(samples.tokens), -1)[:, 0])
            steps[ends[:-1] - 1] = 1  # between two sequences
            if (steps < 0).any():
                self._warn(
                    "position_ids",
                    "restarts within a sequence; if another sequence begins there, say so by "
                    "'cu_seqlens'",
                )

    def _payload_columns(self) -> dict[Column, npt.NDArray[Any]]:
        if not self.payloads:
            return {}
        numbers, costs = np.full(len(self._fetches), -1, np.int64), np.zeros(len(self._fetches))
        places = list(self._of_payloads)
        numbers[places], costs[places] = np.arange(len(places)), [*self._of_payloads.values()]
        return {PAYLOADS: numbers, PAYLOAD_COSTS: costs}

    def _with_nodes(
        self,
        samples: Samples,
        loss_mask: npt.NDArray[np.float32],
        is_ignored: npt.NDArray[np.bool_] | None,
        ends: IntArray,
    ) -> Samples:
        """Returns the samples with the columns of trees, where there are any."""
        if self._any_has("num_paths"):
            counts = self._column("num_paths", lambda: (loss_mask != 0).astype(np.int32))
            if self._check_ids("num_paths", counts, ends) < 0:
                place = int((counts < 0).argmax())
                raise SampleError(
                    self._fetch_of(place, ends),
                    f"'num_paths' must be at least 0, but is {counts[place]}",
                )
            if is_ignored is not None:
                counts = np.where(is_ignored, 0, counts)
            if not np.array_equal(counts, loss_mask != 0):
                samples = samples.with_columns({NUM_PATHS: counts.astype(np.int32)})
        if not self._has_trees:
            return samples
        rows, parents, node_lengths = self._nodes(samples.lengths)
        columns = {PARENTS: parents, NODE_LENGTHS: node_lengths}
        return samples.with_columns(columns, {NODE: rows})

    def _with_paths(self, samples: Samples) -> Samples:
        """Returns the samples with the rows of their paths, where these have fields."""
        if not any(item.num_paths.size for item in self._others):
            return samples
        rows = np.concatenate([item.num_paths for item in self._items])
        first = self._column("first_path", lambda: np.zeros(samples.tokens.size, np.int32))
        return with_path_tokens(samples.with_columns({FIRST_PATH: first}, {PATH: rows}))

    def _nodes(self, lengths: IntArray) -> tuple[IntArray, npt.NDArray[Any], npt.NDArray[Any]]:
        """Returns the nodes of all samples as columns: nodes of each, parents, lengths."""
        parts: list[tuple[npt.NDArray[Any], ...]] = []
        start = 0
        for item in self._items:
            of_item = lengths[start : start + len(item.lengths)]
            start += of_item.size
            if item.trees is None:
                ones = np.ones_like(of_item)
                parts.append((ones, -ones, of_item))
            else:
                parts.append((item.trees.rows, item.trees.parents, item.trees.node_lengths))
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
        if not self._has_trees:
            return count_from_zero(lengths)
        rows, parents, node_lengths = self._nodes(lengths)
        depths = depths_of_nodes(rows, parents.astype(np.int64), node_lengths.astype(np.int64))
        return count_from_zero(node_lengths) + depths.repeat(node_lengths).astype(np.int32)

    def _extra_columns(self) -> dict[Column, npt.NDArray[Any]]:
        names = dict.fromkeys(name for item in self._others for name in item.extra)
        try:
            for name in names:
                if not all(name in item.extra for item in self._items):
                    raise ValueError(
                        f"'{name}' must be in all samples or in none, but some lack it"
                    )
            return dict(
                column_of(name, [item.extra[name] for item in self._items])
                for name in sorted(names)
            )
        except ValueError as error:
            raise SampleError(self._fetches[0], str(error)) from None

    @property
    def _has_trees(self) -> bool:
        return any(item.trees is not None for item in self._others)

    def _any_has(self, name: str) -> bool:
        return any(name in kind for kind in self._kinds)

    def _all_have(self, name: str) -> bool:
        return all(name in kind for kind in self._kinds)

    def _lengths(self) -> IntArray:
        return np.array([length for item in self._items for length in item.lengths], np.int64)

    @property
    def fetch(self) -> IntArray:
        """int64 [n]: number of the `next` call that gave each sequence."""
        return np.array(self._fetches, np.int64)

    def _column(self, name: str, make_default: Callable[[], npt.NDArray[Any]]) -> npt.NDArray[Any]:
        """Returns the values of all items, in a new array; the default's for items without them."""
        values = [item.fields.get(name) for item in self._items]
        if not self._all_have(name):
            ends = np.cumsum([item.size for item in self._items])[:-1]
            defaults = split_at(make_default(), ends)
            values = [
                default if value is None else value for value, default in zip(values, defaults)
            ]
        return joined_values(values)

    def _check_ids(self, name: str, ids: npt.NDArray[Any], ends: IntArray) -> int:
        """Returns the least id; SampleError for ids that are no integers, or too large."""
        if ids.dtype.kind not in "iu":
            raise SampleError(self._fetches[0], f"'{name}' must be integers, but are {ids.dtype}")
        least = int(ids.min())
        if ids.max() > MAX_ID or least < -MAX_ID:
            place = int((np.abs(ids.ravel()) > MAX_ID).argmax())
            raise SampleError(
                self._fetch_of(place // ids[0].size, ends),
                f"'{name}' must be below 2**31, but has {ids.ravel()[place]}",
            )
        return least

    def _fetch_of(self, place: int, ends: IntArray) -> int:
        return self._fetches[int(np.searchsorted(ends, place, side="right"))]


def read_samples(given: Given | Iterable[Given]) -> Samples:
    """Returns the sequences of one `next` call's result.

    Raises ValueError for values that cannot be trained on.
    """
    reader = SampleReader()
    reader.add(given, 0)
    return reader.samples()
