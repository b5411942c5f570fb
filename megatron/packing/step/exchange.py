"""collective. What data ranks exchange in a step: reports for the schedule, then the samples.

gather     the first data rank, the scheduling rank, receives a report of each
decide     it schedules, and all data ranks receive the decision, or its error
move       one all-to-all brings each sample to the data rank of the replica that trains it
"""

from __future__ import annotations

import pickle

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from megatron.packing.batch.columns import num_words
from megatron.packing.batch.samples import Samples, joined
from megatron.packing.step.decide import Decision, GlobalBatchError, RankReport, decide
from megatron.packing.step.replica import broadcast
from megatron.packing.step.settings import PackingSettings


def decide_together(
    report: RankReport,
    num_fetches: int,
    settings: PackingSettings,
    exchange: dist.ProcessGroup,
    max_delay: int | None,
) -> Decision | str | None:
    """Returns the scheduling rank's decision, or its error, on all data ranks; see `decide`."""
    reports = gather(report, exchange)
    decision: Decision | str | None = None
    if reports is not None:
        try:
            decision = decide(reports, num_fetches, settings, max_delay)
        except GlobalBatchError as failure:  # the other data ranks wait for an answer
            decision = str(failure)
    return broadcast(decision, 0, exchange)


def gather(report: RankReport, exchange: dist.ProcessGroup) -> list[RankReport] | None:
    """Returns all reports on the first data rank, which schedules; None on the others."""
    if exchange.size() == 1:
        return [report]
    # gather_object would send all ranks all sizes first, in a ring, and pad each report to the
    # largest.
    mine = torch.frombuffer(bytearray(pickle.dumps(report)), dtype=torch.uint8)
    size, first = torch.tensor([mine.numel()]), dist.get_global_rank(exchange, 0)
    if exchange.rank() != 0:
        dist.gather(size, dst=first, group=exchange)
        dist.send(mine, first, group=exchange)
        return None
    sizes = [torch.empty_like(size) for _ in range(exchange.size())]
    dist.gather(size, sizes, dst=first, group=exchange)
    reports = [report]
    for rank in range(1, exchange.size()):
        other = torch.empty(int(sizes[rank]), dtype=torch.uint8)
        dist.recv(other, dist.get_global_rank(exchange, rank), group=exchange)
        reports.append(pickle.loads(other.numpy().tobytes()))
    return reports


def move(
    samples: Samples, decision: Decision, exchange: dist.ProcessGroup
) -> tuple[Samples, npt.NDArray[np.int32]]:
    """Sends each sample to the data rank of the replica that trains it; returns those that this
    replica trains, and the microbatch of each.

        rank 0 holds a b c with targets 1 0 1, rank 1 holds d e with targets 0 1
        ->    rank 0 receives b d, rank 1 receives a c e: by source, then in the order held there
    """
    rank, size = exchange.rank(), exchange.size()
    target = decision.rank[decision.source_rank == rank]
    # Sequences that wait have target -1, and are sorted before all others.
    order = np.argsort(target, kind="stable")[int((target < 0).sum()) :]
    outgoing = samples.take(order)
    mine = decision.rank == rank
    if size == 1:
        return outgoing, decision.microbatch[mine]
    parts = outgoing.split(np.bincount(target[order], minlength=size))
    words = [part.to_words() for part in parts]
    sources = np.bincount(decision.source_rank[mine], minlength=size)
    sizes = decision.sizes.take(mine).split(np.cumsum(sources)[:-1])
    receive = [num_words(part, decision.schema) for part in sizes]
    incoming = torch.empty(sum(receive), dtype=torch.int32)
    dist.all_to_all_single(
        incoming,
        torch.from_numpy(np.concatenate(words)),
        receive,
        [part.size for part in words],
        group=exchange,
    )
    received = np.split(incoming.numpy(), np.cumsum(receive)[:-1])
    arrived = [Samples.from_words(part, its, decision.schema) for part, its in zip(received, sizes)]
    return joined(arrived), decision.microbatch[mine]
