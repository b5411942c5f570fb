"""pure. A DatasetLoader, or a metadataset, gives the sources of a path as data sets with
weights."""

import inspect
import os
from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Any, NamedTuple

from megatron.blending.arguments import nearest
from megatron.blending.energon._encoding.cooking import PlainReader
from megatron.blending.energon._encoding.source_entries import Reading, file_of, open_entry
from megatron.blending.formats.files import read_text
from megatron.blending.formats.paths import is_metadataset
from megatron.blending.formats.prepared.nv_meta import read_split_names
from megatron.blending.formats.yaml_reader import Table, as_tables, read_yaml
from megatron.blending.metadatasets.metadataset import (
    Blend,
    Epochized,
    Join,
    Node,
    SourceEntry,
    flattened,
    load_metadataset,
    multiplied,
)
from megatron.blending.metadatasets.metadataset_file import Entry, Reference, parse_metadataset
from megatron.blending.order.weights import Weight
from megatron.blending.streams.node import SavableDataset
from megatron.blending.streams.positions import RepeatDataset
from megatron.blending.streams.worker_config import WorkerConfig


class DatasetBlendMode(str, Enum):
    """It says what the weights of sources are."""

    NONE = "none"
    DATASET_WEIGHT = "dataset_weight"
    SAMPLE_REPETITIONS = "sample_repetitions"


class LoadedDataset(tuple[Any, Any]):
    """It is a source of a stream, and unpacks as `dataset, weight`."""

    dataset: Any
    weight: Weight
    repetitions: float | None
    entry: SourceEntry | Join
    """Where it came from."""

    def __new__(
        cls,
        dataset: SavableDataset[Any],
        weight: Weight,
        entry: SourceEntry | Join,
        repetitions: float | None = None,
    ) -> "LoadedDataset":
        self = super().__new__(cls, (dataset, weight))
        self.dataset, self.weight, self.entry, self.repetitions = (
            dataset,
            weight,
            entry,
            repetitions,
        )
        return self


class LoadedDatasetList(NamedTuple):
    datasets: list[LoadedDataset]
    blend_mode: DatasetBlendMode


class DatasetLoaderInterface:
    """Sources can be read from it."""

    def node(self, split_part: str, told: Reference) -> Node:
        """Return the tree of sources of a split; `told`: what holds for all of it."""
        raise NotImplementedError

    def get_datasets(
        self,
        *,
        training: bool,
        split_part: str,
        worker_config: WorkerConfig | None = None,
        subflavors: Mapping[str, Any] | None = None,
        shuffle_over_epochs_multiplier: int | None = 1,
        reading: Reading | None = None,
        repeat: bool = True,
    ) -> LoadedDatasetList:
        """Return the sources, opened: for training endless, unless repetitions say how often each
        is read per epoch.
        """
        told = Reference(
            path="", subflavors=subflavors or {}, multiplier=shuffle_over_epochs_multiplier
        )
        node = self.node(split_part, told)
        if reading is None:
            reading = Reading(encoder=PlainReader(), is_shuffled=training)
        kind, entries = flattened(node)
        opened = [
            (open_entry(entry, reading, worker_config), share, entry) for entry, share in entries
        ]
        if not training:
            return LoadedDatasetList(
                [LoadedDataset(d, 1.0, entry) for d, _, entry in opened], DatasetBlendMode.NONE
            )
        return loaded_for_training(kind, opened, repeat)


def loaded_for_training(
    kind: type, opened: Sequence[tuple[Any, Any, SourceEntry | Join]], repeat: bool = True
) -> LoadedDatasetList:
    """Return sources (data set of one pass, share, entry) as often as a tree of a `kind`
    (`flattened`) says.
    """
    if kind is Epochized:
        made = [_repeated(dataset, share, entry) for dataset, share, entry in opened if share]
        return LoadedDatasetList(
            [one for one in made if one.weight], DatasetBlendMode.SAMPLE_REPETITIONS
        )
    mode = DatasetBlendMode.DATASET_WEIGHT if kind is Blend else DatasetBlendMode.NONE
    return LoadedDatasetList(
        [LoadedDataset(_endless(d, repeat), share, entry) for d, share, entry in opened], mode
    )


def split_names(path: str) -> set[str]:
    """Return the splits that a metadataset, or a prepared folder, says it has; a file has none."""
    if is_metadataset(path):
        return set(parse_metadataset(path, read_yaml(path, read_text(path, ""))))
    return set(read_split_names(path)) if file_of(path) is None else set()


def _endless(dataset: SavableDataset[Any], repeat: bool) -> SavableDataset[Any]:
    return RepeatDataset(dataset, worker_config=dataset.worker_config) if repeat else dataset


def _repeated(
    dataset: SavableDataset[Any], repetitions: Weight, entry: SourceEntry | Join
) -> LoadedDataset:
    if not int(len(dataset) * repetitions):
        raise ValueError(
            f"{entry.where}: repetitions: {float(repetitions):g} times {len(dataset)} samples is "
            "none; raise it, or leave the source out"
        )
    if repetitions != 1:
        dataset = RepeatDataset(dataset, repetitions, worker_config=dataset.worker_config)
    return LoadedDataset(dataset, len(dataset), entry, float(repetitions))


class DatasetLoader(DatasetLoaderInterface):
    """It reads data, a prepared folder or a file of records; or a metadataset, again for each
    split.
    """

    def __init__(
        self,
        *,
        path: str | os.PathLike[str],
        split_part: str | None = None,
        subflavors: Mapping[str, Any] | None = None,
        shuffle_over_epochs_multiplier: int | None = 1,
        dataset_config: str | None = None,
        split_config: str | None = None,
    ) -> None:
        if subflavors is not None and not isinstance(subflavors, Mapping):
            raise ValueError(
                f"subflavors must be a dict of names and values, but is {subflavors!r}"
            )
        self.path = os.fspath(path)
        self.split_part = split_part
        self._subflavors = dict(subflavors or {})
        self._multiplier = shuffle_over_epochs_multiplier
        self._dataset_config = dataset_config
        self._split_config = split_config

    def node(self, split_part: str, told: Reference) -> Node:
        own = Reference(
            path=self.path,
            subflavors={**self._subflavors, **told.subflavors},
            multiplier=multiplied(told.multiplier, self._multiplier),
            dataset_config=self._dataset_config or told.dataset_config,
            split_config=self._split_config or told.split_config,
        )
        return load_metadataset(self.path, self.split_part or split_part, told=own)


class _Metadataset(DatasetLoaderInterface):
    """It reads a metadataset file, or its content given as dicts and lists, with paths relative to
    where `path` is.
    """

    def __init__(
        self, path: str | os.PathLike[str], splits: Mapping[str, Any] | None = None
    ) -> None:
        self.path = os.fspath(path)
        content = splits
        if splits is None:
            content = read_yaml(self.path, read_text(self.path, ""))
        elif not isinstance(splits, Table):
            content = as_tables({"__class__": type(self).__name__, "splits": dict(splits)})
        self._splits: dict[str, Entry] = parse_metadataset(self.path, content)

    def node(self, split_part: str, told: Reference) -> Node:
        return load_metadataset(self.path, split_part, told=told, files={self.path: self._splits})


class Metadataset(_Metadataset):
    """It has the first form: `splits` of `datasets` with weights."""


class MetadatasetV2(_Metadataset):
    """It has the second form: `splits` of a `path`, a `blend`, a `blend_epochized` or a `join`."""


def load_dataset(path: str | os.PathLike[str], **options: Any) -> DatasetLoaderInterface:
    """Return what gives the sources at `path`. `options`: those of DatasetLoader, where it is
    data."""
    location = os.fspath(path)
    check_options(options)
    if options or not is_metadataset(location):
        return DatasetLoader(path=location, **options)
    content = read_yaml(location, read_text(location, ""))
    is_second = isinstance(content, dict) and content.get("__class__") == MetadatasetV2.__name__
    return (MetadatasetV2 if is_second else Metadataset)(location, content)


def check_options(options: Mapping[str, Any], others: Sequence[str] = ()) -> None:
    """ValueError for one that DatasetLoader does not have. `others`: what may have been meant as
    well.
    """
    known = [name for name in inspect.signature(DatasetLoader).parameters if name != "path"]
    for name in options:
        if name not in known:
            raise ValueError(
                f"unknown option {name!r}; "
                f"{nearest(name, dict.fromkeys([*others, *known]), 'options')}"
            )
