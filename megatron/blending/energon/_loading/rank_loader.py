"""pure. The loader of a rank: an iterator over its batches, which workers make. Its state can be
saved and restored at any point, also on another number of ranks.

Invariants, for any number of workers before and after:
- The outputs of a rank depend only on the rank, the number of ranks and the data.
- Without packing and left-out samples, rank r of R gets the outputs r, r + R, r + 2 R, ... of one
  stream.
- A restored loader continues behind the last output before the state was saved.
- With another number of ranks no sample is lost or repeated. Packs, and batches without left-out
  samples, have the same samples; they may come in another step.
- Of endless data, every rank gets the same number of outputs per epoch. After a restore the rest of
  an epoch is dealt out evenly. A remainder of fewer outputs than ranks comes first in the next
  epoch.
"""

import functools
import sys
from collections.abc import Iterator, Sequence
from typing import Any, Generic, TypeVar

from megatron.blending.arguments import check_flag, check_one_of, check_whole
from megatron.blending.energon._encoding.collate import pinned
from megatron.blending.energon._loading.cells import CellState
from megatron.blending.energon._loading.global_state import gather_states, send_states
from megatron.blending.energon._loading.lanes import lanes_of
from megatron.blending.energon._loading.sequence import RankSequence, share_of
from megatron.blending.energon._loading.server_start import server_of
from megatron.blending.energon._loading.state import (
    VERSION,
    State,
    checked_states,
    expanded,
    merge_states,
    with_checksum,
)
from megatron.blending.energon._loading.stream import Stream
from megatron.blending.loading.messages import Start
from megatron.blending.loading.worker_pool import WorkerPool
from megatron.blending.streams.failures import FailureLog, Failures, FatalSampleError
from megatron.blending.streams.node import SavableDataset
from megatron.blending.streams.seeding import BATCH_INDEX
from megatron.blending.streams.worker_config import WorkerConfig, check_worker_config

T_co = TypeVar("T_co", covariant=True)


class Loader(Generic[T_co]):
    """Iterator over the batches of a rank. Both kinds of loaders, savable or not, have a state.

    Workers start with the first batch. `close()`, or the end of a `with` block, stops them; the
    next batch would start them again.
    """

    is_savable = False
    """True if a second `for` over finite data continues where the first one was left; False if it
    begins a new pass.
    """
    _sequence: RankSequence
    _given: int
    """Outputs of all ranks in this pass or epoch before this loader began or was restored."""
    _count: int
    """Outputs of this rank since then."""
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
        # Look torch up without importing it: if nobody has imported it, there are no tensors.
        torch = (
            sys.modules.get("torch")
            if (self.config.num_workers if pin_memory is None else pin_memory)
            else None
        )
        self._pins = torch is not None and torch.cuda.is_available()
        self._pool: WorkerPool | None = None
        self._failure_log = FailureLog()
        self._failures = Failures(
            self.config.failure_tolerance, self.config.global_error_handler, self._failure_log.add
        )
        self._begin_pass(0)

    def __len__(self) -> int:
        """Returns the number of this rank's batches in one pass over the data."""
        ranks, root = self.config.num_ranks, self._stream.root
        if root.continues_across_epochs:
            return max(1, (root.size or 0) // ranks)
        is_known = root.size is not None and (root.is_limit or not root.is_block)
        total = root.size or 0 if is_known else len(self._stream.dataset)
        return share_of(total, self.config.this_rank, ranks)

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
            # The next call starts workers again, at the position of the state.
            self.close()
            raise
        return pinned(value) if self._pins else value

    # A state consists of ints, strings, lists and dicts, so that JSON can store it, and
    # torch.load(weights_only=True) can read it.

    def state_dict(self) -> State:
        """Returns the position of this rank.

        It has a few hundred bytes, some tens for each source, and some for each sample that waits
        until its batch is full.
        """
        cells = [lane.cells for lane in self._sequence.lanes]
        return with_checksum(
            {
                "version": VERSION,
                "rank": self.config.this_rank,
                "world_size": self.config.num_ranks,
                "epoch": self._epoch,
                "given": self._given,
                "count": self._count,
                "is_over": self._is_over,
                "cells": [list(state) for state in cells],
                "held": self._sequence.held(),
                "counts": dict(self._sequence.counts),
                "positions": self._stream.source_positions(
                    [state.next - self.config.this_rank for state in cells]
                ),
                "stream": self._stream.described(),
            }
        )

    def load_state_dict(self, state: State | Sequence[State], *, on_change: str = "error") -> None:
        """Continues from a state of this rank, or from the states of all ranks, which may have been
        another number. It may be called at any time.

        If the state is of another stream, it raises ValueError, which names the differences. With
        `on_change="remap"` it instead continues each source at the position that the source of the
        same name had, and begins new ones. Waiting samples are then dropped.
        """
        check_one_of("on_change", on_change, ("error", "remap"))
        states = checked_states(state)
        merged = merge_states(states, self.config.this_rank, self.config.num_ranks)
        merged["stream"] = expanded(merged["stream"])
        # Stop the workers first: outputs that they have made ahead belong to the old position.
        self.close()
        try:
            self._stream.check(merged["stream"])
        except ValueError as difference:
            if on_change == "error":
                raise
            self._stream.continue_by_name(merged, str(difference))
            self._begin_pass(0)
            return
        self._stream.continue_as(merged["stream"])
        self._begin_pass(merged["epoch"])
        self._given, self._count = merged["given"], merged["count"]
        self._is_over = merged["is_over"]
        root, before = self._stream.root, states[0]["world_size"]
        if root.continues_across_epochs and self._stream.binding.size_is_per_rank:
            # Keep the number of outputs per rank: 6 outputs of 2 ranks become 9 of 3 ranks.
            self._given = self._given // before * self.config.num_ranks
        for lane, cells in zip(self._sequence.lanes, merged["cells"]):
            lane.restore(CellState(*cells))
        self._sequence.counts.update(merged["counts"])
        for name, held in merged["held"].items():
            self._sequence.gatherers[name].restore(held)

    save_state_rank = state_dict
    """Energon's name of `state_dict`."""

    def restore_state_rank(
        self, state: State | Sequence[State] | None, *, on_change: str = "error"
    ) -> None:
        """Calls `load_state_dict`: energon's name of it. None does nothing."""
        if state is not None:
            self.load_state_dict(state, on_change=on_change)

    def save_state_global(self, global_dst_rank: int) -> list[State] | None:
        """Returns the states of all ranks on the process `global_dst_rank`, and None on the others.
        Collective over the process group of the WorkerConfig.
        """
        return gather_states(self.state_dict(), self.config, global_dst_rank)

    save_state = save_state_global
    """Energon's older name of `save_state_global`."""

    def restore_state_global(
        self, state: Sequence[State] | None, *, src_rank: int | None = None
    ) -> None:
        """Continues from the states that `save_state_global` returned, on any number of ranks.

        src_rank: the only data-parallel rank that has them, and sends them to the others; None if
            all ranks have them.
        """
        self.load_state_dict(send_states(state, self.config, src_rank))

    restore_state = restore_state_global
    """Energon's older name of `restore_state_global`."""

    def can_restore_sample(self) -> bool:
        return True

    def restore_sample(self, restore_key: Sequence[Any]) -> T_co:
        """Returns an output again by its `__restore_key__`, for inspection. The position of the
        loader does not change.
        """
        return self._stream.sample_again(restore_key)

    # Counts of samples that this rank's workers left out, from their start to the last batch taken.

    @property
    def num_failed(self) -> int:
        return self._failures.num_failed + sum(failed for failed, _ in self._counted())

    @property
    def num_skipped(self) -> int:
        return self._failures.num_skipped + sum(skipped for _, skipped in self._counted())

    @property
    def num_short_groups(self) -> int:
        """Batches that were returned before they were full, as too many groups were open."""
        return self._sequence.num_short_groups

    def _counted(self) -> list[tuple[int, int]]:
        # Each message of a worker has its counts so far, for all lanes: the largest are the latest.
        lanes = [lane.counts for lane in self._sequence.lanes]
        workers = {worker for counts in lanes for worker in counts}
        return [max(counts.get(worker, (0, 0)) for counts in lanes) for worker in workers]

    def start(self) -> None:
        """Starts the workers now instead of with the first batch. Call it before the program starts
        threads: forking a process with threads is not safe.
        """
        self._started()

    def hurry(self) -> None:
        """Shortens the time after which a silent worker is an error to a few seconds. Any thread
        may call it.
        """
        if (pool := self._pool) is not None:
            pool.hurry()

    def close(self) -> None:
        """Stops the workers."""
        if self._pool is not None:
            self._pool.close()
        self._pool = None
        self._is_started = False

    def __enter__(self) -> "Loader[T_co]":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _next_pass(self) -> None:
        if self._stream.is_finite:
            self._begin_pass(self._epoch + 1)
            return
        # An endless stream continues, and its workers need not know that an epoch ends.
        self._epoch += 1
        self._given = self._count = 0
        self._is_over = False

    def _begin_pass(self, epoch: int) -> None:
        part = self.config.this_rank, self.config.num_ranks
        self._epoch = epoch
        self._given = self._count = 0
        root = self._stream.root
        self._sequence = RankSequence(root, lanes_of(root), part, self._failures)
        for lane in self._sequence.lanes:
            lane.restore(CellState(part[0]))
        self._is_over = self._has_drawn = self._is_started = False

    def _draw(self) -> T_co:
        self._check_end()
        self._started()
        BATCH_INDEX.set(self._count)
        found = self._sequence.next()
        if found is None:
            if self._stream.root.size is None:
                raise FatalSampleError(
                    "an endless stream came to its end; is there anything left in it?"
                )
            raise StopIteration
        self._count += 1
        value: T_co = found[1]
        return value

    def _check_end(self) -> None:
        """Raises StopIteration if this rank has taken all its outputs of the pass or epoch."""
        root, ranks = self._stream.root, self.config.num_ranks
        if root.continues_across_epochs:
            # Every rank gets the same number, at least one. A remainder belongs to the next epoch.
            num_over = self._given + self._count * ranks
            if num_over and num_over + ranks > (root.size or 0):
                raise StopIteration
        elif root.is_limit:
            left = (root.size or 0) - self._given
            if self._count >= share_of(left, self.config.this_rank, ranks):
                raise StopIteration

    def _started(self) -> None:
        if self._pool is None:
            self._pool = WorkerPool(
                functools.partial(server_of, self._stream, self.config),
                self.config,
                self._prefetch_factor,
                self._failure_log,
            )
        if not self._is_started:
            pass_number = self._epoch if self._stream.is_finite else 0
            cells = [lane.cells for lane in self._sequence.lanes]
            self._pool.start(Start(0, pass_number, cells))
            for lane in self._sequence.lanes:
                lane.start(self._pool, pass_number)
            self._is_started = True
