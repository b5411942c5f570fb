"""collective. Payloads of a global batch: what a rank gives away travels by key or as tensors, and
the rank that trains a sequence has its tensors.

    swap     each data rank sends what it gives away: two all-to-alls, of sizes and of bytes
    decode   keys become tensors, by `PayloadStore.restore` or the iterator's `restore_sample`
    gather   what failed, and the bytes held and sent, to all data ranks
    again    if a rank could not decode, tensors are sent after all, and it gets no keys any more

A step without payloads does none of it.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from megatron.packing.batch.columns import PAYLOADS
from megatron.packing.batch.payload_bytes import from_bytes, to_bytes
from megatron.packing.batch.payloads import Payload
from megatron.packing.batch.samples import Samples
from megatron.packing.step.decide import Decision, GlobalBatchError
from megatron.packing.step.payload_store import Lost, Restore, with_tensors
from megatron.packing.step.payload_store import PayloadStore as PayloadStore

logger = logging.getLogger(__name__)


class PayloadError(GlobalBatchError):
    """A payload that no rank can make; raised alike on all data ranks."""


class Moved(NamedTuple):
    """Payloads where they are trained."""

    held: list[Payload | None]
    """By source, then in the order held there, as the sequences; each with its tensors."""
    number: int
    """Payloads of all ranks."""
    max_bytes: int
    """Bytes of tensors on the data rank that holds most."""
    sent_bytes: int
    """Bytes that data ranks sent one another, keys included."""


class _Failure(NamedTuple):
    source: int
    """Data-parallel rank that loaded the sequence."""
    place: int
    """Number of the sequence among those that came from there."""
    reason: str
    is_final: bool
    """Whether its source failed as well."""


class _Outcome(NamedTuple):
    """Outcome of a swap on one data-parallel rank."""

    failures: list[_Failure]
    number: int = 0
    held_bytes: int = 0
    sent_bytes: int = 0
    num_by_key: int = 0
    unsent_bytes: int = 0
    """Bytes of tensors that stayed where they were, as keys were sent."""


def move_payloads(
    samples: Samples,
    held: Sequence[Payload],
    decision: Decision,
    data_ranks_group: dist.ProcessGroup,
    store: PayloadStore,
    restore: Restore | None,
) -> Moved:
    """Sends each payload to the data rank that trains it, and returns those trained here.

    Collective over the data ranks. Raises PayloadError if a payload can be made on no rank.

    Args:
        samples: the sequences of this rank, in the order of its report.
        held: payloads that their column `payloads` numbers.
        restore: function that makes the payload of a key on this rank; None if nothing does.
    """
    rank = data_ranks_group.rank()
    leaving = _leaving(samples, held, decision, data_ranks_group)
    sent = [
        [_as_sent(payload, to, rank, store, restore) for payload in payloads]
        for to, payloads in enumerate(leaving)
    ]
    arrived, sent_bytes = _swap(sent, data_ranks_group)
    failures = _decode(arrived, restore)
    outcome = _outcome(failures, arrived, sent_bytes)
    by_key = _sent_by_key(leaving, sent, rank)
    outcome = outcome._replace(
        num_by_key=len(by_key), unsent_bytes=sum(payload.num_bytes for payload in by_key)
    )
    outcomes = _gather(outcome, data_ranks_group)
    if rank == 0:
        _say_once(outcomes, store)
    if any(outcome.failures for outcome in outcomes):  # all ranks see the same, and go on alike
        outcomes = _send_again(outcomes, leaving, arrived, data_ranks_group, store, restore)
    return _moved(arrived, outcomes)


def _moved(arrived: Sequence[Sequence[Payload | None]], outcomes: Sequence[_Outcome]) -> Moved:
    """Returns the payloads that arrived here, with the sums over all data ranks."""
    return Moved(
        [payload for payloads in arrived for payload in payloads],
        sum(outcome.number for outcome in outcomes),
        max(outcome.held_bytes for outcome in outcomes),
        sum(outcome.sent_bytes for outcome in outcomes),
    )


def _leaving(
    samples: Samples,
    held: Sequence[Payload],
    decision: Decision,
    data_ranks_group: dist.ProcessGroup,
) -> list[list[Payload | None]]:
    """Returns by data-parallel rank the payloads of this rank's sequences that are trained there;
    None for a sequence of tokens alone.
    """
    target = decision.rank[decision.source_rank == data_ranks_group.rank()]
    numbers = samples.columns[PAYLOADS]
    return [
        [None if number < 0 else held[number] for number in numbers[target == to].tolist()]
        for to in range(data_ranks_group.size())
    ]


def _sent_by_key(
    leaving: Sequence[Sequence[Payload | None]], sent: Sequence[Sequence[Payload | None]], rank: int
) -> list[Payload]:
    """Returns the payloads of which other ranks got the key alone: their tensors stayed here."""
    return [
        whole
        for to, (payloads, as_sent) in enumerate(zip(leaving, sent))
        if to != rank
        for whole, one in zip(payloads, as_sent)
        if whole is not None and one is not None and one.tensors is None
    ]


def _outcome(
    failures: list[_Failure], arrived: Sequence[Sequence[Payload | None]], sent_bytes: int
) -> _Outcome:
    payloads = [payload for of_rank in arrived for payload in of_rank if payload is not None]
    held_bytes = sum(payload.num_bytes for payload in payloads)
    return _Outcome(failures, len(payloads), held_bytes, sent_bytes)


def _send_again(
    outcomes: Sequence[_Outcome],
    leaving: Sequence[Sequence[Payload | None]],
    arrived: list[list[Payload | None]],
    data_ranks_group: dist.ProcessGroup,
    store: PayloadStore,
    restore: Restore | None,
) -> list[_Outcome]:
    """Sends the tensors of payloads whose keys failed, and puts them in their places.

    Returns the outcomes of both times together.
    """
    failed = _failed(outcomes)
    rank = data_ranks_group.rank()
    if rank == 0:
        _say_without_files(failed, store)
    store.without_files |= {to for to, _ in failed}
    sent: list[list[Payload | None]] = [[] for _ in leaving]
    for to, each in failed:
        if each.source == rank:
            whole = leaving[to][each.place]
            assert whole is not None
            sent[to].append(with_tensors(whole, restore))
    received, sent_bytes = _swap(sent, data_ranks_group)
    failures = _decode(received, None)
    failed_here = [each for to, each in failed if to == rank]
    for source, payloads in enumerate(received):
        places = [each.place for each in failed_here if each.source == source]
        for place, payload in zip(places, payloads, strict=True):
            arrived[source][place] = payload
    again = _gather(_outcome(failures, arrived, sent_bytes), data_ranks_group)
    _failed(again)
    return [
        one._replace(held_bytes=other.held_bytes, sent_bytes=one.sent_bytes + other.sent_bytes)
        for one, other in zip(outcomes, again)
    ]


def _failed(outcomes: Sequence[_Outcome]) -> list[tuple[int, _Failure]]:
    """Returns the failures with the rank of each; PayloadError for a payload that its source cannot
    make either.
    """
    failed = [(to, each) for to, outcome in enumerate(outcomes) for each in outcome.failures]
    for to, each in failed:
        if each.is_final or each.source == to:
            raise PayloadError(
                f"a payload of data-parallel rank {each.source} cannot be made: {each.reason}; "
                "the rank that loaded it must be able to make it again"
            )
    return failed


def _say_without_files(failed: Sequence[tuple[int, _Failure]], store: PayloadStore) -> None:
    """Logs the first rank that newly cannot make payloads by their keys."""
    if {to for to, _ in failed} - store.without_files:
        to, first = failed[0]
        logger.warning(
            "data-parallel rank %d cannot make payloads by their keys (%s); their tensors are "
            "sent to it from now on",
            to,
            first.reason,
        )


def _as_sent(
    payload: Payload | None, to: int, rank: int, store: PayloadStore, restore: Restore | None
) -> Payload | None:
    if payload is None or to == rank:
        return payload
    if store.goes_by_key(payload, to):
        return Payload(None, payload.key)
    return with_tensors(payload, restore)


def _decode(arrived: list[list[Payload | None]], restore: Restore | None) -> list[_Failure]:
    """Makes the tensors of keys, in place; returns what failed."""
    failures = []
    for source, payloads in enumerate(arrived):
        for place, payload in enumerate(payloads):
            if payload is None or payload.tensors is not None:
                continue
            is_final = isinstance(payload.key, Lost)
            made = payload if is_final else with_tensors(payload, restore)
            payloads[place] = made
            if made.tensors is None:
                failures.append(_Failure(source, place, made.key.reason, is_final))
    return failures


def _swap(
    sent: Sequence[Sequence[Payload | None]], data_ranks_group: dist.ProcessGroup
) -> tuple[list[list[Payload | None]], int]:
    """Returns what each data rank sent this one, and the bytes that this one sent to others."""
    rank, size = data_ranks_group.rank(), data_ranks_group.size()
    if size == 1:
        return [list(sent[0])], 0
    parts = [to_bytes([] if to == rank else payloads) for to, payloads in enumerate(sent)]
    num_sent = torch.tensor([part.numel() for part in parts])
    num_received = torch.empty_like(num_sent)
    dist.all_to_all_single(num_received, num_sent, group=data_ranks_group)
    incoming = torch.empty(int(num_received.sum()), dtype=torch.uint8)
    dist.all_to_all_single(
        incoming, torch.cat(parts), num_received.tolist(), num_sent.tolist(), group=data_ranks_group
    )
    arrived = [from_bytes(part) for part in incoming.split(num_received.tolist())]
    arrived[rank] = list(sent[rank])
    return arrived, int(num_sent.sum() - num_sent[rank])


def _gather(outcome: _Outcome, data_ranks_group: dist.ProcessGroup) -> list[_Outcome]:
    outcomes: list[Any] = [outcome]
    if data_ranks_group.size() > 1:
        outcomes = [None] * data_ranks_group.size()
        dist.all_gather_object(outcomes, outcome, group=data_ranks_group)
    return outcomes


def _say_once(outcomes: Sequence[_Outcome], store: PayloadStore) -> None:
    """Logs how payloads travel, in the first step in which some do by key."""
    num_by_key = sum(outcome.num_by_key for outcome in outcomes)
    if store.is_said or not num_by_key:
        return
    store.is_said = True
    logger.warning(
        "payloads of %d bytes or more travel as keys, and are decoded where they are trained: %d "
        "of this step, %d bytes sent and %d not",
        store.min_bytes_by_key,
        num_by_key,
        sum(outcome.sent_bytes for outcome in outcomes),
        sum(outcome.unsent_bytes for outcome in outcomes),
    )
