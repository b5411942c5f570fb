"""collective. Schedule -> samples on their ranks, and from there to tensor-parallel peers. Two collectives per global
batch.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from megatron.packing.step.lengths import device_of


def redistribute(
    words: Sequence[Tensor],
    num_words: np.ndarray,
    source_rank: np.ndarray,
    target_rank: np.ndarray,
    group: dist.ProcessGroup,
) -> Tensor:
    """Send each sample to the rank that the schedule gives it; one all-to-all.

    words: this rank's samples on the wire (int32), in the order drawn; num_words, source_rank, target_rank: int64
    [N], of all samples in global order. Returns the int32 words of the samples that are this rank's now, in global
    order.
    """
    device = device_of(group)
    mine = np.flatnonzero(source_rank == group.rank())
    by_target = np.argsort(target_rank[mine], kind="stable")
    outgoing = torch.cat([words[i] for i in by_target]) if len(words) else torch.empty(0, dtype=torch.int32)
    if group.size() == 1:
        return outgoing.to(device)
    weights = num_words.astype(np.float64)  # exact: far below 2**53 words
    send = np.bincount(target_rank[mine], weights=weights[mine], minlength=group.size()).astype(np.int64)
    theirs = np.flatnonzero(target_rank == group.rank())
    receive = np.bincount(source_rank[theirs], weights=weights[theirs], minlength=group.size()).astype(np.int64)
    incoming = torch.empty(int(receive.sum()), dtype=torch.int32, device=device)
    dist.all_to_all_single(incoming, outgoing.to(device), receive.tolist(), send.tolist(), group=group)
    return incoming


def share_with_peers(words: Tensor | None, num_words: int, group: dist.ProcessGroup) -> Tensor:
    """Broadcast the words of all of this step's samples from tensor-parallel rank 0, who passes them; the others pass
    None.
    """
    device = device_of(group)
    data = torch.empty(num_words, dtype=torch.int32, device=device) if words is None else words.to(device)
    if group.size() > 1 and num_words:
        dist.broadcast(data, src=dist.get_global_rank(group, 0), group=group)
    return data
