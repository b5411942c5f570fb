"""pure. Records -> the samples of each step: which ones is a function of (seed, position), the same for every layout.

The global stream of samples is one for all numbers of ranks; a global batch is the next `global_batch_size` positions
of it, and a data-parallel rank draws its share of them. So the place to resume from is one number, the samples
consumed.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass
from itertools import accumulate
from typing import Any, NamedTuple, Protocol

from megatron.blending.order import permute_index, stream_position
from megatron.blending.sources import RecordError, RecordSource, open_source
from megatron.sft.chat_encoder import ChatEncoder, Dropped, EncodedSample, SampleError
from megatron.sft.config import SFTConfig
from megatron.sft.mock_dataset import MockSFTDataset
from megatron.sft.tokenizer import build_tokenizer

_MOCK_VOCAB_SIZE = 1024
_MOCK_SAMPLES = 2**40


class Dataset(Protocol):
    """Map-style: `len` records, each a sample or the reason why it makes none."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> EncodedSample | Dropped: ...

    def fingerprint(self) -> str:
        """Changes with the records and their order."""
        ...


class Datasets(NamedTuple):
    """What a run reads. An empty validation or test set is not evaluated."""

    train: Dataset
    valid: Dataset
    test: Dataset
    vocab_size: int


def build_datasets(config: SFTConfig) -> Datasets:
    """Open the files, or make up the data, that the options name. Reads an index, not the records."""
    if config.data.mock_data:
        return _build_mock(config)
    data = config.data
    tokenizer = build_tokenizer(data.tokenizer_type, data.tokenizer_model, data.vocab_size)
    encoder = ChatEncoder(tokenizer, config.model.seq_length, config.packing.over_length_policy)
    everything = ChatDataset([open_source(path) for path in data.data_path], encoder, data.skip_bad_samples)
    if data.valid_data_path:
        valid = ChatDataset([open_source(path) for path in data.valid_data_path], encoder, data.skip_bad_samples)
        return Datasets(everything, valid, Part(everything, 0, 0), tokenizer.vocab_size)
    train_end = round(data.split_shares[0] * len(everything))
    valid_end = round((data.split_shares[0] + data.split_shares[1]) * len(everything))
    if train_end == 0:
        raise ValueError(
            f"--split {data.split} leaves no record of {len(everything)} for training; raise its first share"
        )
    return Datasets(
        train=Part(everything, 0, train_end),
        valid=Part(everything, train_end, valid_end),
        test=Part(everything, valid_end, len(everything)),
        vocab_size=tokenizer.vocab_size,
    )


def _build_mock(config: SFTConfig) -> Datasets:
    vocab_size = config.data.vocab_size or _MOCK_VOCAB_SIZE
    training = config.training

    def made_up(seed: int) -> Dataset:
        lengths = config.data.sft_mock_dataset_config_json
        samples = MockSFTDataset(lengths, config.model.seq_length, vocab_size, seed, num_samples=_MOCK_SAMPLES)
        return MockDataset(samples, f"{lengths} {config.model.seq_length} {vocab_size} {seed}")

    train, valid = made_up(training.seed), made_up(training.seed + 1)
    valid = Part(valid, 0, training.eval_iters * training.global_batch_size)
    return Datasets(train, valid, Part(train, 0, 0), vocab_size)


class ChatDataset:
    """Chats, instructions or texts from several sources, one after the other; encoded when asked for.

    A broken record raises ValueError naming file and line, or is `Dropped` with `skip_bad_samples`.
    """

    def __init__(self, sources: Sequence[RecordSource], encoder: ChatEncoder, skip_bad_samples: bool) -> None:
        self._sources = sources
        self._ends = list(accumulate(len(source) for source in sources))
        self._encoder = encoder
        self._skip_bad_samples = skip_bad_samples

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, index: int) -> EncodedSample | Dropped:
        number = bisect_right(self._ends, index)
        source = self._sources[number]
        place = index - (self._ends[number - 1] if number else 0)
        try:
            return self._encoder.encode(source[place])
        except SampleError as failure:
            if self._skip_bad_samples:
                return Dropped("bad sample")
            raise ValueError(f"{source.describe(place)}: {failure}") from None
        except RecordError:
            if self._skip_bad_samples:
                return Dropped("bad sample")
            raise

    def fingerprint(self) -> str:
        return " ".join(source.fingerprint() for source in self._sources)


class MockDataset:
    """Made-up samples, all of whose tokens count in the loss."""

    def __init__(self, samples: MockSFTDataset, fingerprint: str) -> None:
        self._samples = samples
        self._fingerprint = fingerprint

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, index: int) -> EncodedSample | Dropped:
        return EncodedSample(**self._samples[index], is_cut=False)

    def fingerprint(self) -> str:
        return self._fingerprint


class Part:
    """Records `start` to `end` of a data set."""

    def __init__(self, dataset: Dataset, start: int, end: int) -> None:
        self._dataset = dataset
        self._start = start
        self._end = end

    def __len__(self) -> int:
        return self._end - self._start

    def __getitem__(self, index: int) -> EncodedSample | Dropped:
        if not 0 <= index < len(self):
            raise IndexError(f"index must be in range({len(self)}), but is {index}")
        return self._dataset[self._start + index]

    def fingerprint(self) -> str:
        return f"{self._start}-{self._end} of {self._dataset.fingerprint()}"


class Share(NamedTuple):
    """Which part of every global batch a data-parallel rank draws, and in which portions."""

    rank: int
    num_ranks: int
    global_batch_size: int
    micro_batch_size: int

    @property
    def num_draws(self) -> int:
        """`next` calls per global batch; equal on all ranks."""
        return self.global_batch_size // (self.num_ranks * self.micro_batch_size)

    def draws_of(self, start: int, end: int) -> list[range]:
        """Positions of each draw from a batch at [start, end); the last batch of finite data may be small, and draws
        be empty.
        """
        size = end - start
        mine = range(start + size * self.rank // self.num_ranks, start + size * (self.rank + 1) // self.num_ranks)
        return [mine[i * self.micro_batch_size : (i + 1) * self.micro_batch_size] for i in range(self.num_draws)]


@dataclass(frozen=True)
class Counts:
    """What a stream drew. Exact integers."""

    num_sequences: int = 0
    num_tokens: int = 0
    square_sum: int = 0
    num_dropped: int = 0
    num_cut: int = 0

    def __add__(self, other: Counts) -> Counts:
        return Counts(*(a + b for a, b in zip(astuple(self), astuple(other))))

    def __sub__(self, other: Counts) -> Counts:
        return Counts(*(a - b for a, b in zip(astuple(self), astuple(other))))


class SampleStream:
    """Iterator over a rank's draws: each `next` gives the next up to `micro_batch_size` samples, as dicts of arrays.

    Training: endless, each epoch in an order of its own. `seek` goes to any step boundary. Records that make no sample
    are left out; `counts` tells of them, and of those drawn.
    """

    def __init__(self, dataset: Dataset, share: Share, *, seed: int | None, consumed_samples: int = 0) -> None:
        """`seed`: of the order of each epoch; None reads the data once, in its own order."""
        self._dataset = dataset
        self._share = share
        self._seed = seed
        self.counts = Counts()
        self.seek(consumed_samples)

    def seek(self, consumed_samples: int) -> None:
        """Continue with the global batch that follows this many samples of the stream."""
        self._next_batch = consumed_samples
        self._draws: Iterator[range] = iter(())

    def __iter__(self) -> SampleStream:
        return self

    def __next__(self) -> list[Mapping[str, Any]]:
        positions = next(self._draws, None)
        if positions is None:
            end = self._next_batch + self._share.global_batch_size
            if self._seed is None:
                end = min(end, len(self._dataset))
                if end <= self._next_batch:
                    raise StopIteration
            self._draws = iter(self._share.draws_of(self._next_batch, end))
            self._next_batch = end
            positions = next(self._draws)
        encoded = [self._dataset[self._record_at(position)] for position in positions]
        samples = [sample for sample in encoded if isinstance(sample, EncodedSample)]
        self.counts += Counts(
            num_sequences=len(samples),
            num_tokens=sum(len(sample.tokens) for sample in samples),
            square_sum=sum(len(sample.tokens) ** 2 for sample in samples),
            num_dropped=len(encoded) - len(samples),
            num_cut=sum(sample.is_cut for sample in samples),
        )
        return [{"tokens": sample.tokens, "labels": sample.labels, "loss_mask": sample.loss_mask} for sample in samples]

    def _record_at(self, position: int) -> int:
        if self._seed is None:
            return position
        epoch, index = stream_position(position, len(self._dataset))
        return permute_index(index, len(self._dataset), self._seed, epoch)
