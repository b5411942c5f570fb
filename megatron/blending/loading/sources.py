"""pure. The sources of a metadataset as data sets with weights: endless ones for a blend, or
repeated by their repetitions for an epochized blend.
"""

from collections.abc import Sequence
from enum import Enum
from typing import Any, NamedTuple

from megatron.blending.formats.files import read_text
from megatron.blending.formats.paths import is_metadataset
from megatron.blending.formats.prepared.nv_meta import read_split_names
from megatron.blending.formats.yaml_reader import read_yaml
from megatron.blending.metadatasets.metadataset_file import parse_metadataset
from megatron.blending.metadatasets.records import file_of
from megatron.blending.metadatasets.tree import Blend, Epochized, Join, SourceEntry
from megatron.blending.order.weights import Weight
from megatron.blending.streams.node import SavableDataset
from megatron.blending.streams.positions import RepeatDataset
from megatron.blending.streams.source import SourceDataset


class DatasetBlendMode(str, Enum):
    """Meaning of the weights of sources."""

    NONE = "none"
    DATASET_WEIGHT = "dataset_weight"
    SAMPLE_REPETITIONS = "sample_repetitions"


class LoadedDataset(tuple[Any, Any]):
    """A source of a stream. It unpacks as `dataset, weight`."""

    dataset: Any
    weight: Weight
    repetitions: float | None
    entry: SourceEntry | Join
    """Its entry in the metadataset."""

    def __new__(
        cls,
        dataset: SavableDataset[Any],
        weight: Weight,
        entry: SourceEntry | Join,
        repetitions: float | None = None,
    ) -> "LoadedDataset":
        self = super().__new__(cls, (dataset, weight))
        self.dataset = dataset
        self.weight = weight
        self.entry = entry
        self.repetitions = repetitions
        return self


class LoadedDatasetList(NamedTuple):
    """Sources of a stream, and the meaning of their weights."""

    datasets: list[LoadedDataset]
    blend_mode: DatasetBlendMode


def source_of(node: Any) -> SourceDataset:
    """Returns the source at the end of a chain of nodes with one child each."""
    while node.children:
        (node,) = node.children
    return node  # type: ignore[no-any-return]


def loaded_for_training(
    kind: type, opened: Sequence[tuple[Any, Any, SourceEntry | Join]], repeat: bool = True
) -> LoadedDatasetList:
    """Returns the sources for training: endless with their weights, or repeated.

    Args:
        kind: type of the top node of the tree, as `flattened` returns it.
        opened: (data set of one pass, share or repetitions, entry) of each source.
    """
    if kind is Epochized:
        repeated = [
            _repeated(dataset, repetitions, entry)
            for dataset, repetitions, entry in opened
            if repetitions
        ]
        return LoadedDatasetList(repeated, DatasetBlendMode.SAMPLE_REPETITIONS)
    mode = DatasetBlendMode.DATASET_WEIGHT if kind is Blend else DatasetBlendMode.NONE
    return LoadedDatasetList(
        [LoadedDataset(_endless(d, repeat), share, entry) for d, share, entry in opened], mode
    )


def split_names(path: str) -> set[str]:
    """Returns the names of the splits in a metadataset or a prepared folder; a file has none."""
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
