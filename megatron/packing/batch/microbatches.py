"""tensor. Samples -> the microbatches of a step. The one place that pads.

A microbatch is a dict, as Megatron's own code expects: `cu_seqlens`, `cu_seqlens_padded` (int32), `max_seqlen` (int),
and where the stage has tokens `tokens`, `labels`, `position_ids` (int64 [T]), `loss_mask` (float32 [T]) and `sources`
(int64 [segments]). All of it is on the host, pinned where there is CUDA. Padding is token 0, masked.

    fields of all microbatches are written once, by whole arrays; a microbatch is a view of them
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from megatron.packing.batch.layout import Alignment, PackLayout
from megatron.packing.batch.samples import IntArray, Samples, spread

Microbatch = dict[str, Any]
FIELDS = ("tokens", "labels", "loss_mask", "position_ids")


def layouts_of(lengths: IntArray, num_sequences: IntArray, alignment: Alignment) -> list[PackLayout]:
    """Return the layout of each microbatch: `num_sequences[m]` of the sequences, in order."""
    return [PackLayout.of(part, alignment) for part in np.split(lengths, np.cumsum(num_sequences)[:-1])]


def layout_microbatch(layout: PackLayout) -> Microbatch:
    """Return the microbatch of a stage without tokens."""
    return {
        "cu_seqlens": torch.from_numpy(layout.cu_seqlens),
        "cu_seqlens_padded": torch.from_numpy(layout.cu_seqlens_padded),
        "max_seqlen": layout.max_seqlen,
    }


def pack(samples: Samples, num_sequences: IntArray, layouts: Sequence[PackLayout]) -> list[Microbatch]:
    """Return the microbatches of `samples`, which are in the order of the packs; `layouts` is `layouts_of` them."""
    sizes = [layout.num_tokens for layout in layouts]
    starts = np.cumsum([0, *sizes])
    index = None
    if samples.tokens.size != starts[-1]:
        firsts = [
            start + layout.cu_seqlens_padded[:count].astype(np.int64)
            for start, layout, count in zip(starts, layouts, num_sequences.tolist())
        ]
        index = spread(np.concatenate(firsts), samples.lengths)
    padded = {name: _padded(values, index, int(starts[-1])) for name, values in samples.fields()._asdict().items()}
    columns = {name: values.split(sizes) for name, values in padded.items()}
    sources = np.split(samples.sources, np.cumsum(num_sequences)[:-1])
    return [
        {
            **layout_microbatch(layout),
            **{name: column[number] for name, column in columns.items()},
            "sources": _sources_of(sources[number], layout),
        }
        for number, layout in enumerate(layouts)
    ]


def copied_ahead(microbatches: Iterable[Microbatch], device: torch.device) -> Iterator[Microbatch]:
    """Yield the same microbatches with FIELDS on a CUDA device; each is copied before the one before it is yielded.

    The copies are on a stream of their own, which the caller's current stream waits for; the host waits for nothing.
    Their memory belongs to that stream, so the allocator is told that the caller's stream uses it, too.
    """
    stream = torch.cuda.Stream(device)
    copied: tuple[Microbatch, torch.cuda.Event] | None = None
    for following in (*microbatches, None):
        upcoming = None
        if following is not None:
            with torch.cuda.stream(stream):
                fields = {name: following[name].to(device, non_blocking=True) for name in FIELDS if name in following}
                upcoming = {**following, **fields}, stream.record_event()
        if copied is not None:
            microbatch, is_there = copied
            current = torch.cuda.current_stream(device)
            current.wait_event(is_there)
            for name in FIELDS:
                if name in microbatch:
                    microbatch[name].record_stream(current)
            yield microbatch
        copied = upcoming


def _padded(values: npt.NDArray[Any], index: IntArray | None, size: int) -> Tensor:
    """`values` at the places `index` of `size` tokens, zero elsewhere; None: there is no padding."""
    if index is not None:
        padded = np.zeros(size, values.dtype)
        padded[index] = values
        values = padded
    tensor = torch.from_numpy(values)
    return tensor.pin_memory() if torch.cuda.is_available() else tensor


def _sources_of(sources: npt.NDArray[np.int32], layout: PackLayout) -> Tensor:
    of_segments = np.zeros(layout.lengths.size, np.int64)
    of_segments[: sources.size] = sources
    return torch.from_numpy(of_segments)
