"""collective. All that ranks send one another for a global batch, in order.

gather     the first data rank, the scheduling rank, receives a report of each
decide     it schedules, and all data ranks receive the decision, or its error
move       one all-to-all brings each sample to the data rank of the replica that trains it
broadcast  each data rank sends its replica the plan and the samples by one broadcast each, and the
           payloads to the other ranks of the first stage

Errors travel as values, and are raised alike on every rank that waits for the result.
"""

from __future__ import annotations

import logging
import pickle
from collections.abc import Sequence
from typing import NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from megatron.packing.batch.columns import IntArray, Schema, Sizes, num_words, split_at
from megatron.packing.batch.payload_bytes import from_bytes, to_bytes
from megatron.packing.batch.payloads import Payload
from megatron.packing.batch.samples import Samples, joined
from megatron.packing.step.decide import Decision, GlobalBatchError, RankReport, decide
from megatron.packing.step.delay import Delayed
from megatron.packing.step.groups import DataGroups
from megatron.packing.step.run_fields import RunFields
from megatron.packing.step.settings import PackingSettings
from megatron.packing.step.stats import PackingStats

T = TypeVar("T")
logger = logging.getLogger(__name__)


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


class ReplicaPart(NamedTuple):
    """The part of a global batch that a replica trains, as its data rank has scheduled it."""

    plan: StepPlan
    samples: Samples
    payloads: Sequence[Payload | None] = ()
    """Payload of each sequence, on ranks of the first stage; empty if none has any."""
    delayed: Delayed = Delayed.none()
    """Sequences that its data rank loaded and that wait for a later step; none on other ranks."""
    decision: Decision | None = None
    """On the scheduling rank."""


def decide_together(
    report: RankReport,
    num_fetches: int,
    settings: PackingSettings,
    data_ranks_group: dist.ProcessGroup,
    max_delay: int | None,
    run_fields: RunFields | None = None,
) -> Decision:
    """Returns the scheduling rank's decision on all data ranks; see `decide`.

    Raises on all of them alike: GlobalBatchError, whatever `decide` raises, and StopIteration at
    the end of the data.
    """
    reports = gather(report, data_ranks_group)
    answer: Decision | GlobalBatchError | None = None
    if reports is not None:
        try:
            answer = decide(reports, num_fetches, settings, max_delay, run_fields)
        except GlobalBatchError as failure:  # the other data ranks wait for an answer
            answer = failure
        except Exception as failure:  # a defect, or no memory: they must not wait for ever either
            logger.exception("the step cannot be scheduled")
            cause = f"{type(failure).__name__}: {failure}"
            answer = GlobalBatchError(f"rank {dist.get_rank()} cannot schedule the step: {cause}")
    answer = broadcast(answer, 0, data_ranks_group)
    if answer is None:
        raise StopIteration
    if isinstance(answer, GlobalBatchError):
        raise answer
    return answer


def gather(report: RankReport, data_ranks_group: dist.ProcessGroup) -> list[RankReport] | None:
    """Returns all reports on the first data rank, which schedules; None on the others."""
    if data_ranks_group.size() == 1:
        return [report]
    # gather_object would send all ranks all sizes first, in a ring, and pad each report to the
    # largest.
    mine = torch.frombuffer(bytearray(pickle.dumps(report)), dtype=torch.uint8)
    size, first = torch.tensor([mine.numel()]), dist.get_global_rank(data_ranks_group, 0)
    if data_ranks_group.rank() != 0:
        dist.gather(size, dst=first, group=data_ranks_group)
        dist.send(mine, first, group=data_ranks_group)
        return None
    sizes = [torch.empty_like(size) for _ in range(data_ranks_group.size())]
    dist.gather(size, sizes, dst=first, group=data_ranks_group)
    reports = [report]
    for rank in range(1, data_ranks_group.size()):
        other = torch.empty(int(sizes[rank]), dtype=torch.uint8)
        dist.recv(other, dist.get_global_rank(data_ranks_group, rank), group=data_ranks_group)
        reports.append(pickle.loads(other.numpy().tobytes()))
    return reports


def broadcast(value: T, source: int, group: dist.ProcessGroup) -> T:
    """Returns `value` of group rank `source` on every rank of the group."""
    if group.size() == 1:
        return value
    values = [value]
    dist.broadcast_object_list(values, src=dist.get_global_rank(group, source), group=group)
    return values[0]


def move(
    samples: Samples, decision: Decision, data_ranks_group: dist.ProcessGroup
) -> tuple[Samples, npt.NDArray[np.int32]]:
    """Sends each sample to the data rank of the replica that trains it; returns those that this
    replica trains, and the microbatch of each.

        rank 0 holds a b c with targets 1 0 1, rank 1 holds d e with targets 0 1
        ->    rank 0 receives b d, rank 1 receives a c e: by source, then in the order held there
    """
    rank, size = data_ranks_group.rank(), data_ranks_group.size()
    target = decision.rank[decision.source_rank == rank]
    # Sequences that wait have target -1, and are sorted before all others:
    # target 1 -1 0 1, one waits    ->    order 2 0 3
    order = np.argsort(target, kind="stable")[int((target < 0).sum()) :]
    outgoing = samples.take(order)
    mine = decision.rank == rank
    if size == 1:
        return outgoing, decision.microbatch[mine]
    parts = outgoing.split(np.bincount(target[order], minlength=size))
    words = [part.to_words() for part in parts]
    # Every data rank has the sizes of all sequences, so both ends know each message's length.
    sources = np.bincount(decision.source_rank[mine], minlength=size)
    sizes = decision.sizes.take(mine).split(np.cumsum(sources)[:-1])
    receive = [num_words(part, decision.schema) for part in sizes]
    incoming = torch.empty(sum(receive), dtype=torch.int32)
    dist.all_to_all_single(
        incoming,
        torch.from_numpy(np.concatenate(words)),
        receive,
        [part.size for part in words],
        group=data_ranks_group,
    )
    received = split_at(incoming.numpy(), np.cumsum(receive)[:-1])
    arrived = [
        Samples.from_words(part, part_sizes, decision.schema)
        for part, part_sizes in zip(received, sizes)
    ]
    return joined(arrived), decision.microbatch[mine]


def broadcast_part(
    part: ReplicaPart | GlobalBatchError | StopIteration | None, groups: DataGroups
) -> ReplicaPart:
    """Returns the part of this replica on each of its ranks, or raises the data rank's error there.

    Args:
        part: the part, or the error, on the data rank; None on the others.
    """
    group, data = groups.replica, torch.empty(0, dtype=torch.uint8)
    plan = part.plan if isinstance(part, ReplicaPart) else part
    if isinstance(part, ReplicaPart) and part.payloads and len(groups.first_stage) > 1:
        data = to_bytes(part.payloads)
        plan = part.plan._replace(num_payload_bytes=data.numel())
    plan = broadcast(plan, dist.get_group_rank(group, groups.data_rank), group)
    if isinstance(plan, Exception):
        raise plan
    assert plan is not None, "the data rank has a part or an error"
    if group.size() == 1:
        assert isinstance(part, ReplicaPart)
        return part
    if isinstance(part, ReplicaPart):
        words = torch.from_numpy(part.samples.to_words())
    else:
        words = torch.empty(num_words(plan.sizes, plan.schema), dtype=torch.int32)
    dist.broadcast(words, src=groups.data_rank, group=group)
    if isinstance(part, ReplicaPart):
        _send_payloads(data, groups)
        return part
    samples = Samples.from_words(words.numpy(), plan.sizes, plan.schema)
    return ReplicaPart(plan, samples, _receive_payloads(plan.num_payload_bytes, groups))


def _send_payloads(data: torch.Tensor, groups: DataGroups) -> None:
    """Sends bytes from the data rank to the other ranks of its first stage; nothing if there are
    none.
    """
    if data.numel():
        others = [rank for rank in groups.first_stage if rank != groups.data_rank]
        for sent in [dist.isend(data, rank, group=groups.replica) for rank in others]:
            assert sent is not None, "this rank is in its replica"
            sent.wait()


def _receive_payloads(num_bytes: int, groups: DataGroups) -> Sequence[Payload | None]:
    """Returns the payloads that `_send_payloads` sent; none on ranks of later stages."""
    if not num_bytes or dist.get_rank() not in groups.first_stage:
        return ()
    received = torch.empty(num_bytes, dtype=torch.uint8)
    dist.recv(received, groups.data_rank, group=groups.replica)
    return from_bytes(received)
