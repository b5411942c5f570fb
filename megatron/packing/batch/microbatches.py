"""tensor. Samples -> the microbatches of a step. The one place that pads.

A microbatch is a dict, as Megatron's own code expects: `cu_seqlens`, `cu_seqlens_padded` (int32),
`max_seqlen` (int), `padding_mask` (bool [T], True at padding), and where the stage has tokens
`tokens`, `labels`, `position_ids` (int64 [T]), `loss_mask` (float32 [T]), `sources` (int64
[segments]), and extra columns by name, if there are any: dicts `extra_per_token` ([T, ...]) and
`extra_per_sequence` ([segments, ...]). All of it is on the host, pinned where there is CUDA.
Padding is token 0, masked, and zero in extra columns.

Where a pack holds trees, each node is a segment, and `parents` and `depths` (int64 [segments]) say
what it continues. `num_paths` (int32 [T]) is there where tokens count other than once, and
`axis_positions` (int64 [T, 3]) on all stages where samples have positions along axes. `payloads`
(`PackPayloads`) is there on first stages where samples have some.

    fields of all microbatches are written once, by whole arrays; a microbatch is a view of them
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from megatron.packing.batch.columns import (
    AXIS_POSITIONS,
    LABELS,
    LOSS_MASK,
    NUM_PATHS,
    PARENTS,
    PATH,
    POSITION_IDS,
    SEQUENCE,
    TOKEN,
    TOKENS,
    IntArray,
    split_at,
)
from megatron.packing.batch.layout import Alignment, PackLayout
from megatron.packing.batch.nodes import Nodes
from megatron.packing.batch.paths import trained_by
from megatron.packing.batch.samples import Samples
from megatron.packing.device import pinned

Microbatch = dict[str, Any]
FIELDS = ("tokens", "labels", "loss_mask", "position_ids", "padding_mask")
"""Fields with one entry per token."""
_COPIED = (*FIELDS, "num_paths", "axis_positions")
_TOKEN_BYTES = 28
"""Bytes of `tokens`, `labels`, `position_ids` and `loss_mask` for each token."""
_LONG_RUN = 256
"""Tokens from which on copying a run takes less time than a mask of all tokens."""
_HUGE_PAGES_FROM = 2**22
"""Bytes from which on numpy asks for huge pages."""


def layouts_of(
    lengths: IntArray, num_sequences: IntArray, alignment: Alignment
) -> list[PackLayout]:
    """Returns the layout of each microbatch: `num_sequences[m]` of the sequences, in order."""
    return [
        PackLayout.of(part, alignment) for part in split_at(lengths, np.cumsum(num_sequences)[:-1])
    ]


def layouts_of_samples(
    samples: Samples, num_sequences: IntArray, alignment: Alignment
) -> list[PackLayout]:
    """Returns the layouts of samples that may be trees, of which each node is a segment."""
    ends = np.cumsum(num_sequences)
    if PARENTS not in samples.columns:
        return layouts_of(samples.lengths, num_sequences, alignment)
    nodes = Nodes.of(samples)
    # The pack's nodes: packs of 2 and 1 samples, of samples 0 0 1 2 2    ->    bounds 0 3 5
    bounds = np.searchsorted(nodes.sample, np.concatenate(([0], ends)))
    layouts = []
    for start, end in pairwise(bounds.tolist()):
        parents = nodes.parents[start:end]
        layouts.append(
            PackLayout.of(
                nodes.lengths[start:end],
                alignment,
                np.where(parents < 0, -1, parents - start),
                nodes.depths[start:end],
            )
        )
    return layouts


def layout_microbatches(
    layouts: Sequence[PackLayout], *, samples: Samples | None = None
) -> list[Microbatch]:
    """Returns the microbatches of a stage without tokens.

    Args:
        samples: in the order of the packs, for columns that every stage needs.
    """
    padding_mask = _padding_mask(layouts)
    of_layout = _microbatches(layouts, padding_mask)
    fields = {} if samples is None else _of_all_stages(samples, ~padding_mask, layouts)
    return [{**one, **_part(fields, number)} for number, one in enumerate(of_layout)]


def _of_all_stages(
    samples: Samples, is_real: npt.NDArray[np.bool_], layouts: Sequence[PackLayout]
) -> dict[str, Sequence[Tensor]]:
    """Returns positions along axes, of which each stage's layers make their rotary embedding."""
    if AXIS_POSITIONS not in samples.columns:
        return {}
    values = _padded(samples.columns[AXIS_POSITIONS], is_real, np.int64)
    return {"axis_positions": _split(values, layouts)}


def pack(
    samples: Samples, num_sequences: IntArray, layouts: Sequence[PackLayout]
) -> list[Microbatch]:
    """Returns the microbatches of `samples`, which are in the order of the packs.

    Args:
        num_sequences: int64 [microbatches], sequences of each.
        layouts: `layouts_of_samples` of the same samples.
    """
    padding_mask = _padding_mask(layouts)
    is_real = ~padding_mask
    fields = {
        name: _split(values, layouts) for name, values in _token_fields(samples, is_real).items()
    } | _of_all_stages(samples, is_real, layouts)
    of_segment = np.arange(samples.lengths.size)  # the sample of each segment
    num_segments = num_sequences
    if PARENTS in samples.columns:
        of_segment = Nodes.of(samples).sample
        # 2 and 1 samples, of samples 0 0 1 2 2: packs 0 0 0 1 1    ->    3 and 2 segments
        num_segments = np.bincount(
            np.repeat(np.arange(num_sequences.size), num_sequences)[of_segment],
            minlength=num_sequences.size,
        )
    sources = samples.sources.astype(np.int64)[of_segment]
    fields["sources"] = _of_segments(sources, num_segments, layouts)
    if NUM_PATHS in samples.columns:
        counts = _padded(samples.columns[NUM_PATHS], is_real, np.int32)
        fields["num_paths"] = _split(counts, layouts)
    extra: dict[str, dict[str, Sequence[Tensor]]] = {}
    for column, values in samples.extra().items():
        if column.scope == TOKEN:
            parts = _split(_padded(values, is_real, values.dtype), layouts)
        elif column.scope == SEQUENCE:
            parts = _of_segments(values[of_segment], num_segments, layouts)
        else:
            ends = _row_ends(samples, column.scope, num_sequences)
            parts = [torch.from_numpy(part) for part in split_at(values, ends[:-1])]
        extra.setdefault(f"extra_per_{column.scope}", {})[column.name] = parts
    if PATH in samples.sizes.ragged:
        fields["path_pairs"] = _path_pairs(samples, num_sequences, is_real, layouts)
    return [
        {
            **microbatch,
            **_part(fields, number),
            **{kind: _part(columns, number) for kind, columns in extra.items()},
        }
        for number, microbatch in enumerate(_microbatches(layouts, padding_mask))
    ]


def _row_ends(samples: Samples, scope: str, num_sequences: IntArray) -> IntArray:
    """Returns where the rows of each pack's samples end, int64 [microbatches]."""
    # Rows 2 1 3, packs of 2 and 1 samples    ->    3 6
    rows = samples.sizes.rows(scope)
    return np.cumsum(np.concatenate(([0], rows)))[np.cumsum(num_sequences)]


def _path_pairs(
    samples: Samples,
    num_sequences: IntArray,
    is_real: npt.NDArray[np.bool_],
    layouts: Sequence[PackLayout],
) -> list[Tensor]:
    """Returns the pairs of a token and a path that trains it, as numbered in each pack."""
    token, path = trained_by(samples)
    token = np.flatnonzero(is_real)[token]
    starts = np.cumsum([0, *(layout.num_tokens for layout in layouts)])
    pack = np.searchsorted(starts, token, side="right") - 1
    ends = _row_ends(samples, PATH, num_sequences)
    # Tokens and paths count from 0 in each pack: packs of 6 and 4 tokens, token 7    ->    1 of
    # pack 1
    pairs = np.stack((token - starts[pack], path - np.concatenate(([0], ends))[pack]))
    sizes = np.bincount(pack, minlength=len(layouts)).tolist()
    return list(torch.from_numpy(pairs).split(sizes, dim=1))


def _part(columns: Mapping[str, Sequence[Tensor]], number: int) -> dict[str, Tensor]:
    return {name: parts[number] for name, parts in columns.items()}


def copied_ahead(microbatches: Iterable[Microbatch], device: torch.device) -> Iterator[Microbatch]:
    """Yields the same microbatches with the tensors named in `_COPIED` on a CUDA device.

    Each is copied one microbatch ahead.

    `host_loss_mask` is `loss_mask` on the host, so that nobody waits for the device to see which
    tokens count. The copies run on a stream of their own, for which the caller's current stream
    waits, and the host waits for nothing.
    """
    stream = _copy_stream(device)
    copied: tuple[Microbatch, torch.cuda.Event] | None = None
    for following in (*microbatches, None):
        upcoming = None
        if following is not None:
            with torch.cuda.stream(stream):
                fields = {
                    name: following[name].to(device, non_blocking=True)
                    for name in _COPIED
                    if name in following
                }
                on_host = {"host_loss_mask": following.get("loss_mask")}
                if "payloads" in following:  # whose placeholders are counted
                    on_host["host_tokens"] = following.get("tokens")
                upcoming = {**following, **fields, **on_host}, stream.record_event()
        if copied is not None:
            microbatch, is_there = copied
            current = torch.cuda.current_stream(device)
            current.wait_event(is_there)
            for name in _COPIED:
                if name in microbatch:  # its memory belongs to the other stream: both use it now
                    microbatch[name].record_stream(current)
            yield microbatch
        copied = upcoming


@cache
def _copy_stream(device: torch.device) -> torch.cuda.Stream:
    """Returns the stream of all copies to the device, in all steps and virtual stages.

    torch gives out 32 streams in turn, to NCCL's groups too: new ones would soon be those of a
    group, and copies would wait behind its transfers. Streams of high priority are 32 others. The
    allocator keeps freed memory by stream, so that a kept one uses it again.
    """
    return torch.cuda.Stream(device, priority=-1)


def _microbatches(
    layouts: Sequence[PackLayout], padding_mask: npt.NDArray[np.bool_]
) -> list[Microbatch]:
    return [
        {
            "cu_seqlens": torch.from_numpy(layout.cu_seqlens),
            "cu_seqlens_padded": torch.from_numpy(layout.cu_seqlens_padded),
            "max_seqlen": layout.max_seqlen,
            "padding_mask": mask,
            **_tree_of(layout),
        }
        for layout, mask in zip(layouts, _split(padding_mask, layouts))
    ]


def _tree_of(layout: PackLayout) -> dict[str, Tensor]:
    if layout.parents is None or layout.depths is None:
        return {}
    return {
        "parents": torch.from_numpy(layout.parents),
        "depths": torch.from_numpy(layout.depths),
    }


def _padding_mask(layouts: Sequence[PackLayout]) -> npt.NDArray[np.bool_]:
    """Returns True at padding, for all microbatches.

    lengths 2 1, padded_lengths 3 2    ->    F F T F T
    """
    real = np.concatenate([layout.lengths for layout in layouts])
    padding = np.concatenate([layout.padded_lengths for layout in layouts]) - real
    if not padding.any():
        return np.zeros(int(real.sum()), np.bool_)
    # Real tokens and padding in turn: False 2 times, True 1 time, False 1 time, True 1 time.
    return np.repeat(np.tile([False, True], real.size), np.column_stack((real, padding)).ravel())


def _token_fields(samples: Samples, is_real: npt.NDArray[np.bool_]) -> dict[str, npt.NDArray[Any]]:
    """Returns the fields that a model is trained on, in one block of memory.

    The first touch of fresh memory, page by page, takes longer than all else here. numpy asks for
    huge pages where an array has at least 4 MiB, and the allocator gives one large block again in
    the next step. So the block holds all fields, and is never smaller.
    """
    num_tokens = is_real.size
    block = np.empty(max(_TOKEN_BYTES * num_tokens, _HUGE_PAGES_FROM), np.uint8)
    # Three fields of 8 bytes per token, then one of 4.
    ids = block[: 24 * num_tokens].view(np.int64).reshape(3, num_tokens)
    loss_mask = block[24 * num_tokens : _TOKEN_BYTES * num_tokens].view(np.float32)
    # Only padding is cleared: clearing the block would take half as long as writing it.
    padding = np.flatnonzero(~is_real)
    ids[:, padding] = loss_mask[padding] = 0
    fields = dict(zip(("tokens", "labels", "position_ids"), ids)) | {"loss_mask": loss_mask}
    runs = np.array([[0, num_tokens]])
    if padding.size:  # where each run of real tokens begins and ends: T T F T F -> [0, 2], [3, 4]
        runs = np.flatnonzero(np.diff(is_real, prepend=False, append=False)).reshape(-1, 2)
    for column in (TOKENS, LABELS, POSITION_IDS, LOSS_MASK):
        field, values = fields[column.name], samples.values_of(column)
        if len(runs) > num_tokens / _LONG_RUN:
            field[is_real] = values
            continue
        parts = split_at(values, np.diff(runs).cumsum()[:-1])
        for (start, end), part in zip(runs.tolist(), parts):
            field[start:end] = part
    return fields


def _padded(
    values: npt.NDArray[Any], is_real: npt.NDArray[np.bool_], dtype: npt.DTypeLike
) -> npt.NDArray[Any]:
    """Returns `values` where tokens are real, zero elsewhere."""
    if len(values) == is_real.size:
        return values.astype(dtype, copy=False)
    padded = np.zeros((is_real.size, *values.shape[1:]), dtype)
    padded[is_real] = values
    return padded


def _split(values: npt.NDArray[Any], layouts: Sequence[PackLayout]) -> Sequence[Tensor]:
    tensor = pinned(torch.from_numpy(values))  # one for all microbatches, which are views of it
    return tensor.split([layout.num_tokens for layout in layouts])


def _of_segments(
    values: npt.NDArray[Any], num_sequences: IntArray, layouts: Sequence[PackLayout]
) -> list[Tensor]:
    """Returns one row per segment of each pack: those of its sequences, then zero where padding
    follows at its end.
    """
    found = []
    for rows, layout in zip(split_at(values, np.cumsum(num_sequences)[:-1]), layouts, strict=True):
        of_segments = np.zeros((layout.lengths.size, *values.shape[1:]), values.dtype)
        of_segments[: len(rows)] = rows
        found.append(torch.from_numpy(of_segments))
    return found
