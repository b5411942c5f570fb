"""tensor. Ways in which users of transformers put sequences into one batch.

Each takes samples and the padding token, and returns arguments of the model's `forward` (and of its
loss), and the rows of each sequence in the flattened batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron.packing.doctor.unusable import Unusable

IGNORED = -100


class Batch(NamedTuple):
    """One pack, as a collator makes it."""

    arguments: dict[str, Any]
    """Arguments of the model's forward; `labels` among them."""
    rows: list[Tensor]
    """Rows of each sequence in the flattened [batch, length], int64 [length]."""


class Collator(NamedTuple):
    """A way of packing."""

    about: str
    collate: Callable[[Sequence[Tensor], Sequence[Tensor], int], Batch]
    """Takes token ids and labels (not shifted) of each sequence, and a token for padding."""
    use_cache: bool = False
    """The argument of forward: trainers switch it off, loops written by hand leave the default."""


def _consecutive(sequences: Sequence[Tensor]) -> list[Tensor]:
    ends = torch.tensor([len(tokens) for tokens in sequences]).cumsum(0).tolist()
    return [torch.arange(end - len(tokens), end) for tokens, end in zip(sequences, ends)]


def _features(sequences: Sequence[Tensor], labels: Sequence[Tensor]) -> list[dict[str, list[int]]]:
    return [
        {"input_ids": tokens.tolist(), "labels": targets.tolist()}
        for tokens, targets in zip(sequences, labels)
    ]


def _flattening(**options: bool) -> Callable[..., Batch]:
    def collate(sequences: Sequence[Tensor], labels: Sequence[Tensor], fill: int) -> Batch:
        from transformers import DataCollatorWithFlattening

        arguments = dict(DataCollatorWithFlattening(**options)(_features(sequences, labels)))
        return Batch(arguments, _consecutive(sequences))

    return collate


def _trl(sequences: Sequence[Tensor], labels: Sequence[Tensor], fill: int) -> Batch:
    try:
        from trl.trainer.sft_trainer import DataCollatorForLanguageModeling
    except ImportError as error:
        raise Unusable(
            "--collator trl needs TRL's own collator, which cannot be imported here: "
            f"{error}; run pip install trl"
        ) from error
    tokens = torch.cat(list(sequences)).tolist()
    example = {
        "input_ids": tokens,
        "labels": torch.cat(list(labels)).tolist(),
        "seq_lengths": [len(tokens) for tokens in sequences],
    }
    arguments = dict(
        DataCollatorForLanguageModeling(pad_token_id=fill, padding_free=True)([example])
    )
    return Batch(arguments, _consecutive(sequences))


def _stream(sequences: Sequence[Tensor], labels: Sequence[Tensor]) -> dict[str, Any]:
    """Returns tokens, restarting positions and labels of one stream, [1, rows]."""
    targets = [of_sequence.clone() for of_sequence in labels]
    for of_sequence in targets:
        of_sequence[0] = IGNORED
    return {
        "input_ids": torch.cat(list(sequences))[None],
        "position_ids": torch.cat([torch.arange(len(tokens)) for tokens in sequences])[None],
        "labels": torch.cat(targets)[None],
    }


def _positions(sequences: Sequence[Tensor], labels: Sequence[Tensor], fill: int) -> Batch:
    return Batch(_stream(sequences, labels), _consecutive(sequences))


def _all_ones(sequences: Sequence[Tensor], labels: Sequence[Tensor], fill: int) -> Batch:
    arguments = _stream(sequences, labels)
    arguments["attention_mask"] = torch.ones_like(arguments["input_ids"])
    return Batch(arguments, _consecutive(sequences))


def _block_mask(sequences: Sequence[Tensor]) -> Tensor:
    """Returns which rows may see which, bool [rows, rows]."""
    owner = torch.cat([torch.full((len(tokens),), i) for i, tokens in enumerate(sequences)])
    return (owner[:, None] == owner[None]).tril()


def _mask_4d(sequences: Sequence[Tensor], labels: Sequence[Tensor], fill: int) -> Batch:
    arguments = _stream(sequences, labels)
    dtype = torch.get_default_dtype()
    mask = torch.zeros(1, 1, *_block_mask(sequences).shape, dtype=dtype)
    mask.masked_fill_(~_block_mask(sequences), torch.finfo(dtype).min)
    arguments["attention_mask"] = mask
    return Batch(arguments, _consecutive(sequences))


def _boolean_4d(sequences: Sequence[Tensor], labels: Sequence[Tensor], fill: int) -> Batch:
    arguments = _stream(sequences, labels)
    arguments["attention_mask"] = _block_mask(sequences)[None, None]
    return Batch(arguments, _consecutive(sequences))


def _padded(left: bool) -> Callable[..., Batch]:
    def collate(sequences: Sequence[Tensor], labels: Sequence[Tensor], fill: int) -> Batch:
        width = max(map(len, sequences)) + 1  # every sequence has padding
        shape = (len(sequences), width)
        tokens, targets = torch.full(shape, fill), torch.full(shape, IGNORED)
        mask, rows = torch.zeros(shape, dtype=torch.int64), []
        for index, (sequence, own) in enumerate(zip(sequences, labels)):
            start = width - len(sequence) if left else 0
            places = torch.arange(start, start + len(sequence))
            tokens[index, places], targets[index, places], mask[index, places] = sequence, own, 1
            rows.append(index * width + places)
        arguments = {"input_ids": tokens, "labels": targets, "attention_mask": mask}
        return Batch(arguments, rows)

    return collate


COLLATORS = {
    "flattening": Collator("DataCollatorWithFlattening, as the Trainer calls it", _flattening()),
    "flattening-borders": Collator(
        "the same with return_flash_attn_kwargs and return_seq_idx",
        _flattening(return_flash_attn_kwargs=True, return_seq_idx=True),
    ),
    "trl": Collator("TRL's collator, padding_free with seq_lengths, as packing calls it", _trl),
    "positions": Collator(
        "restarting position_ids with forward's default use_cache", _positions, use_cache=True
    ),
    "ones": Collator("restarting position_ids with a mask of ones", _all_ones),
    "mask": Collator("a block-diagonal 4-D mask of floats", _mask_4d),
    "boolean-mask": Collator("a block-diagonal 4-D mask of booleans", _boolean_4d),
    "padded": Collator("one sequence a row, padded at its end", _padded(left=False)),
    "padded-left": Collator("one sequence a row, padded at its beginning", _padded(left=True)),
}
"""Name -> way of packing."""
