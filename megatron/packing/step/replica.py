"""collective. What a data rank has scheduled goes to all ranks of its replica: the plan and the
samples by one broadcast each, payloads to the other ranks of the first stage.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, TypeVar

import torch
import torch.distributed as dist

from megatron.packing.batch.columns import IntArray, Schema, Sizes, num_words
from megatron.packing.batch.payload_bytes import from_bytes, to_bytes
from megatron.packing.batch.payloads import Payload
from megatron.packing.batch.samples import Samples
from megatron.packing.step.decide import Decision
from megatron.packing.step.groups import DataGroups
from megatron.packing.step.stats import PackingStats

T = TypeVar("T")


class StepPlan(NamedTuple):
    """The part of the schedule that the ranks of a replica receive beside the samples."""

    stats: PackingStats
    num_sequences: IntArray
    """int64 [microbatches]"""
    sizes: Sizes
    """Sizes of the sequences of this replica, by microbatch."""
    schema: Schema
    num_payload_bytes: int = 0
    """Bytes that the data rank sends to other ranks of the first stage."""


class Part(NamedTuple):
    """The outcome of a step on a data rank: its replica's part, or the error, or None at the end of
    the data.
    """

    plan: StepPlan | str | None
    samples: Samples
    decision: Decision | None = None
    """On the scheduling rank."""
    payloads: Sequence[Payload | None] = ()
    """Payload of each sequence; empty where none has any."""


def broadcast(value: T, source: int, group: dist.ProcessGroup) -> T:
    """Returns `value` of group rank `source` on every rank of the group."""
    if group.size() == 1:
        return value
    values = [value]
    dist.broadcast_object_list(values, src=dist.get_global_rank(group, source), group=group)
    return values[0]


def broadcast_part(
    part: Part, own: DataGroups
) -> tuple[StepPlan | str | None, Samples, Sequence[Payload | None]]:
    """Returns the plan, the samples and, on its first stage, the payloads of this replica on each
    of its ranks.
    """
    group = own.replica
    if group.size() == 1:
        return part.plan, part.samples, part.payloads
    plan, data = part.plan, torch.empty(0, dtype=torch.uint8)
    if part.payloads and isinstance(plan, StepPlan) and len(own.first_stage) > 1:
        data = to_bytes(part.payloads)
        plan = plan._replace(num_payload_bytes=data.numel())
    plan = broadcast(plan, dist.get_group_rank(group, own.data_rank), group)
    if not isinstance(plan, StepPlan):
        return plan, part.samples, ()
    if own.exchange is not None:
        words = torch.from_numpy(part.samples.to_words())
    else:
        words = torch.empty(num_words(plan.sizes, plan.schema), dtype=torch.int32)
    dist.broadcast(words, src=own.data_rank, group=group)
    payloads = part.payloads
    if plan.num_payload_bytes:
        payloads = _send_payloads(part, data, plan.num_payload_bytes, own)
    if own.exchange is not None:
        return plan, part.samples, payloads
    return plan, Samples.from_words(words.numpy(), plan.sizes, plan.schema), payloads


def _send_payloads(
    part: Part, data: torch.Tensor, num_bytes: int, own: DataGroups
) -> Sequence[Payload | None]:
    """Returns the payloads on all ranks of the replica's first stage; none on others."""
    if own.exchange is not None:
        others = [rank for rank in own.first_stage if rank != own.data_rank]
        for sent in [dist.isend(data, rank, group=own.replica) for rank in others]:
            assert sent is not None, "this rank is in its replica"
            sent.wait()
        return part.payloads
    if dist.get_rank() not in own.first_stage:
        return ()
    received = torch.empty(num_bytes, dtype=torch.uint8)
    dist.recv(received, own.data_rank, group=own.replica)
    return from_bytes(received)
