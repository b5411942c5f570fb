"""pure. One sample dict of a user's iterator: its fields, and the sequences or trees in it.

See `reading` for what a dict may hold.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from megatron.packing.batch import grammar
from megatron.packing.batch.axes import has_axes, without_axes
from megatron.packing.batch.bounds import (
    as_array,
    check_nodes,
    read_bounds,
    read_integers,
    read_spans,
)
from megatron.packing.batch.columns import IntArray
from megatron.packing.batch.extra import (
    Rows,
    Warn,
    extra_fields,
    moved_left,
    rows_of,
    warn_of_own_fields,
)
from megatron.packing.batch.paths import PREFIX, rows_of_paths
from megatron.packing.batch.payloads import Payload, payload_of
from megatron.packing.batch.tree import Trees, checked_trees

MAX_ID = 2**31 - 1
"""Ids travel as int32. Larger ones are refused, as they would be changed."""
_FIELDS = frozenset(("tokens", "labels", "loss_mask", "position_ids", "num_paths", "first_path"))
_PLAIN = frozenset(("tokens", "labels", "loss_mask", "position_ids", "source"))
"""Keys of a dict that is one sequence, with nothing besides; most are."""
_INPUT_FIELDS = frozenset(("position_ids", "axis_positions"))
"""Fields of a token as it is read; all others belong to what is predicted."""

NO_PATHS: IntArray = np.empty(0, np.int64)


class Item(NamedTuple):
    """Content of a dict, without its padding: T tokens of sequences or trees."""

    fields: dict[str, Any]
    """Fields that it has of tokens (always), labels, loss_mask, position_ids, num_paths: [T];
    axis_positions: [T, 3]. Arrays, or tensors that `joined_values` makes one array of.
    """
    extra: dict[str, Rows]
    lengths: list[int]
    """Tokens of each sequence or tree."""
    source: int
    trees: Trees | None = None
    """The nodes, where any sample has several."""
    num_paths: IntArray = NO_PATHS
    """Paths of each sequence or tree, where they have fields."""
    payload: Payload | None = None
    """Payloads beside the tokens; an item with any is one sequence."""
    costs: Mapping[str, Any] = MappingProxyType({})
    """Units of the payload by kind."""

    @property
    def size(self) -> int:
        """Tokens of the item."""
        return sum(self.lengths)


def plain_item(given: object) -> Item | None:
    """Reads a dict that is one sequence with nothing besides, as most are: arrays or tensors of one
    length, [L] or [1, L]. Returns None for any other, which `read_item` reads or refuses.
    """
    if not isinstance(given, dict) or not given.keys() <= _PLAIN:
        return None
    fields: dict[str, Any] = dict(given)
    source, size = fields.pop("source", 0), None
    for name, values in fields.items():
        # Tensors are converted together, by `joined_values`: one alone takes as long as all else.
        if type(values) is not np.ndarray and not getattr(values, "is_cpu", False):
            return None
        shape = values.shape
        if len(shape) == 2 and shape[0] == 1:
            fields[name], shape = values[0], shape[1:]
        if len(shape) != 1 or size not in (None, shape[0]):
            return None
        size = shape[0]
    if not size or "tokens" not in fields or type(source) is not int or not 0 <= source <= MAX_ID:
        return None
    return Item(fields, {}, [size], source)


def joined_values(values: Sequence[Any]) -> npt.NDArray[Any]:
    """Returns the values of a field of several items in a new array."""
    has_arrays = any(isinstance(each, np.ndarray) for each in values)
    if not has_arrays and len({each.dtype for each in values}) == 1:
        import torch  # it is there, as somebody made the tensors

        try:
            joined: npt.NDArray[Any] = torch.cat(list(values)).numpy()
            return joined
        except (RuntimeError, TypeError):  # with a gradient, or of a type of torch's alone
            pass
    return np.concatenate([as_array("", each) for each in values])


def items_of(given: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Returns a dict of one sample each; several of a batch of rows [B, L]."""
    tokens = given.get("tokens")
    tokens = given.get("input_ids") if tokens is None else tokens
    shape: tuple[int, ...] = getattr(tokens, "shape", ())
    if len(shape) != 2 or shape[0] < 2:
        return [given]
    payload_of(given, shape[0])  # refused: nothing says which row each is of
    return [_row(given, row, shape[0]) for row in range(shape[0])]


def read_item(item: Mapping[str, Any], warn: Warn) -> Item:
    """Reads one dict; ValueError for what is no sample.

    Args:
        warn: called for each field that bounds or masks nothing here and does elsewhere.
    """
    whole, item = item, without_axes(item)
    is_moved = item.get("tokens") is None and item.get("input_ids") is not None
    fields = _given_fields(item)
    size = len(fields["tokens"])
    payload = payload_of(whole, 1)
    _check_form(item, is_moved=is_moved)
    source = _number("source", item.get("source", 0))
    if not 0 <= source <= MAX_ID:
        raise ValueError(f"'source' must be from 0 to {MAX_ID}, but is {source}")
    extra = extra_fields(item, size, warn)
    index, lengths, trees = _layout(item, fields, is_moved=is_moved)
    if payload is not None:
        payload = payload_of(whole, len(lengths))
    if index is not None:
        fields = {name: values[index] for name, values in fields.items()}
    warn_of_own_fields(extra, lengths, warn)
    if is_moved:
        fields = _moved_fields(
            fields, lengths, has_labels=item.get("shift_labels") is not None, warn=warn
        )
    of_paths = {name: extra.pop(name) for name in list(extra) if name.startswith(PREFIX)}
    has_paths = bool(of_paths) or "first_path" in fields
    num_paths = rows_of_paths(fields, of_paths, lengths) if has_paths else NO_PATHS
    rows = {
        name: rows_of(name, values, size, index, lengths, is_moved=is_moved)
        for name, values in extra.items()
    }
    rows |= {name: Rows(None, None, values) for name, values in of_paths.items()}
    has_branches = trees is not None and trees.parents.size > trees.rows.size
    costs = {} if payload is None else whole.get("costs") or {}
    kept = trees if has_branches else None
    return Item(fields, rows, lengths.tolist(), source, kept, num_paths, payload, costs)


def _given_fields(item: Mapping[str, Any]) -> dict[str, npt.NDArray[Any]]:
    """Returns the fields that an item has, [L] each; ValueError where lengths differ."""
    given = {
        name: _flat(name, values)
        for name, values in item.items()
        if name in _FIELDS and values is not None
    }
    ids = "tokens" if "tokens" in given else "input_ids"
    if item.get("input_ids") is not None:
        input_ids = _flat("input_ids", item["input_ids"])
        if not np.array_equal(given.setdefault("tokens", input_ids), input_ids):
            raise ValueError("'input_ids' must be those of 'tokens', but differ; leave out either")
    if "tokens" not in given:
        raise ValueError(
            f"a sample must have the key 'tokens' or 'input_ids', but has {sorted(item)}"
        )
    if item.get("shift_labels") is not None:
        given["labels"] = _flat("shift_labels", item["shift_labels"])
    if item.get("axis_positions") is not None:
        given["axis_positions"] = np.asarray(item["axis_positions"])
    size = given["tokens"].size
    for name, values in given.items():
        if len(values) != size:
            raise ValueError(f"'{name}' must be as long as '{ids}' ({size}), but is {len(values)}")
    return given


def _check_form(item: Mapping[str, Any], *, is_moved: bool) -> None:
    """Raises ValueError for a field that the sample's form refuses."""
    grammar.refuse(item, "input_ids" if is_moved else "tokens")
    if item.get("parents") is not None:
        grammar.refuse(item, "tree")


def _layout(
    item: Mapping[str, Any], fields: Mapping[str, npt.NDArray[Any]], *, is_moved: bool
) -> tuple[IntArray | None, IntArray, Trees | None]:
    """Returns the places of the real tokens (None for all), the tokens of each sequence or tree,
    and the trees if there are any.
    """
    size = len(fields["tokens"])
    if item.get("parents") is None:
        positions = fields.get("position_ids") if is_moved else None
        return *read_bounds(item, size, positions), None
    # The token after a node's last is another one in each path, so no label can be derived.
    spans = read_spans(item, size)
    if spans is None or "labels" not in fields:
        raise ValueError("'parents' must come with 'cu_seqlens' and 'labels', but one is missing")
    check_nodes(item, size, spans)
    trees = checked_trees(spans.lengths, read_integers("parents", item["parents"]))
    nodes = spans._replace(starts=spans.starts[trees.order], lengths=spans.lengths[trees.order])
    return nodes.places, trees.lengths, trees


def _moved_fields(
    fields: Mapping[str, npt.NDArray[Any]], lengths: IntArray, *, has_labels: bool, warn: Warn
) -> dict[str, npt.NDArray[Any]]:
    """Returns the fields of HuggingFace's collators in Megatron-LM's form: a label stands above its
    own token there, and above the token before it here. None of them leaves its sequence.

        input_ids  5 6 7 8        tokens  5 6 7 8
        labels     . . 7 8   ->   labels  . 7 8 .

    Args:
        has_labels: whether the labels are those of the next tokens already.
    """
    ends = np.cumsum(lengths)
    moved = dict(fields)
    if "labels" in fields and not has_labels:
        labels = fields["labels"]
        _warn_of_next_tokens(fields["tokens"], labels, warn)
        # A type without a sign has no room for -100.
        labels = labels.astype(np.int64) if labels.dtype.kind == "u" else labels
        moved["labels"] = moved_left(labels, ends, grammar.IGNORED_LABEL)
    if "loss_mask" in fields:
        moved["loss_mask"] = moved_left(fields["loss_mask"], ends, 0)
    if "position_ids" in fields:
        steps = np.diff(fields["position_ids"])
        steps[ends[:-1] - 1] = 1  # between two sequences
        if (steps > 1).any():
            warn(
                "position_ids",
                "skips ahead within a sequence, where transformers begins another one at times; "
                "if one begins there, say so by 'cu_seqlens'",
            )
    return moved


def _warn_of_next_tokens(tokens: npt.NDArray[Any], labels: npt.NDArray[Any], warn: Warn) -> None:
    """Warns of labels that look as if they had been moved already."""
    trained = np.flatnonzero(labels[:-1] != grammar.IGNORED_LABEL)
    is_own = labels[trained] == tokens[trained]
    if trained.size > 1 and not is_own.any() and (labels[trained] == tokens[trained + 1]).all():
        warn(
            "labels",
            "with 'input_ids' are those of the next tokens, and are moved by one more, as "
            "transformers does; give 'tokens' instead of 'input_ids', or 'shift_labels'",
        )


def _row(item: Mapping[str, Any], row: int, num_rows: int) -> dict[str, Any]:
    """Returns one sample of a batch; a value without an entry for each row is the same for all."""
    sample = {
        name: value[row] if _num_rows(value) == num_rows else value for name, value in item.items()
    }
    positions: Any = item.get("position_ids")
    if np.ndim(positions) == 3 and has_axes(positions):  # [3, B, L], also where B is 3
        sample["position_ids"] = positions[:, row]
    return sample


def _num_rows(value: Any) -> int | None:
    """Returns the rows of an array, a tensor or a list; None for anything else."""
    if isinstance(value, (list, tuple)):
        return len(value)
    shape: tuple[int, ...] = getattr(value, "shape", ())
    return shape[0] if shape else None


def _number(name: str, value: Any) -> int:
    """Returns a number, or the only one of an array, a tensor or a list."""
    if type(value) is int:
        return value
    numbers = read_integers(name, value)
    if numbers.size != 1:
        raise ValueError(f"'{name}' must be one number, but is {str(value)[:80]}")
    return int(numbers[0])


def _flat(name: str, values: Any) -> npt.NDArray[Any]:
    if isinstance(values, np.ndarray) and values.ndim == 1:
        return values
    array = as_array(name, values)
    if array.ndim > 1 and array.size != array.shape[-1]:
        raise ValueError(
            f"a sample's fields must be [L] or [1, L], but '{name}' is {list(array.shape)}; "
            "hand rows over as a list of samples"
        )
    return array.reshape(-1)
