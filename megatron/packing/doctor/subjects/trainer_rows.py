"""tensor. Rows of a Trainer's data set, made of the doctor's sequences: with the columns that the
data set has, and several sequences in a row where its rows hold several.

A collator that is given other columns would pack otherwise: without `position_ids` it forgets the
borders, and with a mask that the trainer drops before the collator it shows them twice.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise
from typing import Any

import torch
from torch import Tensor

from megatron.packing.doctor.subjects.collators import IGNORED

_NUM_ROWS = 8
"""First rows of the data set that are looked at: one of them may hold a single sequence."""
_MASKS = ("completion_mask", "assistant_masks", "loss_mask")


@dataclass(frozen=True, kw_only=True)
class TrainerRows:
    """How a trainer's data set gives samples to its collator."""

    collate: Callable[[list[dict[str, Any]]], Mapping[str, Any]]
    columns: Mapping[str, Any]
    """A row of the data set; empty where none could be read."""
    width: int
    """Tokens of each row, where they have one length and that row ends with padding; else 0."""
    holds_several: bool
    """Whether a row holds several sequences."""
    has_indices: bool
    """Whether its `attention_mask` numbers the sequences from 1."""
    drops_first: bool
    """Whether its labels leave out the first token, which a collator else has to drop."""

    @property
    def masks_prompts(self) -> bool:
        """Whether rows say which tokens are trained."""
        return not self.columns or bool({"labels", *_MASKS} & self.columns.keys())

    def batch(self, sequences: Sequence[Tensor], labels: Sequence[Tensor]) -> Mapping[str, Any]:
        """Returns what the collator makes of token ids and labels of sequences."""
        first = torch.tensor([IGNORED] * self.drops_first, dtype=torch.int64)
        pairs = [
            (tokens, torch.cat([first, targets[len(first) :]]))
            for tokens, targets in zip(sequences, labels)
        ]
        groups = [pairs] if self.holds_several else [[pair] for pair in pairs]
        return self.collate([self._row(group) for group in groups])

    def _row(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> dict[str, Any]:
        if not self.columns:
            (tokens, targets) = (torch.cat(parts).tolist() for parts in zip(*pairs))
            return {"input_ids": tokens, "labels": targets}
        lengths = [len(tokens) for tokens, _ in pairs]
        own: dict[str, Any] = {
            "input_ids": torch.cat([tokens for tokens, _ in pairs]).tolist(),
            "labels": torch.cat([targets for _, targets in pairs]).tolist(),
            "position_ids": [*chain(*(range(length) for length in lengths))],
            "attention_mask": [
                index + 1 if self.has_indices else 1
                for index, length in enumerate(lengths)
                for _ in range(length)
            ],
            "token_type_ids": [0] * sum(lengths),
            "seq_lengths": lengths,
            "length": sum(lengths),
            "num_tokens": sum(lengths),
        }
        own |= {name: [int(label != IGNORED) for label in own["labels"]] for name in _MASKS}
        padding = max(0, self.width - sum(lengths))
        for name, value in own.items():  # as the data set pads: its last values
            if isinstance(value, list) and name != "seq_lengths" and name in self.columns:
                value += [self.columns[name][-1]] * padding
        return {name: own.get(name, value) for name, value in self.columns.items()}


def rows_of_trainer(trainer: Any) -> TrainerRows:
    """Returns how the trainer's own data loader gives samples to its collator."""
    collate, rows = trainer.data_collator, []
    if getattr(trainer, "train_dataset", None) is not None:
        loader = trainer.get_train_dataloader()
        collate = getattr(loader, "collate_fn", None) or collate
        rows = _first_rows(getattr(loader, "dataset", None))
    padded = [row for row in rows if row.get("labels", (0,))[-1] == IGNORED]
    columns = next(iter(padded or rows), {})
    widths = {len(row["input_ids"]) for row in rows}
    has_indices = any(max(row.get("attention_mask", (1,))) > 1 for row in rows)
    return TrainerRows(
        collate=collate,
        columns=columns,
        width=max(widths) if padded and len(rows) > 1 and len(widths) == 1 else 0,
        holds_several=bool(getattr(trainer.args, "packing", False))
        or "seq_lengths" in columns
        or has_indices
        or any(_restarts(row.get("position_ids", ())) for row in rows),
        has_indices=has_indices,
        drops_first=bool(rows) and all(row.get("labels", (0,))[0] == IGNORED for row in rows),
    )


def _first_rows(dataset: Any) -> list[Mapping[str, Any]]:
    """Returns the first rows with tokens; none of a stream, which would lose them."""
    if not hasattr(dataset, "__getitem__") or not hasattr(dataset, "__len__"):
        return []
    rows = [dataset[index] for index in range(min(len(dataset), _NUM_ROWS))]
    return [row for row in rows if isinstance(row, Mapping) and "input_ids" in row]


def _restarts(positions: Sequence[int]) -> bool:
    """Returns whether positions begin again behind the first token, padding apart: 0 1 2 0 1 does,
    0 1 2 0 0 does not.
    """
    values = [int(position) for position in positions]
    return (0, 1) in pairwise(values[1:])
