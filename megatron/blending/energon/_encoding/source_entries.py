"""pure. Opens the source entries of a metadataset: their records become samples of the task.

What a record becomes depends on the source: the sample class of its dataset.yaml, or a CrudeSample,
which the task encoder's cooker makes a sample of; a line of JSONL is a CrudeSample with the object
as "json", a row of Parquet or a token sequence one with its columns. Without any cooker crude
samples go to `encode_sample` as they are.
"""

import importlib
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from megatron.blending.arguments import nearest
from megatron.blending.energon._encoding.cooking import DECODE, Reader, choose_cook
from megatron.blending.energon._encoding.decode import SampleDecoder, decode_part, keep_bytes
from megatron.blending.energon._encoding.factories import Factory, opened_by
from megatron.blending.energon._encoding.fields import required_names
from megatron.blending.energon._encoding.file_store import (
    FileStore,
    SystemFileStore,
    WebdatasetFileStore,
    open_store,
)
from megatron.blending.energon._encoding.join import JoinedLoad, JoinSource
from megatron.blending.energon._encoding.loads import CrudeLoad, FileLoad, TypedLoad
from megatron.blending.energon._encoding.samples import SAMPLE_TYPES, Sample
from megatron.blending.formats.decode import Decode
from megatron.blending.formats.files import local_path
from megatron.blending.formats.paths import is_folder
from megatron.blending.formats.prepared.field_check import check_field_map
from megatron.blending.formats.prepared.nv_meta import SampleType
from megatron.blending.formats.prepared.webdataset import WebDataset
from megatron.blending.formats.record import Record, RecordSource
from megatron.blending.formats.sources import JSON_SUFFIXES
from megatron.blending.metadatasets.records import (
    OpenRecords,
    name_of,
    named_by,
    open_folder,
    open_records,
    part_of,
)
from megatron.blending.metadatasets.tree import Join, SourceEntry
from megatron.blending.streams.source import SourceDataset
from megatron.blending.streams.worker_config import WorkerConfig

_OUR_MODULES = ("megatron.energon", "megatron.blending")
UNSAID: Any = "unsaid"

Load = Callable[[Record, tuple[Any, ...]], Any]


@dataclass(frozen=True, kw_only=True)
class Reading:
    """A Reading says how sources are read, for training or for validation."""

    encoder: Reader
    is_shuffled: bool = True
    slice_length: int | None = None
    """Longest run of records that is read in one go; None: no runs, each record by itself."""
    shuffle_window: int = 0
    decoder: Any = UNSAID
    """Decoder of parts in place of the encoder's."""
    allow_code: bool = False
    """True if Python files and classes that a dataset.yaml or a join names may be run."""


def open_entry(
    entry: SourceEntry | Join, reading: Reading, worker_config: WorkerConfig | None = None
) -> SourceDataset:
    """Returns a source as a SourceDataset: one pass over its samples. ValueError starts with where
    it is named.
    """
    source, load = open_samples(entry, reading)
    return SourceDataset(
        source,
        load=load,
        shuffle=reading.is_shuffled,
        multiplier=entry.shuffle_over_epochs_multiplier,
        slice_length=reading.slice_length,
        shuffle_window=reading.shuffle_window,
        name=name_of(entry),
        worker_config=worker_config,
    )


def open_samples(entry: SourceEntry | Join, reading: Reading) -> tuple[RecordSource, Load]:
    """Returns the records of a source, and the function that makes a sample of each; ValueError
    starts with where it is named.
    """
    with named_by(entry):
        if isinstance(entry, Join):
            return _open_join(entry, reading)
        opened = open_records(entry, allow_code=reading.allow_code)
        return opened.source, _load_of(entry, opened, reading)


def _load_of(entry: SourceEntry, opened: OpenRecords, reading: Reading) -> Load:
    decode, folder = _decoder(reading), opened.folder
    if folder is not None and not folder.sample_type.is_crude:
        if entry.aux:
            raise ValueError(
                f"aux is for crude data, but the samples are of {folder.sample_type.name}; "
                "remove it"
            )
        return _typed_load(folder, opened.source, opened.subflavors, reading, decode)
    stores = {name: open_store(path, decode, entry.where) for name, path in entry.aux.items()}
    primary: FileStore = (
        WebdatasetFileStore(entry.path, decode)
        if folder is not None
        else SystemFileStore(os.path.dirname(opened.path), decode)
    )
    cook = choose_cook(reading.encoder.cookers, opened.subflavors, stores, primary, entry.where)
    path, subflavors = opened.path, opened.subflavors
    if folder is not None:
        return CrudeLoad(path=path, subflavors=subflavors, cook=cook, dataset=folder, decode=decode)
    is_json = path.endswith(JSON_SUFFIXES)
    return FileLoad(
        path=path, subflavors=subflavors, cook=cook, first=opened.first, is_json=is_json
    )


def _typed_load(
    dataset: WebDataset,
    source: RecordSource,
    subflavors: dict[str, Any],
    reading: Reading,
    decode: Decode,
) -> TypedLoad:
    """Returns the load of a source with types. `source`: what is read of the data set."""
    kind, decode = _sample_class(dataset, reading, decode)
    load = TypedLoad(dataset, kind, subflavors, decode)
    if dataset.sample_type.field_map and local_path(dataset.path) is not None:
        check_field_map(dataset.sample_type, source, decode)
    return load


def _open_join(join: Join, reading: Reading) -> tuple[RecordSource, Load]:
    decode = _decoder(reading)
    sources: list[WebDataset] = []
    loads: list[Load] = []
    for leg in join.legs:
        if not is_folder(leg.entry.path):
            raise ValueError(
                f"{leg.entry.where}: a join is of prepared folders, but {leg.entry.path} is none"
            )
        webdataset, subflavors = open_folder(leg.entry, reading.allow_code)
        if webdataset.sample_type.is_crude:
            crude = CrudeLoad(
                path=leg.entry.path,
                subflavors=subflavors,
                cook=None,
                dataset=webdataset,
                decode=decode,
            )
            loads.append(crude)
        else:
            loads.append(_typed_load(webdataset, webdataset, subflavors, reading, decode))
        sources.append(webdataset)
    joined = JoinSource(sources, [leg.nonmatch for leg in join.legs])
    make = _joiner(join, reading)
    names = [leg.name for leg in join.legs]
    return part_of(joined, join.subset), JoinedLoad(loads, names, make, dict(join.subflavors))


def _joiner(join: Join, reading: Reading) -> Callable[..., Any]:
    """Returns the function of a joiner, or `from_joined` of its class."""
    kind = _imported(*join.joiner, reading.allow_code)
    return getattr(kind, "from_joined", kind)


def _decoder(reading: Reading) -> Decode:
    """Returns what the encoder's `decoder` stands for: (name of a part, bytes) -> value."""
    decoder = reading.encoder.decoder if reading.decoder is UNSAID else reading.decoder
    if decoder is None:
        return keep_bytes
    if decoder is DECODE:
        return SampleDecoder(allow_code=True) if reading.allow_code else decode_part
    if not callable(decoder):
        name = type(reading.encoder).__name__
        raise ValueError(f"{name}.decoder must be a SampleDecoder or None, but is {decoder!r}")
    if reading.allow_code and isinstance(decoder, SampleDecoder):
        return replace(decoder, allow_code=True)
    return decoder


def _sample_class(webdataset: WebDataset, reading: Reading, decode: Decode) -> tuple[Any, Decode]:
    """Returns the class that dataset.yaml names, and how its parts are decoded. One of ours is
    named by its name alone, one of the program by its module; any other only if code is allowed.
    """
    kind = webdataset.sample_type
    if kind.module.startswith(_OUR_MODULES):
        if kind.name not in SAMPLE_TYPES:
            raise ValueError(
                f"{kind.where}: unknown class {kind.name!r}; "
                f"{nearest(kind.name, SAMPLE_TYPES, 'they')}"
            )
        made = SAMPLE_TYPES[kind.name]
    else:
        made = _known(kind.module, kind.name) or _imported(
            kind.module, kind.name, reading.allow_code
        )
    if isinstance(made, type) and issubclass(made, Factory):
        made, decode = opened_by(made, webdataset.path, decode)
    _check_names(kind, made)
    return made, decode


def _check_names(kind: SampleType, made: Any) -> None:
    """Raises ValueError for a field map with a field that the class `made` lacks, or without one
    that it needs.
    """
    names = getattr(made, "__dataclass_fields__", {})
    for name in kind.field_map:
        if names and name not in names:
            own = [field for field in names if not field.startswith("__")]
            raise ValueError(
                f"{kind.where}: field_map: {kind.name} has no field {name!r}; {nearest(name, own)}"
            )
    if kind.field_map and names:
        for name in sorted(
            required_names(made) - kind.field_map.keys() - {"__key__", "__restore_key__"}
        ):
            raise ValueError(
                f"{kind.where}: field_map: {kind.name} needs a field {name!r}; say where it comes "
                "from"
            )


def _known(module: str, name: str) -> type | None:
    """Returns a class of samples, or one that opens data, of a module that the program has imported
    itself: no code is run that it would not run anyway.
    """
    found = getattr(sys.modules.get(module), name, None)
    return found if isinstance(found, type) and issubclass(found, (Factory, Sample)) else None


def _imported(module: str, name: str, allow_code: bool) -> Any:
    if not allow_code:
        raise ValueError(
            f"names Python code, {module}.{name}, which is not imported; pass allow_code=True to "
            "trust it"
        )
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"{module}.{name} cannot be imported: {error}") from None
