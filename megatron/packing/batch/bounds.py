"""pure. Where the sequences of a sample begin and end, and which of its tokens are padding.

Fields of several libraries say so (see `grammar`). Padding is what any of them calls padding. All
that bound sequences must bound the same ones; positions do in HuggingFace's samples, where nothing
else does.

    input_ids       5 6 7 8 9 0        tokens   5 6 7 8 9
    attention_mask  1 1 1 2 2 0   ->   lengths  3 2
    position_ids    2 3 4 2 3 0
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from megatron.packing.batch.columns import IntArray, expand_ranges
from megatron.packing.batch.grammar import (
    CUMULATIVE,
    CUMULATIVE_PADDED,
    LENGTHS,
    LENGTHS_PADDED,
    UNPADDED,
)

PADDING = ("attention_mask", "padding_mask", "original_seq_len")
NUMBERS = "seq_idx"
_SPANS = frozenset((*CUMULATIVE, UNPADDED, *CUMULATIVE_PADDED, *LENGTHS, *LENGTHS_PADDED))


class Spans(NamedTuple):
    """Runs of tokens, int64 [n] each; some may be empty."""

    starts: IntArray
    lengths: IntArray

    @property
    def places(self) -> IntArray:
        """Places of the tokens, int64 [T]."""
        return expand_ranges(self.starts, self.lengths)


class Bounds(NamedTuple):
    """The sequences of a sample without its padding."""

    places: IntArray | None
    """int64 [T]: places of the real tokens, sequence by sequence; None for all."""
    lengths: IntArray
    """int64 [n], at least 1 each."""


def read_spans(item: Mapping[str, Any], size: int) -> Spans | None:
    """Returns the runs that lengths of sequences, plain or cumulative, bound in an item of `size`
    tokens; None where it has none. Repeated entries at the tail are empty runs:

        cu_seqlens 0 3 5 5, cu_seqlens_padded 0 4 8 8    ->    starts 0 4 8, lengths 3 2 0

    Raises ValueError for fields that do not rise within the item, or bound different runs.
    """
    if _SPANS.isdisjoint(item):
        return None
    ends = _agreeing(item, CUMULATIVE, LENGTHS)
    places = _agreeing(item, CUMULATIVE_PADDED, LENGTHS_PADDED)
    if item.get(UNPADDED) is not None:
        places = ends if places is None else places
        ends = (UNPADDED, _cumulative(item, UNPADDED))
    if ends is None:
        if places is not None:
            raise ValueError(
                f"'{places[0]}' must come with 'cu_seqlens', the running sum of the lengths "
                "without padding, but comes alone"
            )
        return None
    name, bounds = ends
    lengths = np.diff(bounds)
    if bounds.size < 2 or bounds[0] != 0 or lengths.min() < 0 or not 0 < bounds[-1] <= size:
        raise ValueError(
            f"'{name}' must rise from 0 to 1 to {size} tokens, but is {_shown(bounds)}"
        )
    if places is None:
        return Spans(bounds[:-1], lengths)
    name_of_places, padded = places
    if padded.size != bounds.size:
        raise ValueError(
            f"'{name_of_places}' must have {bounds.size} entries, but has {padded.size}"
        )
    starts = padded[:-1]
    follows = np.append(starts[1:], size)
    if starts[0] < 0 or (starts + lengths > np.where(lengths > 0, follows, size)).any():
        raise ValueError(
            f"'{name_of_places}' must place sequences within {size} tokens, one behind the other, "
            f"but is {_shown(padded)}"
        )
    return Spans(starts, lengths)


def read_bounds(
    item: Mapping[str, Any], size: int, positions: npt.NDArray[Any] | None = None
) -> Bounds:
    """Returns the sequences of an item of `size` tokens.

    Args:
        positions: [size], where sequences begin where these do not rise, if nothing else says so.

    Raises ValueError where fields contradict each other, and where all is padding.
    """
    spans = read_spans(item, size)
    names = [name for name in (*PADDING, NUMBERS) if item.get(name) is not None]
    if not names and positions is None:
        if spans is None:
            _check_any(size, size, "")
            return Bounds(None, np.array([size]))
        return Bounds(spans.places, spans.lengths[spans.lengths > 0])
    is_real, numbers = _padding_and_numbers(item, size, spans)
    index = np.arange(size) if spans is None else spans.places
    kept = is_real[index]
    index = index[kept]
    _check_any(index.size, size, "', '".join(names))
    if spans is not None:
        of_spans = np.repeat(np.arange(spans.lengths.size), spans.lengths)[kept]
        numbers = {"cu_seqlens": of_spans, **{name: each[index] for name, each in numbers.items()}}
    else:
        numbers = {name: each[index] for name, each in numbers.items()}
    begins = _begins(numbers)
    if begins is None:
        begins = np.zeros(index.size - 1, np.bool_)
        if positions is not None:
            begins = np.diff(positions[index]) <= 0
    edges = np.concatenate(([0], np.flatnonzero(begins) + 1, [index.size]))
    return Bounds(index, np.diff(edges))


def check_nodes(item: Mapping[str, Any], size: int, spans: Spans) -> None:
    """Raises ValueError where a tree's nodes hold what other fields call padding."""
    is_real, numbers = _padding_and_numbers(item, size, spans)
    if not is_real[spans.places].all() or numbers:
        raise ValueError(
            "the nodes of a tree are bounded by 'cu_seqlens', but 'attention_mask', 'padding_mask' "
            "or 'original_seq_len' bounds other tokens; leave it out"
        )


def read_integers(name: str, value: Any) -> IntArray:
    """Returns a field of whole numbers, int64 [n]; ValueError for others."""
    array = as_array(name, value)
    is_whole = array.dtype.kind in "biu" or (
        array.dtype.kind == "f" and bool((array == np.rint(array)).all())
    )
    if array.size and not is_whole:
        raise ValueError(f"'{name}' must be integers, but is {str(value)[:80]}")
    if array.ndim > 1 and array.size != array.shape[-1]:
        raise ValueError(
            f"'{name}' must be [n] or [1, n], but is {list(array.shape)}; hand rows over as a list "
            "of samples"
        )
    return array.reshape(-1).astype(np.int64)


def as_array(name: str, value: Any) -> npt.NDArray[Any]:
    """Returns the values of a list, an array or a tensor (of bfloat16 as float32), without
    importing torch. Raises ValueError for lists of several lengths.
    """
    if hasattr(value, "detach"):
        try:
            array: npt.NDArray[Any] = value.numpy()
        except (
            RuntimeError,
            TypeError,
        ):  # on a GPU, with a gradient, or of a type of torch's alone
            value = value.detach().cpu()
            array = (value.float() if value.is_floating_point() else value).numpy()
        return array
    try:
        return np.asarray(value)
    except ValueError:
        raise ValueError(
            f"'{name}' must be an array, but its rows have several lengths; hand rows over as a "
            "list of samples"
        ) from None


def _agreeing(
    item: Mapping[str, Any], cumulative: tuple[str, ...], plain: tuple[str, ...]
) -> tuple[str, IntArray] | None:
    """Returns the running sum of lengths, and the name of the field that has it; None without.

    Raises ValueError where two fields differ.
    """
    sums = [(name, _cumulative(item, name)) for name in cumulative if item.get(name) is not None]
    for name in plain:
        if item.get(name) is not None:
            sums.append((name, np.concatenate(([0], np.cumsum(read_integers(name, item[name]))))))
    if not sums:
        return None
    (name, first), *others = sums
    for other, values in others:
        if not np.array_equal(np.unique(values), np.unique(first)):
            raise ValueError(
                f"'{name}' and '{other}' must bound the same sequences, but are running sums of "
                f"{_shown(first)} and {_shown(values)}"
            )
    return sums[0]


def _cumulative(item: Mapping[str, Any], name: str) -> IntArray:
    """Returns a running sum, without the -1 that NeMo fills its tail with."""
    sums = read_integers(name, item[name])
    return sums[: int((sums == -1).argmax())] if sums.size and sums[-1] == -1 else sums


def _padding_and_numbers(
    item: Mapping[str, Any], size: int, spans: Spans | None
) -> tuple[npt.NDArray[np.bool_], dict[str, IntArray]]:
    """Returns the tokens that no field calls padding, and the numbers of their sequences by the
    name of each field that numbers them; [size] each.
    """
    is_real = np.ones(size, np.bool_)
    numbers: dict[str, IntArray] = {}
    if item.get("attention_mask") is not None:
        mask = _mask_numbers(item["attention_mask"], size)
        is_real &= mask != 0
        if (mask[is_real] != mask[is_real][:1]).any():
            numbers["attention_mask"] = mask
    if item.get("padding_mask") is not None:
        is_real &= _per_token("padding_mask", item["padding_mask"], size) == 0
    if item.get("original_seq_len") is not None:
        is_real &= _is_original(
            read_integers("original_seq_len", item["original_seq_len"]), size, spans
        )
    if item.get(NUMBERS) is not None:
        numbers[NUMBERS] = read_integers(NUMBERS, _per_token(NUMBERS, item[NUMBERS], size))
        is_real &= numbers[NUMBERS] >= 0
    return is_real, numbers


def _is_original(lengths: IntArray, size: int, spans: Spans | None) -> npt.NDArray[np.bool_]:
    """Returns the tokens before padding, by the lengths without it: one, or one per sequence."""
    if lengths.size == 1 and 0 < lengths[0] <= size:
        return np.arange(size) < lengths[0]
    if lengths.size == 1:
        raise ValueError(
            f"a sample must have at least one token, but has {lengths[0]} of {size} tokens by "
            "'original_seq_len'"
        )
    if spans is None or not np.array_equal(lengths, spans.lengths):
        raise ValueError(
            "'original_seq_len' must be one number, or the lengths that 'cu_seqlens' bound, but is "
            f"{_shown(lengths)}"
        )
    return np.ones(size, np.bool_)


def _per_token(name: str, value: Any, size: int) -> npt.NDArray[Any]:
    """Returns a field of one number per token, [size]."""
    array = as_array(name, value)
    if array.size != size or array.shape[-1:] != (size,):
        raise ValueError(
            f"'{name}' must be as long as the tokens ({size}), but is {list(array.shape)}"
        )
    return array.reshape(-1)


def _mask_numbers(value: Any, size: int) -> IntArray:
    """Returns the number of each token's sequence, 0 for padding, of an attention mask."""
    mask = as_array("attention_mask", value)
    if mask.ndim > 1 and mask.shape[-2:] == (size, size) and size > 1:
        return _matrix_numbers(mask, size)
    # NeMo says by a single 1 that there is none, and a matrix of one token says nothing.
    if mask.size == 1 and (mask.item() == 1 or (mask.ndim > 2 and size == 1)):
        return np.ones(size, np.int64)
    mask = _per_token("attention_mask", mask, size)
    numbers = mask.astype(np.int64)
    if (numbers != mask).any() or (numbers < 0).any():
        raise ValueError(
            "'attention_mask' must have 0 for padding and numbers of sequences from 1, but has "
            f"{mask[(numbers != mask) | (numbers < 0)][0]}"
        )
    real = numbers[numbers > 0]
    if np.count_nonzero(np.diff(real)) >= max(1, np.unique(real).size):  # 1 1 2 2 1
        raise ValueError(
            "'attention_mask' must number sequences that stand one behind the other, but has a "
            "number again behind another one"
        )
    return numbers


def _matrix_numbers(matrix: npt.NDArray[Any], size: int) -> IntArray:
    """Returns the number of each token's sequence, of a matrix [..., L, L] of any kind: true, 1 or
    0.0 where a query sees a key, or the contrary.

    The first query never sees the last key, so that entry says which values hide.
    """
    if matrix.size == size * size:
        square = matrix.reshape(size, size)
        sees = square != square[0, -1]
        places, first = np.arange(size), sees.argmax(1)
        is_real = sees.diagonal()
        wanted = (places >= first[:, None]) & (places <= places[:, None]) & is_real
        # A query's first key begins a sequence: within a window it would not.
        begins = np.array_equal(first[first[is_real]], first[is_real])
        if is_real.any() and begins and np.array_equal(sees[is_real], wanted[is_real]):
            return np.where(is_real, first + 1, 0)
    raise ValueError(
        f"'attention_mask' of shape {list(matrix.shape)} must be causal within each sequence, and "
        "the same for all heads; leave it out, and bound sequences by 'cu_seqlens'"
    )


def _begins(numbers: Mapping[str, IntArray]) -> npt.NDArray[np.bool_] | None:
    """Returns whether each token but the first begins a sequence, [T - 1]; None without numbers.

    Raises ValueError where fields bound different sequences.
    """
    changes = {name: np.diff(values) != 0 for name, values in numbers.items()}
    if not changes:
        return None
    name, first = next(iter(changes.items()))
    for other, values in changes.items():
        if not np.array_equal(values, first):
            raise ValueError(
                f"'{name}' and '{other}' must bound the same sequences, but differ at token "
                f"{int((values != first).argmax()) + 1}"
            )
    return first


def _check_any(num_real: int, size: int, names: str) -> None:
    if num_real:
        return
    reason = f"'{names}' says that all of it is padding" if names else f"has 0 of {size} tokens"
    raise ValueError(f"a sample must have at least one token, but {reason}")


def _shown(values: IntArray) -> str:
    """Returns numbers for an error, at most twelve."""
    shown = ", ".join(map(str, values[:12].tolist()))
    return f"[{shown}{', ...' if values.size > 12 else ''}]"
