"""pure. A DatasetLoader, or a metadataset, gives the sources of a path as data sets with
weights."""

import inspect
import os
from collections.abc import Mapping, Sequence
from typing import Any

from megatron.blending.arguments import nearest, shown
from megatron.blending.energon._encoding.cooking import NoEncoder
from megatron.blending.energon._encoding.source_entries import ReadSettings, open_entry
from megatron.blending.formats.files import read_text
from megatron.blending.formats.paths import is_metadataset
from megatron.blending.formats.yaml_reader import Table, as_tables, read_yaml
from megatron.blending.loading.sources import (
    DatasetBlendMode,
    LoadedDataset,
    LoadedDatasetList,
    loaded_for_training,
)
from megatron.blending.metadatasets.metadataset import load_metadataset, multiplied
from megatron.blending.metadatasets.metadataset_file import Entry, Reference, parse_metadataset
from megatron.blending.metadatasets.tree import Node, flattened
from megatron.blending.streams.worker_config import WorkerConfig


class DatasetLoaderInterface:
    """Something that sources can be read from."""

    def node(self, split_part: str, settings: Reference) -> Node:
        """Returns the tree of sources of a split; `settings`: what holds for all of it."""
        raise NotImplementedError

    def get_datasets(
        self,
        *,
        training: bool,
        split_part: str,
        worker_config: WorkerConfig | None = None,
        subflavors: Mapping[str, Any] | None = None,
        shuffle_over_epochs_multiplier: int | None = 1,
        reading: ReadSettings | None = None,
        repeat: bool = True,
    ) -> LoadedDatasetList:
        """Returns the sources, opened: for training endless, unless repetitions say how often each
        is read per epoch.
        """
        settings = Reference(
            path="", subflavors=subflavors or {}, multiplier=shuffle_over_epochs_multiplier
        )
        node = self.node(split_part, settings)
        if reading is None:
            reading = ReadSettings(encoder=NoEncoder(), is_shuffled=training)
        kind, entries = flattened(node)
        opened = [
            (open_entry(entry, reading, worker_config), share, entry) for entry, share in entries
        ]
        if not training:
            return LoadedDatasetList(
                [LoadedDataset(d, 1.0, entry) for d, _, entry in opened], DatasetBlendMode.NONE
            )
        return loaded_for_training(kind, opened, repeat)


class DatasetLoader(DatasetLoaderInterface):
    """Reads a prepared folder, a file of records, or a metadataset, again for each split."""

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
                f"subflavors must be a dict of names and values, but is {shown(subflavors)}"
            )
        self.path = os.fspath(path)
        self.split_part = split_part
        self._subflavors = dict(subflavors or {})
        self._multiplier = shuffle_over_epochs_multiplier
        self._dataset_config = dataset_config
        self._split_config = split_config

    def node(self, split_part: str, settings: Reference) -> Node:
        own = Reference(
            path=self.path,
            subflavors={**self._subflavors, **settings.subflavors},
            multiplier=multiplied(settings.multiplier, self._multiplier),
            dataset_config=self._dataset_config or settings.dataset_config,
            split_config=self._split_config or settings.split_config,
        )
        return load_metadataset(self.path, self.split_part or split_part, settings=own)


class _Metadataset(DatasetLoaderInterface):
    """Reads a metadataset file, or its content given as dicts and lists, with paths relative to
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

    def node(self, split_part: str, settings: Reference) -> Node:
        return load_metadataset(
            self.path, split_part, settings=settings, files={self.path: self._splits}
        )


class Metadataset(_Metadataset):
    """A metadataset of the first form: `splits` of `datasets` with weights."""


class MetadatasetV2(_Metadataset):
    """A metadataset of the second form: `splits` of a `path`, a `blend`, a `blend_epochized` or a
    `join`.
    """


def load_dataset(path: str | os.PathLike[str], **options: Any) -> DatasetLoaderInterface:
    """Returns the loader of the sources at `path`. `options`: those of DatasetLoader, where it is
    data."""
    location = os.fspath(path)
    check_options(options)
    if options or not is_metadataset(location):
        return DatasetLoader(path=location, **options)
    content = read_yaml(location, read_text(location, ""))
    is_second = isinstance(content, dict) and content.get("__class__") == MetadatasetV2.__name__
    return (MetadatasetV2 if is_second else Metadataset)(location, content)


def check_options(options: Mapping[str, Any], others: Sequence[str] = ()) -> None:
    """Raises ValueError for one that DatasetLoader does not have. `others`: what may have been
    meant as well.
    """
    known = [name for name in inspect.signature(DatasetLoader).parameters if name != "path"]
    for name in options:
        if name not in known:
            raise ValueError(
                f"unknown option {shown(name)}; "
                f"{nearest(name, dict.fromkeys([*others, *known]), 'options')}"
            )
