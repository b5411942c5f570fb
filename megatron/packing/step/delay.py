"""tensor. Sequences that wait for a later step (see `scheduling.delay`), on the rank that loaded
them: beside those of the step (`LocalSamples`), between steps (`DelayQueue`), and in checkpoints.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from megatron.packing.batch.columns import (
    ALWAYS,
    DERIVABLE,
    PAYLOADS,
    SEQUENCE,
    TOKEN,
    Column,
    IntArray,
    Sizes,
)
from megatron.packing.batch.payload_bytes import tensor_of
from megatron.packing.batch.payloads import Payload
from megatron.packing.batch.samples import Samples, joined
from megatron.packing.step.load import Loaded

_STATE_VERSION = 3
_WITH_PAYLOADS = 4
_READ_VERSIONS = (2, 3, 4)
"""Version 2 has no "rows": no columns of further scopes. Version 4 has payloads beside them."""
_EXTRA = "extra_per_"


class Delayed(NamedTuple):
    """Sequences that wait, oldest first, and by how many steps each is late: int64 [n]."""

    samples: Samples
    steps: IntArray
    payloads: Sequence[Payload] = ()
    """Those that the column `payloads` numbers; without tensors where a key makes them again."""

    @classmethod
    def none(cls) -> Delayed:
        """Returns no sequences."""
        return cls(Samples.none(), np.empty(0, np.int64))


class DelayQueue:
    """Sequences that wait on this rank between steps.

    The owner of the training loop makes one per run, on every rank; it stays empty on ranks that
    load no data. A step takes the waiting sequences by `begin`, and leaves those that wait after it
    by `finish`. A step that fails leaves the queue unchanged. A step that is repeated on a rewound
    iterator begins with the same sequences again. Steps that are prepared ahead take a `copy`, and
    `GlobalBatch.delayed` goes to the queue of the run when its step is trained.
    """

    def __init__(self, max_steps: int, delayed: Delayed | None = None) -> None:
        if max_steps < 0:
            raise ValueError(f"--outlier-delay-steps must be at least 0, but is {max_steps}")
        self.max_steps = max_steps
        """Steps that a sequence waits at most; the same on all ranks. With 0 all sequences leave
        at the next step: set it before the last one.
        """
        self._before = self._after = delayed or Delayed.none()

    def copy(self) -> DelayQueue:
        """Returns another queue in which the same sequences wait."""
        return DelayQueue(self.max_steps, self._after)

    @property
    def delayed(self) -> Delayed:
        """Sequences that wait now."""
        return self._after

    def begin(self, is_repeated: bool) -> Delayed:
        """Returns the sequences that wait as a step begins.

        Args:
            is_repeated: the step is the one before, run again.
        """
        if not is_repeated:
            self._before = self._after
        return self._before

    def finish(self, delayed: Delayed) -> None:
        """Replaces the waiting sequences, after a step was scheduled."""
        self._after = delayed

    def __len__(self) -> int:
        return len(self._after.steps)

    def state_dict(self) -> dict[str, Any]:
        """Returns this rank's part of a checkpoint between steps, as tensors and plain values.

        Columns are saved whole, one tensor each, and not in the wire format, which may change.
        """
        samples, steps, payloads = self._after
        state: dict[str, Any] = {
            "version": _STATE_VERSION,
            "steps": torch.from_numpy(steps),
            "lengths": torch.from_numpy(samples.lengths),
            "rows": {scope: torch.from_numpy(v) for scope, v in samples.sizes.ragged.items()},
            "columns": {},
            **{f"{_EXTRA}{scope}": {} for scope in (TOKEN, SEQUENCE)},
        }
        for column, values in samples.columns.items():
            key = f"{_EXTRA}{column.scope}" if column.extra else "columns"
            state.setdefault(key, {})[column.name] = torch.from_numpy(values)
        if payloads:
            state |= {"version": _WITH_PAYLOADS, "payloads": [_saved(one) for one in payloads]}
        return state

    def load_state_dict(self, states: Sequence[dict[str, Any]], rank: int, num_ranks: int) -> None:
        """Continues as data-parallel rank `rank` of `num_ranks`.

        As many ranks as saved take back their own sequences. Another number of ranks shares all of
        them evenly, in the order of the ranks that saved them.

        Args:
            states: those of all ranks, in the order of their ranks.

        Raises:
            ValueError: for a state of another version, or whose columns do not fit its lengths.
        """
        if any(state.get("version") not in _READ_VERSIONS for state in states):
            raise ValueError(
                "the checkpoint holds delayed sequences as another version wrote them; continue it "
                "with that version up to a step at which none is delayed"
            )
        mine = [*states] if len(states) != num_ranks else [states[rank]]
        loaded = [_loaded(state) for state in mine]
        samples, payloads = with_payloads([(each.samples, each.payloads) for each in loaded])
        steps = np.concatenate([delayed.steps for delayed in loaded])
        if len(states) != num_ranks:  # 5 sequences, 2 ranks: 0 1 and 2 3 4
            first, last = (len(steps) * edge // num_ranks for edge in (rank, rank + 1))
            samples, steps = samples.take(np.arange(first, last)), steps[first:last]
            samples, payloads = used_payloads(samples, payloads)
        self._before = self._after = Delayed(samples, steps, payloads)


class LocalSamples(NamedTuple):
    """Sequences of this data rank that the step may train: those delayed, then those loaded."""

    loaded: Loaded
    delayed: Delayed | None
    """None without a queue."""
    samples: Samples
    payloads: Sequence[Payload]

    @classmethod
    def of(
        cls, loaded: Loaded, queue: DelayQueue | None, name: str, *, is_repeated: bool
    ) -> LocalSamples:
        """Returns what was loaded and what waits in the queue.

        is_repeated: whether these samples were given in the step before. The queue then begins
        where that step began.
        """
        if queue is None:
            return cls(loaded, None, loaded.samples, loaded.payloads)
        delayed = queue.begin(is_repeated=is_repeated)
        parts = [(delayed.samples, delayed.payloads), (loaded.samples, loaded.payloads)]
        try:
            return cls(loaded, delayed, *with_payloads(parts))
        except ValueError as failure:
            return cls.failed(f"{name}: {failure}")

    @classmethod
    def failed(cls, error: str) -> LocalSamples:
        """Returns no sequences and the error."""
        loaded = Loaded.failed(error)
        return cls(loaded, None, loaded.samples, loaded.payloads)

    def left_behind(self, stays: IntArray, *, restores: bool) -> Delayed:
        """Returns the sequences `stays`, which wait for a later step: one step more than so far.

        Args:
            restores: whether a key makes a payload again, which then waits without its tensors.
        """
        if self.delayed is None:  # without a queue all sequences leave with their step
            return Delayed.none()
        steps = np.zeros(self.samples.lengths.size, np.int64)
        steps[: self.delayed.steps.size] = self.delayed.steps
        samples, payloads = used_payloads(
            self.samples.take(stays), self.payloads, restores=restores
        )
        return Delayed(samples, steps[stays] + 1, payloads)


def with_payloads(
    parts: Sequence[tuple[Samples, Sequence[Payload]]],
) -> tuple[Samples, Sequence[Payload]]:
    """Returns all sequences, one part after the other, with the list of their payloads."""
    if not any(payloads for _, payloads in parts):
        return joined([samples for samples, _ in parts]), ()
    numbered, all_payloads = [], list[Payload]()
    for samples, payloads in parts:
        numbers = samples.with_schema((PAYLOADS,)).columns[PAYLOADS]
        moved = np.where(numbers < 0, -1, numbers + len(all_payloads))
        numbered.append(samples.with_columns({PAYLOADS: moved}))
        all_payloads += payloads
    return joined(numbered), all_payloads


def used_payloads(
    samples: Samples, payloads: Sequence[Payload], *, restores: bool = True
) -> tuple[Samples, Sequence[Payload]]:
    """Returns sequences that wait with their payloads alone; tensors go where a key makes them
    again, as `restores` says.
    """
    if PAYLOADS not in samples.columns:
        return samples, ()
    numbers = samples.columns[PAYLOADS]
    used = numbers[numbers >= 0]
    renumbered = np.full_like(numbers, -1)
    renumbered[numbers >= 0] = np.arange(used.size)
    kept = [payloads[number] for number in used.tolist()]
    if restores:
        kept = [one if one.key is None else one._replace(tensors=None) for one in kept]
    return samples.with_columns({PAYLOADS: renumbered}), kept


def _saved(payload: Payload) -> dict[str, Any]:
    """Returns a payload as tensors and plain values."""
    if payload.tensors is None:
        return {"key": payload.key}
    tensors = payload.tensors.items()
    return {"tensors": {name: [tensor_of(one) for one in parts] for name, parts in tensors}}


def _loaded(state: dict[str, Any]) -> Delayed:
    """Returns the sequences of one rank's state; ValueError where sizes and columns differ."""
    steps = np.asarray(state["steps"])
    sizes = Sizes(
        lengths=np.asarray(state["lengths"]),
        ragged={scope: np.asarray(rows) for scope, rows in state.get("rows", {}).items()},
    )
    columns = _columns_of(state)
    payloads = [Payload(one.get("tensors"), one.get("key")) for one in state.get("payloads", ())]
    if not _is_whole(steps, sizes, columns, len(payloads)):
        raise ValueError("the checkpoint's delayed sequences are damaged; take another checkpoint")
    return Delayed(Samples(sizes=sizes, columns=columns), steps, payloads)


def _columns_of(state: dict[str, Any]) -> dict[Column, IntArray]:
    """Returns the columns of a state, those that an iterator gave besides among them."""
    table = {column.name: column for column in (*ALWAYS, *DERIVABLE)}
    columns = {
        table[name]: np.asarray(values)
        for name, values in state["columns"].items()
        if name in table
    }
    for key in (key for key in state if key.startswith(_EXTRA)):
        for name, tensor in state[key].items():
            values = np.asarray(tensor)
            scope = key.removeprefix(_EXTRA)
            columns[Column(name, values.dtype.name, scope, values.shape[1:], extra=True)] = values
    return columns


def _is_whole(
    steps: IntArray, sizes: Sizes, columns: Mapping[Column, IntArray], num_payloads: int
) -> bool:
    """Returns whether all parts of a state have the sizes that the lengths of its sequences say."""
    of_sequences = (steps, *sizes.ragged.values())
    if any(rows.size != sizes.lengths.size for rows in of_sequences):
        return False
    if not columns.keys() >= set(ALWAYS):
        return False
    for column, values in columns.items():
        shape = (sizes.num_rows(column.scope), *column.shape)
        if values.shape != shape or values.dtype != column.dtype:
            return False
    numbers = columns.get(PAYLOADS, np.empty(0))
    return not numbers.size or bool(-1 <= numbers.min() <= numbers.max() < num_payloads)
