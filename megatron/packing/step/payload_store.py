"""tensor. Rules by which payloads of a run travel, and how a payload is made again by its key."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from megatron.packing.batch.payloads import Payload, restored_tensors
from megatron.packing.scheduling.payload_cost import PayloadCosts, cost_of_payloads

Restore = Callable[[Any], Any]
"""Function of a key to a sample with its `payloads`, or to these."""
_LOADER_OF_WRAPPERS = ("iterable", "_dataloader")
"""Attributes that hold the loader in megatron-core's RerunDataIterator, and in Megatron-LM's
EnergonDataloader.
"""
_MAX_WRAPPERS = 4


def restore_of(iterator: Any) -> Restore | None:
    """Returns `restore_sample` of the user's iterator, or of the loader within it; None if there
    is none.
    """
    for _ in range(_MAX_WRAPPERS):
        if callable(restore := getattr(iterator, "restore_sample", None)):
            found: Restore = restore
            return found
        inner = [getattr(iterator, name, None) for name in _LOADER_OF_WRAPPERS]
        iterator = next((one for one in inner if one is not None), None)
    return None


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
        """True once a log line has named the way that payloads travel."""

    def cost_of(self, given: Mapping[str, Any]) -> float:
        """Returns the cost of a sample's payloads from its `costs`."""
        return cost_of_payloads(given, self.costs)

    def goes_by_key(self, payload: Payload, rank: int) -> bool:
        """Returns whether a payload goes to a data-parallel rank as its key."""
        if payload.tensors is None:
            return rank not in self.without_files
        is_large = payload.num_bytes >= self.min_bytes_by_key
        return is_large and payload.key is not None and rank not in self.without_files


class Lost(NamedTuple):
    """Stands for the key of a payload that could not be made, and says why."""

    reason: str


def with_tensors(payload: Payload, restore: Restore | None) -> Payload:
    """Returns the payload with its tensors, made by its key where they are missing; with a Lost
    key where that fails.
    """
    if payload.tensors is not None:
        return payload
    if restore is None:
        return Payload(
            None,
            Lost("nothing restores a sample by its key; pass PayloadStore(restore=function)"),
        )
    try:
        return Payload(restored_tensors(restore(payload.key)), payload.key)
    except Exception as failure:  # the user's code may raise anything, and other ranks wait
        return Payload(None, Lost(f"{type(failure).__name__}: {failure}"))
