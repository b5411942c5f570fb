"""pure. Cuts the data that the options name into a training, a validation and a test set.

    build_blend    a metadataset, or paths with weights: each source is cut by itself
    build_files    any other paths, read one after the other: all their records are cut as one

Where the data have splits of their own, or --valid-data-path is given, nothing is cut.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import accumulate
from typing import NamedTuple

from megatron.blending.formats.source_part import SourcePart
from megatron.blending.loading.sources import (
    DatasetBlendMode,
    LoadedDatasetList,
    loaded_for_training,
    source_of,
    split_names,
)
from megatron.blending.loading.token_weights import by_tokens, mean_tokens
from megatron.blending.metadatasets.metadataset import load_metadataset
from megatron.blending.metadatasets.tree import Blend, Join, SourceEntry, flattened, source_entries
from megatron.blending.order.weights import WeightSchedule
from megatron.blending.streams.source import SourceDataset
from megatron.sft.data.chat_encoder import ChatEncoder
from megatron.sft.data.chats import ChatLoad, num_tokens, open_chats
from megatron.sft.data.sample_set import SampleSet, blended, concatenated
from megatron.sft.data.source_names import short_names
from megatron.sft.options.data import DataConfig
from megatron.sft.options.hub_names import download_advice

_HELD_OUT = ("val", "test")


def _entries(paths: Sequence[str], split: str) -> list[SourceEntry | Join]:
    """Returns the entries of the sources under all paths. A file has one, a metadataset one for
    each source that it names.
    """
    nodes = [load_metadataset(path, split) for path in paths]
    return [entry for node in nodes for entry in source_entries(node)]


class _SourceRange(NamedTuple):
    """An opened source, and the range of its records that a split takes."""

    entry: SourceEntry | Join
    """The source as a metadataset or --data-path names it."""
    dataset: SourceDataset
    records: range

    def with_records(self, records: range) -> _SourceRange:
        """Returns the same source with another range of records."""
        return self._replace(records=records)

    def clipped(self, cut: range, start: int) -> _SourceRange:
        """Returns the records of this source that a cut takes.

        Args:
            cut: record numbers, counted through all sources one after the other.
            start: number of this source's first record in that count.

        Sources of 3 and 5 records start at 0 and 3. The cut range(0, 6) takes range(0, 3) of the
        first and range(0, 3) of the second; range(6, 8) takes nothing of the first, and range(3, 5)
        of the second.
        """
        first, last = max(cut.start - start, 0), min(cut.stop - start, len(self.records))
        return self.with_records(range(first, last))

    def described(self) -> str:
        """Returns the place of the source in a metadataset, or its path."""
        return self.entry.where or _path_of(self.entry)

    def as_dataset(self, is_shuffled: bool = True) -> SourceDataset:
        """Returns the records of the range as a data set."""
        whole, load = self.dataset.source, self.dataset.load
        source = whole if len(self.records) == len(whole) else SourcePart(whole, self.records)
        multiplier = self.entry.shuffle_over_epochs_multiplier if is_shuffled else None
        return SourceDataset(source, load=load, multiplier=multiplier, name=self.dataset.name)


class SplitBuilder:
    """Builds the training, validation and test set of a run."""

    def __init__(
        self, data: DataConfig, encoder: ChatEncoder, seed: int, schedule: WeightSchedule | None
    ) -> None:
        self._data = data
        self._schedule = schedule
        self._encoder = encoder
        self._seed = seed
        self._held_out = self._splits_of_data()

    def build_files(self) -> tuple[SampleSet, SampleSet, SampleSet]:
        """Returns the three splits of sources that are read one after the other."""
        data = self._data
        opened = self._opened(_entries(data.paths, "train"))
        if data.valid_data_path or self._held_out:
            return (
                self._concatenated(opened, seed=self._seed),
                self._held_out_set("val"),
                self._held_out_set("test"),
            )
        starts = [0, *accumulate(len(source.records) for source in opened)]
        cuts = self._cut(starts[-1], "")
        train, valid, test = (
            [source.clipped(cut, start) for source, start in zip(opened, starts)] for cut in cuts
        )
        return (
            self._concatenated(train, seed=self._seed),
            self._concatenated(valid),
            self._concatenated(test),
        )

    def build_blend(self) -> tuple[SampleSet, SampleSet, SampleSet]:
        """Returns the three splits of a blend: the training set in the proportions of a metadataset
        or of the weights in --data-path, the others source by source.
        """
        found = [
            (load_metadataset(path, "train"), weight) for weight, path in self._data.weighted_paths
        ]
        weighted = tuple((node, weight) for node, weight in found if weight is not None)
        kind, shares = flattened(Blend(children=weighted) if weighted else found[0][0])
        train = self._opened([entry for entry, _ in shares])
        if self._data.valid_data_path or self._held_out:
            valid, test = self._held_out_set("val"), self._held_out_set("test")
        else:
            # Each source is cut by itself, so that each split has some of every source.
            cuts = [self._cut(len(source.records), f" of {source.described()}") for source in train]
            train, valid_ranges, test_ranges = (
                [source.with_records(cut) for source, cut in zip(train, cuts_of_split)]
                for cuts_of_split in zip(*cuts)
            )
            valid, test = self._concatenated(valid_ranges), self._concatenated(test_ranges)
        weighted_sources = [
            (source.as_dataset(), share, source.entry) for source, (_, share) in zip(train, shares)
        ]
        return self._blended(loaded_for_training(kind, weighted_sources)), valid, test

    def _splits_of_data(self) -> set[str]:
        """Returns the held-out splits, of `val` and `test`, that the data themselves have. Raises
        ValueError if only some of the paths have one.
        """
        if self._data.valid_data_path:
            return set()
        found = {path: split_names(path).intersection(_HELD_OUT) for path in self._data.paths}
        with_splits = [path for path, names in found.items() if names]
        without = [path for path, names in found.items() if not names]
        if with_splits and without:
            raise ValueError(
                f"{with_splits[0]} has data to hold out, but {without[0]} has none; pass "
                "--valid-data-path, or name both in a metadataset with splits train and val"
            )
        return set().union(*found.values())

    def _held_out_set(self, split: str) -> SampleSet:
        """Returns the split `val` or `test` of --valid-data-path or of the data, unshuffled."""
        paths: Sequence[str] = self._data.valid_paths if split == "val" else ()
        if not self._data.valid_data_path:
            paths = [path for path in self._data.paths if split in split_names(path)]
        return self._concatenated(self._opened(_entries(paths, split)))

    def _opened(self, entries: Sequence[SourceEntry | Join]) -> list[_SourceRange]:
        """Returns the sources with all their records."""
        found = [self._open(entry) for entry in entries]
        return [
            _SourceRange(entry, one, range(len(one.source))) for entry, one in zip(entries, found)
        ]

    def _open(self, entry: SourceEntry | Join) -> SourceDataset:
        try:
            return open_chats(entry, self._encoder)
        except ValueError as failure:
            if not (advice := download_advice(_path_of(entry))):
                raise
            raise ValueError(f"{failure}{advice}") from None

    def _concatenated(self, sources: Sequence[_SourceRange], seed: int | None = None) -> SampleSet:
        """Returns the sources one after the other, empty ones left out; shuffled with a seed."""
        filled = [source for source in sources if source.records]
        datasets = [source.as_dataset(is_shuffled=False) for source in filled]
        return concatenated(self._numbered([one.entry for one in filled], datasets), datasets, seed)

    def _numbered(
        self, entries: Sequence[SourceEntry | Join], datasets: Sequence[SourceDataset]
    ) -> list[str]:
        """Gives each data set its number, which its samples carry, and returns the names that these
        numbers stand for.
        """
        for number, dataset in enumerate(datasets):
            assert isinstance(dataset.load, ChatLoad)
            dataset.load = dataset.load.numbered(number)
        return short_names([_path_of(entry) for entry in entries])

    def _blended(self, loaded: LoadedDatasetList) -> SampleSet:
        """Returns the sources mixed by their weights, which may be weights in tokens."""
        shares = [
            one.weight if one.repetitions is None else one.repetitions for one in loaded.datasets
        ]
        weighted, schedule = loaded.datasets, self._schedule
        needs_weights = schedule is not None or self._data.blend_weights_by == "tokens"
        if needs_weights and loaded.blend_mode is DatasetBlendMode.SAMPLE_REPETITIONS:
            raise ValueError(
                "--blend-weights-by tokens and --blend-weight-schedule are for 'blend', but the "
                "metadataset has 'blend_epochized', which says how often each source is read"
            )
        if self._data.blend_weights_by == "tokens":
            weighted, schedule = by_tokens(
                loaded.datasets, schedule, partial(mean_tokens, count=num_tokens)
            )
        names = self._numbered(
            [one.entry for one in weighted], [source_of(one.dataset) for one in weighted]
        )
        return blended(names, weighted, shares, self._seed, self._data.blend_mode, schedule)

    def _cut(self, num_records: int, of_what: str) -> tuple[range, range, range]:
        """Returns the records for training, validation and test, by the shares of --split.

        1,000 records under the shares 0.98, 0.01 and 0.01 give range(980), range(980, 990) and
        range(990, 1000).

        of_what: names the source in the error, " of chats.jsonl", or is empty for all sources.
        """
        shares = self._data.split_shares
        train_end = round(shares[0] * num_records)
        valid_end = round((shares[0] + shares[1]) * num_records)
        if train_end == 0:
            raise ValueError(
                f"--split {self._data.split} leaves no record of {num_records}{of_what} for "
                "training; raise its first share"
            )
        return range(train_end), range(train_end, valid_end), range(valid_end, num_records)


def _path_of(entry: SourceEntry | Join) -> str:
    """Returns the path of a source; of a join that of its first leg."""
    return entry.path if isinstance(entry, SourceEntry) else entry.legs[0].entry.path
