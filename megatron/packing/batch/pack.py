"""tensor. Samples -> one microbatch. The one place that pads.

A microbatch is a dict, as Megatron's own code expects: `cu_seqlens`, `cu_seqlens_padded` (int32, host), `max_seqlen`
(int), and where the stage has tokens `tokens`, `labels`, `position_ids` (int64 [T]), `loss_mask` (float32 [T]) and
`sources` (int64 [segments], host). Padding is token 0, masked.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from megatron.packing.batch.layout import PackLayout
from megatron.packing.batch.sample import Sample

FIELDS = ("tokens", "labels", "loss_mask", "position_ids")


def layout_microbatch(layout: PackLayout) -> dict[str, Any]:
    """The microbatch of a stage without tokens."""
    return {
        "cu_seqlens": torch.from_numpy(layout.cu_seqlens),
        "cu_seqlens_padded": torch.from_numpy(layout.cu_seqlens_padded),
        "max_seqlen": layout.max_seqlen,
    }


def pack(samples: Sequence[Sample], layout: PackLayout, device: torch.device) -> dict[str, Any]:
    """The microbatch of `samples` laid out by `layout` (one sample per segment, a last segment may be padding only)."""
    microbatch = layout_microbatch(layout)
    sources = [sample.source for sample in samples]
    microbatch["sources"] = torch.tensor(sources + [0] * (len(layout.lengths) - len(sources)), dtype=torch.int64)
    for name in FIELDS:
        dtype = torch.float32 if name == "loss_mask" else torch.int64
        packed = torch.zeros(layout.num_tokens, dtype=dtype, device=device)
        start = 0
        for sample, padded_length in zip(samples, layout.padded_lengths):
            packed[start : start + len(sample)] = getattr(sample, name)
            start += padded_length
        microbatch[name] = packed
    return microbatch
