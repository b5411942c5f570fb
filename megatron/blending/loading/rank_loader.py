"""pure. A Loader gives a training loop the batches of its rank, from workers; it is saved and
restored anywhere.

Invariants, for any numbers of ranks and workers before and after:
- a loader that begins, or is restored, at output g gives on rank r the outputs g + r, g + r +
  world_size, ...: so ranks that drew as many stand at one point of the stream;
- a loader that is restored continues with the output after the last one that was drawn when the
  state was made;
- of data that goes on, every rank gets as many outputs per epoch. What is left of an epoch after a
  restore is dealt out evenly: the remainder, fewer than there are ranks, comes first in the next
  epoch.
"""

import math
import sys
from collections.abc import Iterator, Sequence
from typing import Any, Generic, TypeVar

from megatron.blending.arguments import check_flag, check_one_of, check_whole
from megatron.blending.encoding.collate import pinned
from megatron.blending.loading.global_state import gather_states, send_states
from megatron.blending.loading.server import END, Message, Server, Start
from megatron.blending.loading.state import VERSION, checked_states, is_taken, merge_states
from megatron.blending.loading.state_form import State, compact, expanded
from megatron.blending.loading.stream import Stream
from megatron.blending.loading.worker_pool import (
    WorkerPool,
    tell_of_held_samples,
    warn_of_common_shards,
)
from megatron.blending.streams.failures import FailureLog, Failures
from megatron.blending.streams.node import SavableDataset
from megatron.blending.streams.sample_buffer import BufferDataset
from megatron.blending.streams.shard import ShardState
from megatron.blending.streams.worker_config import WorkerConfig, check_worker_config

T_co = TypeVar("T_co", covariant=True)


class Loader(Generic[T_co]):
    """A Loader is its own iterator. Both kinds can be saved; workers start with the first batch.

    `close()`, or leaving a `with`, stops the workers; the next batch would start them again.
    """

    is_savable = False
    """Whether a `for` over finite data goes on where the last one stopped."""
    _slot: int
    """The next output of this rank."""
    _shards: dict[int, ShardState]
    _heads: dict[int, Message]
    """Of each worker that was asked, the output that was not given yet."""
    _ahead: list[Any]
    _is_over: bool

    def __init__(
        self,
        dataset: SavableDataset[T_co],
        worker_config: WorkerConfig | None,
        prefetch_factor: int,
        pin_memory: bool | None,
    ) -> None:
        if not isinstance(dataset, SavableDataset):
            raise ValueError(
                "get_loader takes a data set of megatron.blending, but got "
                f"{type(dataset).__name__}"
            )
        check_whole("get_loader: prefetch_factor", prefetch_factor)
        if pin_memory is not None:
            check_flag("pin_memory", pin_memory)
        found = dataset.found_config() if worker_config is None else worker_config
        self.config: WorkerConfig = WorkerConfig() if found is None else found
        check_worker_config(self.config)
        self._stream = Stream(dataset, self.config)
        self._prefetch_factor = prefetch_factor
        # Torch is not imported to find out: without it there are no tensors.
        torch = (
            sys.modules.get("torch")
            if (self.config.num_workers if pin_memory is None else pin_memory)
            else None
        )
        self._pins = torch is not None and torch.cuda.is_available()
        self._pool: WorkerPool | None = None
        self._failure_log = FailureLog()
        self._warned_of = 0
        self._begin_pass(0, 0)

    def __len__(self) -> int:
        """Return the batches of one pass on this rank; of endless data, of one pass over it."""
        ranks, root = self.config.num_ranks, self._stream.root
        if root.continues_across_epochs:
            return max(1, (root.size or 0) // ranks)
        total = len(self._stream.dataset) if root.size is None else root.size
        return total // ranks + (self.config.this_rank < total % ranks)

    def __iter__(self) -> Iterator[T_co]:
        is_left = self._has_drawn and not self.is_savable and self._stream.is_finite
        if self._is_over or is_left:
            self._next_pass()
        return self

    def __next__(self) -> T_co:
        if self._is_over:
            raise StopIteration
        self._has_drawn = True
        try:
            value = self._draw()
        except StopIteration:
            self._is_over = True
            raise
        except BaseException:
            if self.config.num_workers:
                self.close()
            raise
        return pinned(value) if self._pins else value

    # Saving. A state is made of ints, strings, lists and dicts: JSON, or
    # torch.load(weights_only=True), will do.

    def state_dict(self) -> State:
        """Return where this rank stands.

        A few hundred bytes, some tens per source, and one to four for each sample that open buffers
        hold.
        """
        self._keep_shards()
        return {
            "version": VERSION,
            "rank": self.config.this_rank,
            "world_size": self.config.num_ranks,
            "num_shards": self._stream.num_shards,
            "pass": self._pass,
            "epoch_start": self._epoch_start,
            "slot": self._slot,
            "count": self._count,
            "since": self._run_since(),
            "taken": [row for row in self._ahead if max(row[1]) > self._slot],
            "is_over": self._is_over,
            "shards": compact(self._shards),
            "positions": self._stream.source_positions(self._turn, self._shards),
            "stream": self._stream.described(),
        }

    def load_state_dict(self, state: State | Sequence[State], *, on_change: str = "error") -> None:
        """Continue from a state, or from the states of all ranks, whose number then does not
        matter; at any time.

        If the state is of another stream: ValueError naming what differs; or, with
        `on_change="remap"`, each source goes on from where that of its name stood, in the order
        that it had, and new ones begin. Then what shards held back is given up, and weights start
        again.
        """
        check_one_of("on_change", on_change, ("error", "remap"))
        states = checked_states(state)
        merged = merge_states(states, self.config.this_rank, self.config.num_ranks)
        merged["stream"] = expanded(merged["stream"])
        self.close()
        try:
            self._stream.check(merged["stream"])
        except ValueError as difference:
            if on_change == "error":
                raise
            self._stream.continue_by_name(merged, str(difference))
            self._begin_pass(0, 0)
            return
        self._stream.check_shards(merged["shards"])
        self._stream.continue_as(merged["stream"], merged["num_shards"])
        self._begin_pass(merged["pass"], merged["slot"] - merged["rank"])
        self._epoch_start = merged["epoch_start"]
        if self._stream.root.continues_across_epochs and self._stream.binding.is_size_of_ranks:
            # As many outputs of each rank are over as before, whatever the number of ranks.
            turns = (self._base - self._epoch_start) // states[0]["world_size"]
            self._epoch_start = self._base - turns * self.config.num_ranks
        self._count, self._ahead, self._is_over = (
            merged["count"],
            merged["taken"],
            merged["is_over"],
        )
        self._since = merged["since"]
        step = math.gcd(self._stream.num_shards, self.config.num_ranks)
        self._shards = {
            number: shard
            for number, shard in merged["shards"].items()
            if not (number - self._slot) % step
        }

    save_state_rank = state_dict
    """Energon's name of it."""

    def restore_state_rank(
        self, state: State | Sequence[State] | None, *, on_change: str = "error"
    ) -> None:
        """As `load_state_dict`, under energon's name; None does nothing."""
        if state is not None:
            self.load_state_dict(state, on_change=on_change)

    def save_state_global(self, global_dst_rank: int) -> list[State] | None:
        """Return the states of all ranks on one of them, by its number among all processes; None on
        the others.

        They are gathered over torch.distributed, by the process group of the WorkerConfig: all
        ranks call it.
        """
        return gather_states(self.state_dict(), self.config, global_dst_rank)

    save_state = save_state_global
    """Energon's older name of it."""

    def restore_state_global(
        self, state: Sequence[State] | None, *, src_rank: int | None = None
    ) -> None:
        """Continue from what `save_state_global` gave, on any number of ranks.

        `src_rank`: the only data-parallel rank that has it, which sends it to the others; None: all
        have it.
        """
        self.load_state_dict(send_states(state, self.config, src_rank))

    restore_state = restore_state_global
    """Energon's older name of it."""

    def can_restore_sample(self) -> bool:
        return True

    def restore_sample(self, restore_key: Sequence[Any]) -> T_co:
        """Make an output again from its `__restore_key__`, to look into it; the stream stays where
        it stands.
        """
        return self._stream.sample_again(restore_key)

    def change_weights(
        self, weights: Sequence[float], *, blend: str = "", output: int | None = None
    ) -> None:
        """From output number `output` of the whole stream on, give the children of a blend other
        weights, for good.

        None: the next one that no rank has drawn, if all ranks have drawn as many; at any rate say
        the same on all. `blend`: its place; "" is the outermost. The workers start again; the
        change is part of the state from now on.
        """
        here = self._turn if output is None else output
        check_whole("output", here, -math.inf)
        if here < self._turn:
            raise ValueError(
                f"output must be at least {self._turn}, but is {output}: it was drawn already"
            )
        self.close()
        self._catch_up()
        self._stream.change_weights(weights, blend, here, self._shards)

    # Counts of what this rank's workers left out, up to the last batch drawn; since the workers
    # started.

    @property
    def num_failed(self) -> int:
        return sum(failed for failed, _ in self._counts.values())

    @property
    def num_skipped(self) -> int:
        return sum(skipped for _, skipped in self._counts.values())

    def start(self) -> None:
        """Start the workers now rather than with the first batch: from this thread, before there
        are others.
        """
        self._started()

    def close(self) -> None:
        """Stop the workers."""
        self._keep_shards()
        self._since, self._start = self._run_since(), self._slot
        if self._pool is not None:
            self._pool.close()
        self._pool = None
        self._heads = {}
        self._is_started = False

    def __enter__(self) -> "Loader[T_co]":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    @property
    def _turn(self) -> int:
        """It is the next output of rank 0, if that drew as many as this one."""
        return self._slot - self.config.this_rank

    def _next_pass(self) -> None:
        if self._stream.is_finite:
            self._begin_pass(self._pass + 1, 0)
            return
        # The stream just goes on: workers are not even told.
        self._epoch_start = self._turn
        self._is_over = False

    def _begin_pass(self, pass_number: int, base: int) -> None:
        self._pass = pass_number
        self._base = base
        self._slot = self._start = base + self.config.this_rank
        self._since = base
        self._epoch_start = self._count = 0
        self._ahead, self._shards, self._heads = [], {}, {}
        self._counts: dict[int, tuple[int, int]] = {}
        self._is_over = self._has_drawn = self._is_started = False

    def _draw(self) -> T_co:
        num_workers, ranks = max(1, self.config.num_workers), self.config.num_ranks
        # Every rank gives as many, and one at least: what does not go evenly belongs to the next
        # epoch.
        if self._stream.root.continues_across_epochs:
            num_over = self._turn - self._epoch_start
            if num_over and num_over + ranks > (self._stream.root.size or 0):
                raise StopIteration
        pool = self._started()
        while True:
            worker = (self._slot - self._base) // ranks % num_workers
            head = self._heads.get(worker)
            if head is None:
                head = self._heads[worker] = pool.next(worker)
            if head.slot == self._slot:
                del self._heads[worker]
                self._take_state(worker, head)
                self._slot += ranks
                if self._ahead and is_taken(self._ahead, head.slot):
                    continue
                self._count += 1
                return head.value
            # This slot was left empty; at the end all are.
            if len(self._heads) == num_workers and all(
                head.slot == END for head in self._heads.values()
            ):
                for number, head in self._heads.items():
                    self._take_state(number, head)
                self._slot = END + self.config.this_rank
                raise StopIteration
            self._slot += ranks

    def _take_state(self, worker: int, message: Message) -> None:
        self._shards.update(message.shards)
        self._counts[worker] = message.num_failed, message.num_skipped

    def _started(self) -> WorkerPool:
        if self._pool is None:
            # Once: workers start again with each change of weights.
            if self._stream.num_shards != self._warned_of:
                self._warned_of = self._stream.num_shards
                warn_of_common_shards(self._stream.num_shards, self.config)
                holding = [
                    node for node in self._stream.binding.nodes if isinstance(node, BufferDataset)
                ]
                tell_of_held_samples(holding, self._stream.num_shards, self.config)
            self._pool = WorkerPool(
                self._stream, self.config, self._prefetch_factor, self._failure_log
            )
        if not self._is_started:
            self._pool.start(self._from(self._slot))
            self._is_started = True
        return self._pool

    def _from(self, slot: int) -> Start:
        return Start(0, self._pass, slot, self._shards, self._base, self._since)

    def _keep_shards(self) -> None:
        states = self._pool.shard_states() if self._pool is not None and self._is_started else None
        if states is not None:
            self._shards = states

    def _catch_up(self) -> None:
        """Run shared shards up to here, before the stream changes: with other weights they would
        read other samples.
        """
        if self._since == self._turn:
            return
        failures = Failures(
            self.config.failure_tolerance, self.config.global_error_handler, self._failure_log.tell
        )
        part = self.config.this_rank, self.config.num_ranks
        server = Server(
            self._stream.root, self._stream.num_shards, *part, failures, self.config.num_ranks
        )
        server.start(self._from(self._turn))
        server.catch_up()
        self._shards = server.shard_states()
        self._since = self._turn

    def _run_since(self) -> int:
        """Return the first output that a worker may not have run in a shard that others run too."""
        workers = self.config.num_workers_of_all
        have_all_given = self._slot - self._start >= workers
        if self._stream.num_shards % workers == 0:
            return self._turn if have_all_given else min(self._since, self._turn)
        return max(0, self._turn - workers if have_all_given else self._since)
