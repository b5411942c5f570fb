"""mcore. The global batches of a split, packed or as padded rows. A thread prepares them ahead of
their steps.

State that changes when a batch is prepared (counts, delayed sequences) is returned with the batch,
and takes effect in the step that uses it. So a checkpoint does not depend on the number of batches
that were prepared ahead.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from itertools import islice, tee
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.distributed.distributed_c10d import _set_pg_timeout

from megatron.packing.batch.microbatches import Microbatch
from megatron.packing.step.decide import GlobalBatchError
from megatron.packing.step.delay import DelayQueue
from megatron.packing.step.global_batch import GROUPS, GlobalBatch, schedule_global_batch
from megatron.packing.step.groups import data_groups, is_data_rank
from megatron.packing.step.prefetch import Prefetcher
from megatron.sft.data.counts import Counts
from megatron.sft.data.sample_set import SampleSet
from megatron.sft.data.stream import SampleStream, Share
from megatron.sft.environment import default_num_workers
from megatron.sft.model.checkpoints.content import Progress
from megatron.sft.model.forward import PaddedBatch, padded_batches
from megatron.sft.options.config import SFTConfig


class StepBatch(NamedTuple):
    """This rank's part of a global batch."""

    packed: GlobalBatch | None
    """None without packing."""
    rows: list[PaddedBatch]
    """Microbatches without packing, in host memory; [] with packing."""
    counts: Counts
    """Counts of the samples that this rank loaded for the batch."""
    seconds_waited: float = 0.0
    """Time that the step waited for the batch."""

    @property
    def num_microbatches(self) -> int:
        """Number of microbatches of this rank."""
        return len(self.rows) if self.packed is None else self.packed.stats.microbatches

    @property
    def lengths(self) -> list[int]:
        """Lengths of this data-parallel rank's sequences, without padding. A tree counts as its
        paths from the root to the leaves, the sequences that it was merged from.
        """
        if self.packed is None:
            return [length for row in self.rows for length in row.lengths]
        of_packs = (_path_lengths(batch) for batch in self.packed.microbatches)
        return [length for lengths in of_packs for length in lengths.tolist() if length]

    @property
    def num_padded_tokens(self) -> int:
        """Tokens that this context-parallel rank computes without packing, padding included."""
        return sum(row.tokens.numel() for row in self.rows)

    def iterators(self, num_virtual_stages: int | None, device: torch.device) -> Any:
        """Returns the data iterator for megatron-core's schedules; with virtual stages a list of
        them, one for each.
        """
        if self.packed is not None:
            return self.packed.iterators(num_virtual_stages, device)
        batches = (batch.on(device) for batch in self.rows)
        return batches if num_virtual_stages is None else list(tee(batches, num_virtual_stages))


def _path_lengths(microbatch: Microbatch) -> Tensor:
    """Returns the tokens of each path in a pack, [paths], without padding. The padding at the end
    of the pack is a path of 0 tokens.
    """
    lengths = microbatch["cu_seqlens"].diff()
    if "parents" not in microbatch:  # without trees each segment is a sequence
        return lengths
    # Nodes of 4, 2 and 3 tokens and the padding, with parents -1 0 0 -1 and depths 0 4 4 0: paths
    # of 4 + 2 = 6 and 4 + 3 = 7 tokens, and 0.
    parents = microbatch["parents"]
    is_leaf = torch.ones(lengths.shape, dtype=torch.bool)
    is_leaf[parents[parents >= 0]] = False
    return (lengths + microbatch["depths"])[is_leaf]


class StepBatches(Iterator[StepBatch]):
    """Iterator over the global batches of a split. `Prefetcher` documents its thread."""

    def __init__(
        self,
        config: SFTConfig,
        model_config: TransformerConfig,
        samples: SampleSet,
        share: Share,
        num_batches: int,
        *,
        progress: Progress | None = None,
        evaluated_after: int = 0,
        queue: DelayQueue | None = None,
    ) -> None:
        """Starts preparing batches. The first call in a process is collective: it makes groups.

        Args:
            num_batches: maximum number of batches. The last one takes all delayed sequences.
            progress: position in the training data to start at; None to read the samples once,
                from the start (evaluation).
            evaluated_after: number of training steps before an evaluation, all of whose batches
                are of that step.
            queue: delayed sequences of the checkpoint; it is copied.
        """
        data = config.data
        self._stream = SampleStream(
            samples,
            share,
            consumed_samples=0 if progress is None else progress.consumed_samples,
            num_batches=num_batches if progress is None else None,
            max_bad_samples_in_a_row=data.bad_samples_in_a_row,
            num_workers=default_num_workers() if data.num_workers is None else data.num_workers,
        )
        self._share = share
        self._config = model_config
        self._trains = progress is not None
        self._step = evaluated_after if progress is None else progress.iteration
        self._end = self._step + num_batches
        self._queue = None if queue is None else queue.copy()
        prepare, reads = self._padded, True
        if config.packing.sequence_packing:
            prepare = self._packed
            self._groups = ProcessGroupCollection.use_mpu_process_groups(GROUPS)
            reads = is_data_rank(self._groups)
            # Groups are made here and not in the prefetching thread: making them is collective,
            # and would run in another order with the model's collectives on each rank.
            groups = data_groups(self._groups)
            for group in (groups.data_ranks_group, groups.replica):
                if group is not None:  # torch's default is 30 minutes
                    _set_pg_timeout(
                        timedelta(minutes=config.parallel.distributed_timeout_minutes), group
                    )
        self._source = self._stream if reads else None
        # Fork the workers before the prefetching thread starts: a fork copies locks that a thread
        # holds, and nobody would release the copies.
        if reads and num_batches > 0:
            self._stream.start()
        self._rows = padded_batches(
            self._stream, config.training.micro_batch_size, config.alignment.pack
        )
        self._prefetcher = Prefetcher(prepare, data.prefetch_global_batches, num_batches)
        self.settle = self._prefetcher.settle

    def __next__(self) -> StepBatch:
        return next(self._prefetcher)._replace(seconds_waited=self._prefetcher.seconds_waited)

    @property
    def counts(self) -> Counts:
        """Counts of all samples that this rank loaded."""
        return self._stream.counts

    def limit_data_wait(self) -> None:
        """Limits the wait for data to a few seconds, after which it is an error. Any thread may
        call it.
        """
        self._stream.limit_data_wait()

    def close(self, timeout_seconds: float | None = None) -> None:
        """Closes the prefetcher (see `Prefetcher`), then ends the worker processes."""
        # In this order: the prefetching thread may still read from the workers.
        if self._prefetcher.close(timeout_seconds):
            self._stream.close()

    def _packed(self) -> StepBatch:
        if self._queue is not None and self._step == self._end - 1:
            self._queue.max_steps = 0  # the last step takes all that is delayed
        before = self._stream.counts
        batch = schedule_global_batch(
            self._source,
            self._config,
            self._share.num_fetches,
            self._groups,
            queue=self._queue,
            step=self._step,
        )
        self._step += self._trains
        return StepBatch(batch, [], self._stream.counts - before)

    def _padded(self) -> StepBatch:
        before = self._stream.counts
        try:
            rows = list(islice(self._rows, self._share.num_fetches))
        except Exception as failure:  # the user's data and code may raise anything
            # Other ranks have not failed. GlobalBatchError would make this rank save, which is
            # collective and would wait for them.
            if dist.get_world_size() > 1:
                raise
            is_worded = isinstance(failure, ValueError)  # a message for users, with file or option
            message = str(failure) if is_worded else f"{type(failure).__name__}: {failure}"
            raise GlobalBatchError(message) from failure
        return StepBatch(None, rows, self._stream.counts - before)
