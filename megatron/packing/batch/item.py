"""pure. One sample dict of a user's iterator: its fields, and the sequences or trees in it.

See `reading` for what a dict may hold.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from megatron.packing.batch.axes import has_axes, without_axes
from megatron.packing.batch.columns import IntArray, expand_ranges
from megatron.packing.batch.extra import Rows, extra_fields, rows_of
from megatron.packing.batch.huggingface import as_megatron_sample
from megatron.packing.batch.paths import PREFIX, rows_of_paths
from megatron.packing.batch.payloads import Payload, payload_of
from megatron.packing.batch.tree import Trees, checked_trees

MAX_ID = 2**31 - 1
"""Ids travel as int32. Larger ones are refused, as they would be changed."""
_FIELDS = frozenset(("tokens", "labels", "loss_mask", "position_ids", "num_paths", "first_path"))
_PLAIN = frozenset(("tokens", "labels", "loss_mask", "position_ids", "source"))
"""Keys of a dict that is one sequence, with nothing besides; most are."""
_HUGGINGFACE = (
    "input_ids",
    "labels",
    "loss_mask",
    "position_ids",
    "attention_mask",
    "cu_seq_lens_q",
)


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
    return np.concatenate(
        [each if isinstance(each, np.ndarray) else _of_tensor(each) for each in values]
    )


def items_of(given: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Returns a dict of one sample each; several of a batch of rows [B, L]."""
    shape: tuple[int, ...] = getattr(given.get("tokens", given.get("input_ids")), "shape", ())
    if len(shape) != 2 or shape[0] < 2:
        return [given]
    payload_of(given, shape[0])  # refused: nothing says which row each is of
    return [_row(given, row, shape[0]) for row in range(shape[0])]


def read_item(item: Mapping[str, Any]) -> Item:
    """Reads one dict; ValueError for what is no sample."""
    whole = item
    if item.get("tokens") is None and item.get("input_ids") is not None:
        item = _from_huggingface(without_axes(item))
    fields = _given_fields(without_axes(item))
    size = fields["tokens"].size
    source = _number(item.get("source", 0))
    if not 0 <= source <= MAX_ID:
        raise ValueError(f"'source' must be from 0 to {MAX_ID}, but is {source}")
    extra, lengths, trees = extra_fields(item, size), [size], None
    has_layout = item.get("cu_seqlens") is not None or item.get("original_seq_len") is not None
    if size == 0 or has_layout or item.get("parents") is not None:
        starts, sizes = _sequences(item, size)
        lengths = sizes[sizes > 0].tolist()
        if item.get("parents") is not None:
            trees = _trees(item, sizes)
            starts, sizes = starts[trees.order], sizes[trees.order]
            lengths = trees.lengths.tolist()
        index = expand_ranges(starts, sizes)  # of the real tokens
        fields = {name: values[index] for name, values in fields.items()}
        extra = {
            name: values[index] if _is_per_token(name, values, size) else values
            for name, values in extra.items()
        }
    of_paths = {name: extra.pop(name) for name in list(extra) if name.startswith(PREFIX)}
    has_paths = bool(of_paths) or "first_path" in fields
    num_paths = rows_of_paths(fields, of_paths, np.array(lengths)) if has_paths else NO_PATHS
    num_tokens = fields["tokens"].size
    rows = {name: rows_of(name, values, num_tokens, len(lengths)) for name, values in extra.items()}
    rows |= {name: Rows(None, None, values) for name, values in of_paths.items()}
    has_branches = trees is not None and trees.parents.size > trees.rows.size
    payload = payload_of(whole, len(lengths))
    costs = {} if payload is None else whole.get("costs") or {}
    kept = trees if has_branches else None
    return Item(fields, rows, lengths, source, kept, num_paths, payload, costs)


def _is_per_token(name: str, values: npt.NDArray[Any], size: int) -> bool:
    return values.shape[:1] == (size,) and not name.startswith(PREFIX)


def _given_fields(item: Mapping[str, Any]) -> dict[str, npt.NDArray[Any]]:
    """Returns the fields that an item has, [L] each; ValueError where lengths differ."""
    given = {
        name: _flat(values)
        for name, values in item.items()
        if name in _FIELDS and values is not None
    }
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
    array = _of_tensor(values) if hasattr(values, "detach") else np.asarray(values)
    if array.ndim > 1 and array.size != array.shape[-1]:
        raise ValueError(
            f"a sample's fields must be [L] or [1, L], but one is {list(array.shape)}; "
            "hand rows over as a list of samples"
        )
    return array.reshape(-1)


def _of_tensor(values: Any) -> npt.NDArray[Any]:
    """Returns a tensor's values, without importing torch; of bfloat16 as float32."""
    try:
        array: npt.NDArray[Any] = values.numpy()
    except (RuntimeError, TypeError):  # on a GPU, with a gradient, or of a type of torch's alone
        values = values.detach().cpu()
        array = (values.float() if values.is_floating_point() else values).numpy()
    return array
