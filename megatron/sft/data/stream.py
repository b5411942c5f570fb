"""pure. The stream of a rank's samples, step by step.

There is one global stream of samples, the same for any number of ranks and workers. A global batch
is the next `global_batch_size` positions of it, and each data-parallel rank loads its share of
them. So one number says where to resume: the samples consumed.

    global_batch_size 4, 2 ranks, micro_batch_size 1
    position           0  1  2  3 | 4  5  6  7 | ...
    step               0  0  0  0 | 1  1  1  1 | ...
    rank               0  0  1  1 | 0  0  1  1 | ...

A record that makes no sample leaves a skip marker at its position. It is counted here, and its
global batch has one sample fewer: no later record moves up. (The batches of energon's loader are
filled up instead.)
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from itertools import count
from typing import Any, NamedTuple

import numpy as np

from megatron.blending.loading.chunk_loader import ChunkLoader
from megatron.blending.streams.chunk import ChunkDataset, SkippedSample
from megatron.blending.streams.failures import Failures, FatalSampleError
from megatron.blending.streams.worker_config import WorkerConfig
from megatron.sft.data.chat_encoder import ChatEncoder, EncodedSample, SampleError
from megatron.sft.data.counts import COLUMNS, Counts
from megatron.sft.data.sample_set import SampleSet
from megatron.sft.images.sizes import PATCHES

_CHUNK = 32
"""Most samples that a worker makes at once; a fetch of more is made whole all the same."""
_BAD = "bad sample"
PATH_FIELD = "path_weight"
"""Field that every sample with fields per path has."""
POSITION, SOURCE = "path_position", "path_source"
"""Fields that the stream adds to these: position of the sample in the data, and its source."""


class Share(NamedTuple):
    """The part of every global batch that one data-parallel rank loads, fetch by fetch. A fetch is
    `micro_batch_size` samples.
    """

    rank: int
    num_ranks: int
    global_batch_size: int
    micro_batch_size: int

    @property
    def num_fetches(self) -> int:
        """Fetches (`next` calls of the stream) per global batch; equal on all ranks."""
        return self.global_batch_size // (self.num_ranks * self.micro_batch_size)

    @property
    def fetches_per_chunk(self) -> int:
        """Fetches per chunk, the unit of work of a worker. A global batch is a whole number of
        chunks.
        """
        most = max(1, _CHUNK // self.micro_batch_size)
        # The largest divisor of num_fetches: of 48 fetches of 3 samples each, at most 10 fit into
        # a chunk of 32 samples, so that chunks have 8 fetches.
        return max(count for count in range(1, most + 1) if self.num_fetches % count == 0)


class SampleStream(Iterator[list[Mapping[str, Any]]]):
    """Iterator over a rank's samples. Each `next` returns a list of at most `micro_batch_size`
    samples, each a dict of arrays.

    Worker processes read and encode ahead. They start with `start`, or with the first `next`.
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
        consumed_samples: position to start at, where a global batch begins.
        num_batches: global batches to read before StopIteration; None for an endless stream.
        max_bad_samples_in_a_row: see `DataConfig.bad_samples_in_a_row`.
        """
        assert samples.dataset is not None
        self._samples = samples
        self._share = share
        self._failures = (
            None if max_bad_samples_in_a_row is None else Failures(max_bad_samples_in_a_row)
        )
        self._table = Counts.none(len(samples.names)).table
        self._positions = self._numbered(consumed_samples)
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
        # Chunks per worker, rounded up, so that all workers together make one global batch ahead.
        ahead = -(-share.num_fetches // (share.fetches_per_chunk * max(1, num_workers)))
        self._loader = ChunkLoader(chunks, workers, prefetch_factor=ahead)

    @property
    def counts(self) -> Counts:
        """Counts of all samples that were loaded."""
        return Counts(self._table.copy())

    def start(self) -> None:
        """Starts the worker processes. Call it before threads are started: a fork would copy locks
        that such a thread holds.
        """
        self._loader.start()

    def limit_data_wait(self) -> None:
        """Shortens the time after which a silent worker is an error to a few seconds. Any thread
        may call it.
        """
        self._loader.hurry()

    def close(self) -> None:
        """Ends the worker processes."""
        self._loader.close()

    def _numbered(self, start: int) -> Iterator[int]:
        """Yields the position of each sample of this rank, those that are skipped among them."""
        share = self._share
        size = share.fetches_per_chunk * share.micro_batch_size
        for first in count(start + share.rank * size, share.num_ranks * size):
            yield from range(first, first + size)

    def __next__(self) -> list[Mapping[str, Any]]:
        if not self._fetched:
            chunk, size = next(self._loader, None), self._share.micro_batch_size
            if chunk is None and self._is_endless:
                raise ValueError("the training data ended, but must be endless; please report this")
            if chunk is None:
                raise StopIteration
            self._fetched.extend(
                chunk[fetch * size : (fetch + 1) * size]
                for fetch in range(self._share.fetches_per_chunk)
            )
        samples: list[Mapping[str, Any]] = []
        for made in self._fetched.popleft():
            position = next(self._positions)
            if isinstance(made, SkippedSample):
                self._table[made.source][COLUMNS.index(self._reason(made))] += 1
                continue
            source, sample = made
            if self._failures is not None:
                self._failures.succeeded({source}.copy)
            self._table[source][0] += 1
            self._table[source][3] += sample.is_cut
            for reason in sample.dropped:
                self._table[source][COLUMNS.index(reason)] += 1
            for part in sample.parts:
                length = len(part.tokens)
                self._table[source][1:3] += (length, length * length)
                samples.append({**_fields_of(part, source, position), "source": source})
        return samples

    def _reason(self, skipped: SkippedSample) -> str:
        """Returns why a record made no sample.

        Raises ValueError if the record is broken and may not be skipped: without
        --skip-bad-samples, or after too many in a row.
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


def _fields_of(sample: EncodedSample, source: int, position: int) -> dict[str, Any]:
    """Returns a sequence, or a tree of them, as a sample of packing."""
    fields: dict[str, Any] = {
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
    if sample.fields:
        num_paths = len(sample.fields[PATH_FIELD])
        ids = np.full(num_paths, position, np.int64)
        sources = np.full(num_paths, source, np.int32)
        fields |= {**sample.fields, POSITION: ids, SOURCE: sources}
    if sample.images is not None:
        fields |= {
            "position_ids": sample.images.positions,
            "payload_key": sample.images.images,
            "costs": {PATCHES: sample.images.num_patches},
        }
    return fields
