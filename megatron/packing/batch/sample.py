"""tensor. One training sequence: as samples come, and as they travel.

A `Sample` is one sequence. What an iterator draws may hold one or several of them, in the three shapes that
Megatron-LM's data sets emit; `samples_of` tells them apart. On the wire a sample is int32 words: 5 bytes per token
where labels are the next tokens, the mask is one weight or zero and positions count from zero (nearly always), up to
16 otherwise. Which source it is from stands in the upper bits of its kind, which travels anyway.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

LABELS_EXPLICIT = 1
MASK_EXPLICIT = 2
POSITIONS_EXPLICIT = 4
_SOURCE_SHIFT = 3
MAX_SOURCES = 2**31


@dataclass(frozen=True)
class Sample:
    """One sequence of L tokens, without padding.

    tokens, labels, position_ids: int64 [L]; loss_mask: float32 [L], the weight of each label in the loss's sum; source:
    a number of the user's, by which losses may be told apart.
    """

    tokens: Tensor
    labels: Tensor
    loss_mask: Tensor
    position_ids: Tensor
    source: int = 0

    def __len__(self) -> int:
        return self.tokens.numel()

    def first(self, num_tokens: int) -> Sample:
        """The sample cut after `num_tokens`."""
        tokens, labels = self.tokens[:num_tokens], self.labels[:num_tokens]
        return Sample(tokens, labels, self.loss_mask[:num_tokens], self.position_ids[:num_tokens], self.source)


def samples_of(drawn: Mapping[str, Any] | Iterable[Mapping[str, Any]]) -> list[Sample]:
    """The sequences in what one `next` returned: a dict, or any number of them.

    Three shapes of a dict, as Megatron-LM's data sets emit them: several sequences with `cu_seqlens` (repeated
    entries at its tail are padding; `cu_seqlens_padded` says where each one starts); one sequence padded from
    `original_seq_len` on; one plain sequence. `tokens` is needed; missing `labels` are the next tokens (the last one
    unknown, so masked), a missing `loss_mask` is one, missing `position_ids` count from zero, a missing `source` is 0.

    Raises ValueError for a sample without tokens or with fields of different lengths.
    """
    if isinstance(drawn, Mapping):
        return _sequences_of_dict(drawn)
    return [sample for item in drawn for sample in _sequences_of_dict(item)]


def _sequences_of_dict(item: Mapping[str, Any]) -> list[Sample]:
    if item.get("tokens") is None:
        raise ValueError(f"a sample must have the key 'tokens', but has {sorted(item)}")
    tokens = _flat(item["tokens"], torch.int64)
    fields = {
        "labels": _flat(item["labels"], torch.int64) if item.get("labels") is not None else None,
        "loss_mask": _flat(item["loss_mask"], torch.float32) if item.get("loss_mask") is not None else None,
        "position_ids": _flat(item["position_ids"], torch.int64) if item.get("position_ids") is not None else None,
    }
    for name, field in fields.items():
        if field is not None and field.numel() != tokens.numel():
            raise ValueError(f"'{name}' must be as long as 'tokens' ({tokens.numel()}), but is {field.numel()}")
    _check_for_the_wire(tokens, fields)
    if item.get("cu_seqlens") is not None:
        ends = _flat(item["cu_seqlens"], torch.int64).tolist()
        if not ends or ends[0] != 0 or any(a > b for a, b in pairwise(ends)) or ends[-1] > tokens.numel():
            raise ValueError(f"'cu_seqlens' must rise from 0 to at most {tokens.numel()} tokens, but is {ends}")
        places = ends
        if item.get("cu_seqlens_padded") is not None:
            places = _flat(item["cu_seqlens_padded"], torch.int64).tolist()
            if len(places) != len(ends):
                raise ValueError(f"'cu_seqlens_padded' must have {len(ends)} entries, but has {len(places)}")
        spans = [(place, place + end - start) for place, (start, end) in zip(places, pairwise(ends)) if end > start]
    else:
        original = item.get("original_seq_len")
        spans = [(0, tokens.numel() if original is None else int(original))]
    if not spans or any(not 0 <= start < end <= tokens.numel() for start, end in spans):
        raise ValueError(f"a sample must have at least one token; its spans are {spans} of {tokens.numel()} tokens")
    source = int(item.get("source", 0))
    if not 0 <= source < MAX_SOURCES:
        raise ValueError(f"'source' must be from 0 to {MAX_SOURCES - 1}, but is {source}")
    return [_sample(tokens, fields, start, end, source) for start, end in spans]


def _check_for_the_wire(tokens: Tensor, fields: Mapping[str, Tensor | None]) -> None:
    """Ids travel as int32, and a mask as flags times one weight: what these cannot carry is refused, not changed."""
    for name, ids in (("tokens", tokens), *((name, fields[name]) for name in ("labels", "position_ids"))):
        if ids is not None and ids.numel() and int(ids.abs().max()) >= 2**31:
            raise ValueError(f"'{name}' must be below 2**31, but has {int(ids.abs().max())}")
    mask = fields["loss_mask"]
    if mask is not None and not bool(mask.isfinite().all()):
        raise ValueError("'loss_mask' must be finite, but has infinity or NaN")


def _sample(tokens: Tensor, fields: Mapping[str, Tensor | None], start: int, end: int, source: int) -> Sample:
    length = end - start
    labels, mask, positions = fields["labels"], fields["loss_mask"], fields["position_ids"]
    loss_mask = torch.ones(length) if mask is None else mask[start:end]
    if labels is None:
        next_tokens = torch.cat((tokens[start + 1 : end], tokens[end - 1 : end]))
        loss_mask = torch.cat((loss_mask[:-1], torch.zeros(1)))
    return Sample(
        tokens=tokens[start:end],
        labels=next_tokens if labels is None else labels[start:end],
        loss_mask=loss_mask.to(torch.float32),
        position_ids=torch.arange(length) if positions is None else positions[start:end],
        source=source,
    )


def _flat(values: Any, dtype: torch.dtype) -> Tensor:
    tensor = torch.as_tensor(values).detach()
    if tensor.dim() > 1 and tensor.numel() != tensor.shape[-1]:
        raise ValueError(
            f"a sample's fields must be [L] or [1, L], but one is {list(tensor.shape)}; "
            "hand rows over as a list of samples"
        )
    return tensor.to("cpu", dtype).reshape(-1)


def encode(sample: Sample) -> tuple[int, Tensor]:
    """`sample` as (kind, int32 words). `kind` and the length give the number of words: `num_words`."""
    kind = sample.source << _SOURCE_SHIFT
    parts = [sample.tokens.to(torch.int32)]
    if torch.equal(sample.labels[:-1], sample.tokens[1:]):
        parts.append(sample.labels[-1:].to(torch.int32))
    else:
        kind |= LABELS_EXPLICIT
        parts.append(sample.labels.to(torch.int32))
    weight = sample.loss_mask.max()
    if bool(((sample.loss_mask == 0) | (sample.loss_mask == weight)).all()):
        flags = torch.zeros(4 * math.ceil(len(sample) / 4), dtype=torch.uint8)
        flags[: len(sample)] = sample.loss_mask != 0
        parts += [weight.reshape(1).view(torch.int32), flags.view(torch.int32)]
    else:
        kind |= MASK_EXPLICIT
        parts.append(sample.loss_mask.contiguous().view(torch.int32))
    if not torch.equal(sample.position_ids, torch.arange(len(sample))):
        kind |= POSITIONS_EXPLICIT
        parts.append(sample.position_ids.to(torch.int32))
    return kind, torch.cat(parts)


def num_words(length: np.ndarray, kind: np.ndarray) -> np.ndarray:
    """int32 words of samples on the wire, int64 of the same shape as `length` and `kind`."""
    labels = np.where(kind & LABELS_EXPLICIT, length, 1)
    mask = np.where(kind & MASK_EXPLICIT, length, 1 + (length + 3) // 4)
    positions = np.where(kind & POSITIONS_EXPLICIT, length, 0)
    return length + labels + mask + positions


def decode(length: int, kind: int, words: Tensor) -> Sample:
    """The inverse of `encode`, on the device of `words`; no host sync."""
    tokens, words = words[:length].to(torch.int64), words[length:]
    if kind & LABELS_EXPLICIT:
        labels, words = words[:length].to(torch.int64), words[length:]
    else:
        labels, words = torch.cat((tokens[1:], words[:1].to(torch.int64))), words[1:]
    if kind & MASK_EXPLICIT:
        loss_mask, words = words[:length].view(torch.float32), words[length:]
    else:
        num_flag_words = (length + 3) // 4
        flags = words[1 : 1 + num_flag_words].view(torch.uint8)[:length]
        loss_mask, words = words[:1].view(torch.float32) * flags, words[1 + num_flag_words :]
    if kind & POSITIONS_EXPLICIT:
        position_ids = words[:length].to(torch.int64)
    else:
        position_ids = torch.arange(length, device=words.device)
    return Sample(tokens, labels, loss_mask, position_ids, kind >> _SOURCE_SHIFT)
