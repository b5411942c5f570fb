"""collective. Values compared over all ranks, so that every rank raises the same error."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch.distributed as dist

from megatron.sft.heartbeat.cause import ranks_text


class AgreedError(ValueError):
    """Something that ends a run. Every rank raises it, with the same message."""


def check_agreement(own: Mapping[str, Any]) -> None:
    """Raises AgreedError, naming what differs and on which ranks, unless all ranks have the same;
    collective.
    """
    differing = differences(gathered(own))
    if differing:
        more = f"; and {len(differing) - 5} more" if len(differing) > 5 else ""
        raise AgreedError(
            "ranks must be started alike, with the same options, versions and files: "
            f"{'; '.join(differing[:5])}{more}"
        )


def differences(of_ranks: Sequence[Mapping[str, object]]) -> list[str]:
    """Returns what is not as on rank 0: `["--lr is 0.1 on ranks 2-3, but 0.2 on rank 0"]`."""
    found = []
    for name in dict.fromkeys(name for of_rank in of_ranks for name in of_rank):
        # Rank 0 is the reference: a user reads its log first.
        first, *values = (of_rank.get(name, "not read") for of_rank in of_ranks)
        others: dict[str, list[int]] = {}
        for rank, value in enumerate(values, 1):
            if value != first:
                others.setdefault(str(value), []).append(rank)
        found += [
            f"{name} is {value} on {ranks_text(ranks)}, but {first} on rank 0"
            for value, ranks in others.items()
        ]
    return found


def gathered(own: object) -> list[Any]:
    """Returns `own` of each rank, pickled on the way; collective."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, own)
    return found
