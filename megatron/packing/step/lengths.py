"""collective. Gather the lengths of a global batch over data parallel, and let every rank agree on what happened.

A rank that meets the end of its data or an error while drawing does not stop: it says so in the collective that is
there anyway, and all ranks raise the same `GlobalBatchError`, or end together. Text travels only when there is an
error.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

COLUMNS = ("length", "kind", "draw")


class GlobalBatchError(RuntimeError):
    """A rank could not draw, schedule or place its part of the global batch. Raised alike on every rank."""


@dataclass(frozen=True, kw_only=True)
class LengthTable:
    """All sequences of a global batch, in global order: by data-parallel rank, then as drawn. int64 [N] each."""

    length: np.ndarray
    kind: np.ndarray
    draw: np.ndarray
    """Which `next` of this step gave it; of a sequence that waited, minus the number of steps."""
    source_rank: np.ndarray

    checksums: np.ndarray
    """Of each data-parallel rank's samples."""

    @property
    def steps_waited(self) -> np.ndarray:
        """int64 [N]: by how many steps each is later than it was drawn."""
        return np.maximum(-self.draw, 0)

    def only(self, chosen: np.ndarray) -> LengthTable:
        """The sequences where `chosen` (bool [N]) is true."""
        columns = {name: getattr(self, name)[chosen] for name in (*COLUMNS, "source_rank")}
        return LengthTable(**columns, checksums=self.checksums)

    def fingerprint(self) -> int:
        """Equal on ranks that drew the same batch."""
        return zlib.crc32(np.concatenate((self.length, self.kind, self.source_rank, self.checksums)).tobytes())


def device_of(group: dist.ProcessGroup) -> torch.device:
    """Where tensors for this group's collectives must live."""
    # A group of several backends, or of the default ones, has a name of its own; only gloo alone stays on the CPU.
    if not torch.cuda.is_available() or dist.get_backend(group) in ("gloo", "cpu:gloo"):
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())


def agree(group: dist.ProcessGroup, numbers: list[int], error: str | None) -> np.ndarray:
    """Gather `numbers` from all ranks of `group` (int64 [ranks, len(numbers)]): one collective of a few bytes.

    Raises GlobalBatchError on every rank of the group if any rank brings an `error`, with the text of the first one
    that does.
    """
    device = device_of(group)
    text = b"" if error is None else (error or "an error without a text").encode(errors="backslashreplace")
    mine = torch.tensor([len(text), *numbers], dtype=torch.int64, device=device)
    gathered = torch.empty(group.size() * mine.numel(), dtype=torch.int64, device=device)
    dist.all_gather_into_tensor(gathered, mine, group=group)
    table = gathered.view(group.size(), -1).cpu().numpy()
    failed = np.flatnonzero(table[:, 0])
    if failed.size:
        raise GlobalBatchError(_broadcast_text(group, int(failed[0]), int(table[failed[0], 0]), text))
    return table[:, 1:]


def _broadcast_text(group: dist.ProcessGroup, group_rank: int, num_bytes: int, text: bytes) -> str:
    device = device_of(group)
    if group.rank() == group_rank:
        data = torch.tensor(list(text), dtype=torch.uint8, device=device)
    else:
        data = torch.empty(num_bytes, dtype=torch.uint8, device=device)
    dist.broadcast(data, src=dist.get_global_rank(group, group_rank), group=group)
    return bytes(data.cpu().tolist()).decode()


def gather_table(group: dist.ProcessGroup, rows: np.ndarray, counts: np.ndarray, checksums: np.ndarray) -> LengthTable:
    """Gather the rows of all data-parallel ranks.

    rows: int64 [n, 3], the `COLUMNS` of this rank's samples; counts, checksums: int64 [dp], of each rank's. One
    collective of 24 bytes per sequence, padded to the largest rank.
    """
    device = device_of(group)
    padded = np.zeros((max(int(counts.max()), 1), len(COLUMNS)), dtype=np.int64)
    padded[: len(rows)] = rows
    gathered = torch.empty((group.size() * len(padded), len(COLUMNS)), dtype=torch.int64, device=device)
    dist.all_gather_into_tensor(gathered, torch.from_numpy(padded).to(device), group=group)
    by_rank = gathered.cpu().numpy().reshape(group.size(), len(padded), len(COLUMNS))
    table = np.concatenate([by_rank[rank, :count] for rank, count in enumerate(counts)])
    return LengthTable(
        length=table[:, 0].copy(),
        kind=table[:, 1].copy(),
        draw=table[:, 2].copy(),
        source_rank=np.repeat(np.arange(group.size(), dtype=np.int64), counts),
        checksums=checksums,
    )


def broadcast_numbers(group: dist.ProcessGroup, numbers: np.ndarray | int, source: int) -> np.ndarray:
    """Broadcast int64 numbers from group rank `source`; other ranks pass how many they expect."""
    device = device_of(group)
    if isinstance(numbers, np.ndarray):
        data: Tensor = torch.from_numpy(np.ascontiguousarray(numbers, dtype=np.int64)).to(device)
    else:
        data = torch.empty(numbers, dtype=torch.int64, device=device)
    dist.broadcast(data, src=dist.get_global_rank(group, source), group=group)
    return data.cpu().numpy()
