"""pure. The samples of each step: which ones is a function of the position, the same for every
layout.

The global stream of samples is one for all numbers of ranks and workers; a global batch is the next
`global_batch_size` positions of it, of which each data-parallel rank loads its share. So the place
to resume from is one number, the samples consumed. A record that makes no sample leaves a skip
marker in its global batch, which is counted here: nothing takes its place (a loader's batches, in
megatron.blending, are filled with what follows).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from megatron.blending.loading.chunk_loader import ChunkLoader
from megatron.blending.streams.chunk import ChunkDataset, SkippedSample
from megatron.blending.streams.failures import Failures, FatalSampleError
from megatron.blending.streams.worker_config import WorkerConfig
from megatron.sft.data.chat_encoder import ChatEncoder, SampleError
from megatron.sft.data.counts import COLUMNS, Counts
from megatron.sft.data.sample_set import SampleSet

_CHUNK = 32
"""Samples that a worker makes at once, at most, unless a fetch has more."""
_BAD = "bad sample"


class Share(NamedTuple):
    """Part of every global batch that a data-parallel rank loads, and its portions."""

    rank: int
    num_ranks: int
    global_batch_size: int
    micro_batch_size: int

    @property
    def num_fetches(self) -> int:
        """`next` calls per global batch; equal on all ranks."""
        return self.global_batch_size // (self.num_ranks * self.micro_batch_size)

    @property
    def fetches_per_chunk(self) -> int:
        """Fetches that are made at once. A global batch is whole chunks, which ranks take in
        turns.
        """
        most = max(1, _CHUNK // self.micro_batch_size)
        # The largest divisor: 48 fetches of 3 samples, at most 10 at once, are made 8 at once.
        return max(count for count in range(1, most + 1) if self.num_fetches % count == 0)


class SampleStream(Iterator[list[Mapping[str, Any]]]):
    """Iterator over a rank's samples: each `next` gives up to `micro_batch_size` of them, as dicts
    of arrays.

    Worker processes read and encode ahead, from `start` on, or the first `next`.
    """

    def __init__(
        self,
        samples: SampleSet,
        share: Share,
        *,
        consumed_samples: int = 0,
        num_batches: int | None = None,
        max_bad_samples_in_a_row: int | None = None,
        num_workers: int = 0,
    ) -> None:
        """Args:
        consumed_samples: samples of the stream that were consumed; the next one is the first
            of a global batch.
        num_batches: global batches to read, once, with StopIteration after them; None: pass
            after pass without end.
        max_bad_samples_in_a_row: see `DataConfig.bad_samples_in_a_row`.
        """
        assert samples.dataset is not None
        self._samples = samples
        self._share = share
        self._failures = (
            None if max_bad_samples_in_a_row is None else Failures(max_bad_samples_in_a_row)
        )
        self._table = Counts.none(len(samples.names)).table
        self._is_endless = num_batches is None
        self._fetched: deque[list[Any]] = deque()
        length = share.fetches_per_chunk * share.micro_batch_size
        chunks = ChunkDataset(
            samples.dataset,
            length,
            first=consumed_samples,
            num_outputs=None
            if num_batches is None
            else num_batches * share.global_batch_size // length,
        )
        workers = WorkerConfig(
            rank=share.rank,
            world_size=share.num_ranks,
            num_workers=num_workers,
            seed=samples.seed,
        )
        # Rounded up: workers make one global batch ahead together.
        ahead = -(-share.num_fetches // (share.fetches_per_chunk * max(1, num_workers)))
        self._loader = ChunkLoader(chunks, workers, prefetch_factor=ahead)

    @property
    def counts(self) -> Counts:
        """Counts of all samples that were loaded."""
        return Counts(self._table.copy())

    def start(self) -> None:
        """Starts the worker processes: before there are threads, which a fork would copy in the
        middle of their work.
        """
        self._loader.start()

    def limit_data_wait(self) -> None:
        """Lets a worker that gives nothing be an error within seconds; called from any thread."""
        self._loader.hurry()

    def close(self) -> None:
        """Ends the worker processes."""
        self._loader.close()

    def __next__(self) -> list[Mapping[str, Any]]:
        if not self._fetched:
            chunk, size = next(self._loader, None), self._share.micro_batch_size
            if chunk is None and self._is_endless:
                raise ValueError("the data ended, which those of a training never do")
            if chunk is None:
                raise StopIteration
            self._fetched.extend(
                chunk[fetch * size : (fetch + 1) * size]
                for fetch in range(self._share.fetches_per_chunk)
            )
        samples: list[Mapping[str, Any]] = []
        for made in self._fetched.popleft():
            if isinstance(made, SkippedSample):
                self._table[made.source][COLUMNS.index(self._reason(made))] += 1
                continue
            source, sample = made
            if self._failures is not None:
                self._failures.succeeded({source}.copy)
            length = len(sample.tokens)
            self._table[source][:4] += (1, length, length * length, sample.is_cut)
            fields = {
                "tokens": sample.tokens,
                "labels": sample.labels,
                "loss_mask": sample.loss_mask,
            }
            if sample.tree is not None:
                fields |= {
                    "num_paths": sample.tree.num_paths,
                    "cu_seqlens": sample.tree.cu_seqlens,
                    "parents": sample.tree.parents,
                }
            samples.append({**fields, "source": source})
        return samples

    def _reason(self, skipped: SkippedSample) -> str:
        """Returns why a record makes no sample.

        Raises ValueError where it is broken, and no more of these may be skipped.
        """
        if skipped.reason is not None:
            return skipped.reason
        fault = skipped.fault.removeprefix(f"{skipped.place}: ")
        if self._failures is None:
            raise ValueError(f"{skipped.place}: {fault}; or pass --skip-bad-samples")
        where = f"{self._samples.names[skipped.source]}: {skipped.place}"
        try:
            self._failures.leave_out(
                SampleError(fault),
                skipped.source,
                ChatEncoder.encode,
                lambda: where,
                None,
                lambda: {skipped.source},
            )
        except FatalSampleError as fatal:
            raise ValueError(f"{fatal}; see --max-bad-samples-in-a-row") from None
        return _BAD
