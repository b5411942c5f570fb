"""mcore. The log-probability of each path of a pack: what preference losses are made of.

Tokens that paths share are computed once and belong to the sum of each path, so their gradients are
those of all of them.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel.mappings import reduce_from_tensor_model_parallel_region
from torch import Tensor

from megatron.packing.model.get_batch import Batch


def path_log_probs(
    batch: Batch, losses: Tensor, cp_group: dist.ProcessGroup, allow_parts: bool = False
) -> Tensor:
    """Returns the sum of the log-probabilities of each path's trained tokens, without weights, [n]
    in at least float32; to be called on the last stage, by all ranks of `cp_group`.

    The same on all context-parallel ranks. A loss of it may be computed, and its gradient taken, on
    each of them alike; count it on one of them. Price: an all-reduce of n numbers.

    Args:
        losses: cross entropy of each token of this rank's shard, [1, T / context-parallel size],
            as a GPTModel returns it.
        allow_parts: takes packs that have parts of a tree only; sums of a path are then to be
            added up, by its id, over packs and data-parallel ranks.

    Raises ValueError where samples have no fields per path, and for parts unless allowed.
    """
    sums = weighted_path_log_probs(batch, losses, cp_group, None, allow_parts)
    return sums[0].to(torch.promote_types(losses.dtype, torch.float32))


def weighted_path_log_probs(
    batch: Batch,
    losses: Tensor,
    cp_group: dist.ProcessGroup,
    weights: Tensor | None,
    allow_parts: bool = False,
) -> Tensor:
    """Returns several sums of the log-probabilities of each path's trained tokens, float64 [k, n].

    A token that paths share may count in one path's sum and not in the other's. Sums are float64:
    those of float32 numbers then hardly depend on the order of additions, which differs between
    passes on a GPU.

    Args:
        weights: [k, m], a weight of each pair of token and path (`batch.paths`) in each sum; None
            for one sum of all, without weights.

    Otherwise as `path_log_probs`.
    """
    paths = batch.paths
    if paths is None:
        raise ValueError(
            "samples have no fields per path, by which log-probabilities could be distinguished; "
            "make them with megatron.packing.batch.paths.merge_with_fields"
        )
    if not (paths.are_whole or allow_parts):
        raise ValueError(
            "a pack has only a part of a tree, which was larger than a pack, or whose paths are "
            "trained apart (a warning said so); raise --max-seqlen-per-dp-cp-rank, or add up the "
            "parts that allow_parts=True gives"
        )
    of_pairs = -losses.double().flatten().index_select(0, paths.token)
    rows = of_pairs.unsqueeze(0) if weights is None else of_pairs * weights
    sums = rows.new_zeros(len(rows), len(paths.num_tokens)).index_add(1, paths.path, rows)
    return reduce_from_tensor_model_parallel_region(sums, group=cp_group)
