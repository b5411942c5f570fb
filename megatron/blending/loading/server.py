"""pure. A server makes those outputs of a stream that are one worker's, whatever the others do.

Worker w of W serves the slots k with (k - base) % W == w. Slots whose shard never left anything out
are made in bulk, as arithmetic says; the others in sequence, by their shards. A shard has one
worker where W divides the number of shards. Else several run it, each of which throws away what the
others serve. Worked example, 4 shards and 2 workers: worker 0 serves 0 2 4 6, of the shards 0 and
2; of 3 workers each serves every third slot, and runs all shards for it.
"""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from megatron.blending.streams.failures import Failures, FatalSampleError
from megatron.blending.streams.node import Block, MultiOutput, Plan, SavableDataset, SkipMarker
from megatron.blending.streams.seeding import BATCH_INDEX
from megatron.blending.streams.shard import ShardEnd, ShardState, StreamShard

_FIRST_PLANNED = 256
_MAX_PLANNED = 8192
END = 2**62
"""The slot after the last one of a pass."""


class Start(NamedTuple):
    """It says where servers begin again."""

    generation: int = 0
    """How often they were told to: outputs of before are thrown away."""
    pass_number: int = 0
    slot: int = 0
    shards: Mapping[int, ShardState] = {}
    """States of those that were out of step."""
    base: int = 0
    """The slot that is worker 0's."""
    since: int = END
    """Slots from here on may not have been run by who made the states."""


class Message(NamedTuple):
    """A Message is one output, and what else the state of the stream needs once it was used."""

    generation: int
    slot: int
    """END if the pass is over: then there is no value."""
    value: Any = None
    shards: Mapping[int, ShardState] = {}
    """States of the shards that it changed."""
    num_failed: int = 0
    num_skipped: int = 0
    error: tuple[str, bytes] | None = None
    """What went wrong in place of an output, and the exception, pickled; b"" if it cannot be."""


class Server:
    """It makes the outputs of its slots in order, one pass at a time."""

    def __init__(
        self,
        root: SavableDataset[Any],
        num_shards: int,
        worker: int,
        num_workers: int,
        failures: Failures,
        num_ranks: int = 1,
    ) -> None:
        """`root`: bound."""
        self._num_ranks = num_ranks
        self.root = root
        self.failures = failures
        self.num_shards = num_shards
        self._worker = self._first_worker = worker
        self._num_workers = num_workers
        self._step = math.gcd(num_shards, num_workers)
        self._size = None if root.continues_across_epochs else root.size
        self.changed: set[int] = set()
        """Shards whose state changed since it was last taken."""
        self.start(Start())

    def start(self, start: Start) -> None:
        """Go on with the first slot of this server from there on."""
        self._generation, self._pass, slot, shards, base, since = start
        self._worker = (self._first_worker + base) % self._num_workers
        self._shards = {
            number: self._shard(number, state)
            for number, state in shards.items()
            if self._runs(number)
        }
        first = min(slot, since)
        self._slot = first + (self._worker - first) % self._step
        self._length = _FIRST_PLANNED
        self._slots: list[int] = []
        self._plan: Plan | None = None
        self._at = 0
        # Where shards are shared, the states may be those of servers that had come less far.
        behind = [
            shard.index * self.num_shards + number
            for number, shard in self._shards.items()
            if not shard.is_over
        ]
        self._slot = min([self._slot, *behind])
        self._first_wanted = slot

    def next(self) -> Message:
        """Make the next output of this worker. One of END for ever after the last one of the
        pass."""
        while (output := self._go_on()) is None:
            pass
        return output

    def catch_up(self) -> None:
        """Run the shards of this server up to the slot that it was started at, where another had
        come less far.
        """
        while self._slot < self._first_wanted and self._go_on() is None:
            pass

    def _go_on(self) -> Message | None:
        """Make the output of the next slot; None if it is not of this worker, not wanted, or there
        is none.
        """
        slot = self._slot
        number = slot % self.num_shards
        shard = self._shards.get(number)
        is_beyond = self._size is not None and slot >= self._size
        if is_beyond and all(shard.is_over for shard in self._shards.values()):
            return self._message(END)
        if (shard is None and is_beyond) or (shard is not None and self._is_done(shard, slot)):
            self._slot += self._step
            return None
        BATCH_INDEX.set(slot // self._num_ranks)
        counts = self.failures.num_failed, self.failures.num_skipped
        try:
            if shard is None:
                value = self._take(slot)
            else:
                self.changed.add(number)
                value = shard.next()
        except ShardEnd:
            if self._size is None:
                raise FatalSampleError(
                    "an endless stream came to its end; is there anything left in it?"
                ) from None
            self._slot += self._step
            return None
        except _NotTaken:
            self._shards[number] = StreamShard(
                self.root,
                number,
                self.num_shards,
                self.failures,
                pass_number=self._pass,
                index=slot // self.num_shards,
            )
            return None
        self._slot += self._step
        self.failures.succeeded(self._sources if shard is None else shard.sources)
        if slot >= self._first_wanted and slot % self._num_workers == self._worker:
            return self._message(slot, value)
        # Whoever serves it counts what was left out for it.
        self.failures.num_failed, self.failures.num_skipped = counts
        return None

    def _message(self, slot: int, value: object = None) -> Message:
        return Message(
            self._generation, slot, value, {}, self.failures.num_failed, self.failures.num_skipped
        )

    def close(self) -> None:
        """Do nothing, unlike the worker process that may stand in the place of a server."""

    def shard_states(self) -> dict[int, ShardState]:
        """Return the states of the shards that are out of step."""
        return {number: shard.state() for number, shard in self._shards.items()}

    def changed_states(self) -> dict[int, ShardState]:
        """Return those of the shards that changed since this was last asked for."""
        changed, self.changed = self.changed, set()
        return {number: self._shards[number].state() for number in changed}

    def _is_done(self, shard: StreamShard, slot: int) -> bool:
        return shard.is_over or shard.index * self.num_shards + shard.number > slot

    def _runs(self, shard: int) -> bool:
        return shard % self._step == self._worker % self._step

    def _shard(self, number: int, state: ShardState) -> StreamShard:
        shard = StreamShard(
            self.root, number, self.num_shards, self.failures, pass_number=self._pass
        )
        shard.restore(state)
        return shard

    def _take(self, slot: int) -> object:
        """Make the output of a slot by arithmetic; _NotTaken if it cannot be made so."""
        while self._at < len(self._slots) and self._slots[self._at] < slot:
            self._at += 1
        if self._at == len(self._slots):
            self._plan_from(slot)
        assert self._plan is not None
        self._at += 1
        try:
            value = self._plan.values(self._at - 1, self._at, None)[0]
        except Exception:
            # The shard will find out, and say, what it was.
            raise _NotTaken from None
        if type(value) is SkipMarker or type(value) is MultiOutput:
            raise _NotTaken
        return value

    def _sources(self) -> set[int]:
        """Return those of the output that was just made by arithmetic."""
        assert self._plan is not None
        return {source.number for source, _ in self._plan.entries(self._at - 1, self._at)}

    def _plan_from(self, slot: int) -> None:
        """Plan the next slots whose shards are in step: few at first, so that the first output
        comes soon.
        """
        count = max(1, self._length // self.root.samples_per_output)
        self._length = min(2 * self._length, _MAX_PLANNED)
        slots = slot + self._step * np.arange(count, dtype=np.int64)
        if self._size is not None:
            slots = slots[slots < self._size]
        if self._shards:
            slots = slots[
                [number not in self._shards for number in (slots % self.num_shards).tolist()]
            ]
        first = 0 if self._size is None else self._pass * (self.root.num_positions or 0)
        self._plan = self.root.plan(first + slots, Block())
        self._slots = slots.tolist()
        self._at = 0


class _NotTaken(Exception):
    pass
