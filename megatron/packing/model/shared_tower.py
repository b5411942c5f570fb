"""mcore. A vision tower that encodes each image of a pack once: the ranks that hold the pack share
out its images.

    gpt.tower = SharedTower(tower, config, groups)
    embeddings = gpt.tower(images, num_rows)    # all of them, on each rank

Without it each tensor- and context-parallel rank encodes all images, for a part of the tokens each.
Context-parallel ranks always share, tensor-parallel ranks with sequence parallel, where
megatron-core sums the gradients of what they hold alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor


class SharedTower(torch.nn.Module):
    """A tower whose images are shared out over tensor- and context-parallel ranks.

    Exact: embeddings and gradients are those of a rank that encodes all images. Each forward pass
    sends the embeddings of a pack in one all-reduce per group, each backward pass their gradients
    in one over context-parallel ranks.
    """

    def __init__(
        self,
        tower: torch.nn.Module,
        config: TransformerConfig,
        groups: ProcessGroupCollection,
    ) -> None:
        """Takes the tower.

        Args:
            tower: module of a list of images to [n, h], the rows of all of them in order. It holds
                whole parameters on each tensor-parallel rank.
            groups: `tp` and `cp`.
        """
        super().__init__()
        self.tower = tower
        self._tp = groups.tp if config.sequence_parallel else None
        self._cp = groups.cp
        for parameter in tower.parameters():
            # megatron-core then sums their gradients over tensor-parallel ranks.
            parameter.sequence_parallel = self._tp is not None  # type: ignore[attr-defined]

    def forward(
        self,
        images: Sequence[Any],
        num_rows: Sequence[int],
        costs: Sequence[float] | None = None,
    ) -> Tensor:
        """Returns the rows of all images, [sum(num_rows), h], on each rank.

        Args:
            images: at least one, the same on each rank.
            num_rows: rows that the tower makes of each.
            costs: what each takes to encode, to share them out evenly; None takes `num_rows`.

        Raises:
            ValueError: `num_rows` or `costs` are not one for each image, or the tower makes another
                number of rows.
        """
        for name, values in (("num_rows", num_rows), ("costs", costs)):
            if values is not None and len(values) != len(images):
                raise ValueError(
                    f"{name} must be one for each of {len(images)} images, but is {values}"
                )
        tp_size, tp_rank = (1, 0) if self._tp is None else (self._tp.size(), self._tp.rank())
        num_ranks = tp_size * self._cp.size()
        if num_ranks == 1:
            rows: Tensor = self.tower(images)
            return rows
        rank = self._cp.rank() * tp_size + tp_rank
        own = shares(num_rows if costs is None else costs, num_ranks)[rank]
        # A rank without an image encodes one for nothing: all parameters must have a gradient.
        made = self.tower([images[i] for i in own or [0]])
        expected = sum(num_rows[i] for i in own or [0])
        if len(made) != expected:
            raise ValueError(
                f"the tower made {len(made)} rows of images {own or [0]}, but num_rows says "
                f"{expected}"
            )
        starts = list(accumulate(num_rows, initial=0))
        places = [torch.arange(starts[i], starts[i + 1]) for i in own]
        embeddings = made.new_zeros(starts[-1], made.shape[-1])
        if own:
            embeddings = embeddings.index_copy(0, torch.cat(places).to(made.device), made)
        else:
            embeddings = embeddings + (0 * made).sum()  # a sum of float16 may be infinite
        summed: Tensor = _SumOfShares.apply(embeddings, self._tp, self._cp)
        return summed


def shares(costs: Sequence[float], num_ranks: int) -> list[list[int]]:
    """Returns the images of each rank, in order: the dearest first, to the rank with the least.

    costs 5 1 3 3, 2 ranks    ->    0 1 | 2 3
    """
    found: list[list[int]] = [[] for _ in range(num_ranks)]
    totals = [0.0] * num_ranks
    for number in sorted(range(len(costs)), key=lambda i: -costs[i]):
        rank = min(range(num_ranks), key=totals.__getitem__)
        found[rank].append(number)
        totals[rank] += costs[number]
    return [sorted(images) for images in found]


class _SumOfShares(torch.autograd.Function):
    """Sums rows of which each rank has its own, the others zero.

    Tensor-parallel ranks have the same gradient of all rows, context-parallel ranks that of their
    tokens.
    """

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, tp: dist.ProcessGroup | None, cp: dist.ProcessGroup
    ) -> Tensor:
        ctx.cp, summed = cp, rows.clone()
        for group in (tp, cp):
            if group is not None and group.size() > 1:
                dist.all_reduce(summed, group=group)
        return summed

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        summed = gradient.clone()
        if ctx.cp.size() > 1:
            dist.all_reduce(summed, group=ctx.cp)
        return summed, None, None
