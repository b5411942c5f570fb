"""collective. Payloads of a global batch: what a rank gives away travels by key or as tensors, and
the rank that trains a sequence has its tensors.

    swap     each data rank sends what it gives away: two all-to-alls, of sizes and of bytes
    decode   keys become tensors, by `PayloadStore.restore` or the iterator's `restore_sample`
    gather   what failed, and the bytes held and sent, to all data ranks
    again    where a rank could not decode, tensors are sent after all, and it gets no keys any more

A step without payloads does none of it.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from megatron.packing.batch.columns import IntArray
from megatron.packing.batch.payload_bytes import from_bytes, to_bytes
from megatron.packing.batch.payloads import Payload, restored_tensors
from megatron.packing.scheduling.payload_cost import PayloadCosts, cost_of_payloads
from megatron.packing.step.load import Restore

logger = logging.getLogger(__name__)


class PayloadStore:
    """Rules by which payloads of a run are made, moved and bounded, and what was learned of them.

    The owner of the training loop makes one per run, on every rank.
    """

    def __init__(
        self,
        *,
        costs: PayloadCosts | None = None,
        restore: Restore | None = None,
        min_bytes_by_key: int = 1 << 18,
        max_waiting_bytes: int = 4 << 30,
    ) -> None:
        """Takes the settings, equal on all ranks.

        Args:
            costs: by kind, see `scheduling.payload_cost`.
            restore: function of a key that returns a sample, or its `payloads`; called on data
                ranks, in the thread that loads. None takes `restore_sample` of the data iterator,
                or of the loader within it.
            min_bytes_by_key: tensors of fewer bytes are sent themselves, as reading and decoding
                a sample again takes longer.
            max_waiting_bytes: with prefetch, another global batch is prepared only while those that
                wait hold fewer bytes of payloads, on the rank that holds most.
        """
        if min(min_bytes_by_key, max_waiting_bytes) < 0:
            raise ValueError("bytes of payloads must be at least 0")
        self.costs: PayloadCosts = dict(costs or {})
        self.restore = restore
        self.min_bytes_by_key, self.max_waiting_bytes = min_bytes_by_key, max_waiting_bytes
        self.without_files: set[int] = set()
        """Data-parallel ranks that could not make a payload by its key."""
        self.is_said = False
        """Whether the way that payloads travel was logged."""

    def cost_of(self, given: Mapping[str, Any]) -> float:
        """Returns the cost of a sample's payloads from its `costs`."""
        return cost_of_payloads(given, self.costs)

    def goes_by_key(self, payload: Payload, rank: int) -> bool:
        """Returns whether a payload goes to a data-parallel rank as its key."""
        if payload.tensors is None:
            return rank not in self.without_files
        is_large = payload.num_bytes >= self.min_bytes_by_key
        return is_large and payload.key is not None and rank not in self.without_files


class PayloadError(RuntimeError):
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


class _Lost(NamedTuple):
    """Stands for the key of a payload that could not be made, and says why."""

    reason: str


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
    held: Sequence[Payload | None],
    target: IntArray,
    exchange: dist.ProcessGroup,
    store: PayloadStore,
    restore: Restore | None,
) -> Moved:
    """Sends each payload to the data rank that trains it, and returns those trained here.

    Collective over the data ranks. Raises PayloadError where a payload can be made on no rank.

    Args:
        held: payload of each sequence that this rank loaded; None for one of tokens alone.
        target: int64 of the same, data-parallel rank; negative where a sequence waits.
        restore: function that makes the payload of a key on this rank; None where nothing does.
    """
    rank, size = exchange.rank(), exchange.size()
    leaving = [[held[i] for i in np.flatnonzero(target == to).tolist()] for to in range(size)]
    sent = [[_as_sent(one, to, rank, store, restore) for one in leaving[to]] for to in range(size)]
    arrived, sent_bytes = _swap(sent, exchange)
    failures = _decode(arrived, restore)
    # Those of which the key alone was sent: their tensors stayed here.
    away = [pair for to in range(size) if to != rank for pair in zip(leaving[to], sent[to])]
    by_key = [whole for whole, one in away if whole and one and one.tensors is None]
    own = _Outcome(
        failures,
        number=sum(one is not None for its in arrived for one in its),
        held_bytes=_bytes_of(arrived),
        sent_bytes=sent_bytes,
        num_by_key=len(by_key),
        unsent_bytes=sum(whole.num_bytes for whole in by_key),
    )
    outcomes = _gather(own, exchange)
    if rank == 0:
        _say_once(outcomes, store)
    if any(outcome.failures for outcome in outcomes):  # all ranks see the same, and go on alike
        again = _send_again(outcomes, leaving, arrived, exchange, store, restore)
        outcomes = [
            one._replace(held_bytes=other.held_bytes, sent_bytes=one.sent_bytes + other.sent_bytes)
            for one, other in zip(outcomes, again)
        ]
    return Moved(
        [payload for its in arrived for payload in its],
        sum(outcome.number for outcome in outcomes),
        max(outcome.held_bytes for outcome in outcomes),
        sum(outcome.sent_bytes for outcome in outcomes),
    )


def _send_again(
    outcomes: Sequence[_Outcome],
    leaving: Sequence[Sequence[Payload | None]],
    arrived: list[list[Payload | None]],
    exchange: dist.ProcessGroup,
    store: PayloadStore,
    restore: Restore | None,
) -> list[_Outcome]:
    """Sends the tensors of payloads whose keys failed, and puts them in their places."""
    failed = [(to, each) for to, outcome in enumerate(outcomes) for each in outcome.failures]
    _check(failed)
    rank, size = exchange.rank(), exchange.size()
    if rank == 0 and {to for to, _ in failed} - store.without_files:
        to, first = failed[0]
        logger.warning(
            "data-parallel rank %d cannot make payloads by their keys (%s); their tensors are "
            "sent to it from now on",
            to,
            first.reason,
        )
    store.without_files |= {to for to, _ in failed}
    sent: list[list[Payload | None]] = [[] for _ in range(size)]
    places: list[list[int]] = [[] for _ in range(size)]
    for to, each in failed:
        if each.source == rank:
            whole = leaving[to][each.place]
            assert whole is not None
            sent[to].append(_with_tensors(whole, restore))
        if to == rank:
            places[each.source].append(each.place)
    received, sent_bytes = _swap(sent, exchange)
    failures = _decode(received, None)
    for source, its in enumerate(received):
        for place, payload in zip(places[source], its, strict=True):
            arrived[source][place] = payload
    again = _gather(
        _Outcome(failures, held_bytes=_bytes_of(arrived), sent_bytes=sent_bytes), exchange
    )
    _check([(to, each) for to, outcome in enumerate(again) for each in outcome.failures])
    return again


def _check(failed: Sequence[tuple[int, _Failure]]) -> None:
    """Raises PayloadError for a payload that its source cannot make either."""
    for to, each in failed:
        if each.is_final or each.source == to:
            raise PayloadError(
                f"a payload of data-parallel rank {each.source} cannot be made: {each.reason}; "
                "the rank that loaded it must be able to make it again"
            )


def _as_sent(
    payload: Payload | None, to: int, rank: int, store: PayloadStore, restore: Restore | None
) -> Payload | None:
    if payload is None or to == rank:
        return payload
    if store.goes_by_key(payload, to):
        return Payload(None, payload.key)
    return _with_tensors(payload, restore)


def _with_tensors(payload: Payload, restore: Restore | None) -> Payload:
    """Returns the payload with its tensors, made by its key where they are missing; with a _Lost
    key where that fails.
    """
    if payload.tensors is not None:
        return payload
    if restore is None:
        return Payload(
            None,
            _Lost("nothing restores a sample by its key; pass PayloadStore(restore=function)"),
        )
    try:
        return Payload(restored_tensors(restore(payload.key)), payload.key)
    except Exception as failure:  # the user's code may raise anything, and other ranks wait
        return Payload(None, _Lost(f"{type(failure).__name__}: {failure}"))


def _decode(arrived: list[list[Payload | None]], restore: Restore | None) -> list[_Failure]:
    """Makes the tensors of keys, in place; returns what failed."""
    failures = []
    for source, its in enumerate(arrived):
        for place, payload in enumerate(its):
            if payload is None or payload.tensors is not None:
                continue
            is_final = isinstance(payload.key, _Lost)
            made = payload if is_final else _with_tensors(payload, restore)
            its[place] = made
            if made.tensors is None:
                failures.append(_Failure(source, place, made.key.reason, is_final))
    return failures


def _swap(
    sent: Sequence[Sequence[Payload | None]], exchange: dist.ProcessGroup
) -> tuple[list[list[Payload | None]], int]:
    """Returns what each data rank sent this one, and the bytes that this one sent to others."""
    rank, size = exchange.rank(), exchange.size()
    if size == 1:
        return [list(sent[0])], 0
    parts = [to_bytes([] if to == rank else its) for to, its in enumerate(sent)]
    num_sent = torch.tensor([part.numel() for part in parts])
    num_received = torch.empty_like(num_sent)
    dist.all_to_all_single(num_received, num_sent, group=exchange)
    incoming = torch.empty(int(num_received.sum()), dtype=torch.uint8)
    dist.all_to_all_single(
        incoming, torch.cat(parts), num_received.tolist(), num_sent.tolist(), group=exchange
    )
    arrived = [from_bytes(part) for part in incoming.split(num_received.tolist())]
    arrived[rank] = list(sent[rank])
    return arrived, int(num_sent.sum() - num_sent[rank])


def _gather(outcome: _Outcome, exchange: dist.ProcessGroup) -> list[_Outcome]:
    outcomes: list[Any] = [outcome]
    if exchange.size() > 1:
        outcomes = [None] * exchange.size()
        dist.all_gather_object(outcomes, outcome, group=exchange)
    return outcomes


def _bytes_of(arrived: Sequence[Sequence[Payload | None]]) -> int:
    return sum(payload.num_bytes for its in arrived for payload in its if payload is not None)


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
