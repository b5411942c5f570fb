"""pure. Opens the source entries of a metadataset as sources of samples. The source decides what
its records become:

    prepared folder with a sample class     a sample of that class
    prepared folder, crude                  CrudeSample with its parts       -> cooker
    JSONL, JSON                             CrudeSample {"json": object}     -> cooker
    Parquet, CSV, tokens                    CrudeSample with its columns     -> cooker

A cooker of the task encoder turns a CrudeSample into a sample. If the encoder has no cookers,
`encode_sample` gets the CrudeSample itself.
"""

import importlib
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from megatron.blending.arguments import nearest, shown
from megatron.blending.energon._encoding.cooking import DECODE, EncoderSettings, choose_cook
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
UNSET: Any = "unset"

Load = Callable[[Record, tuple[Any, ...]], Any]


@dataclass(frozen=True, kw_only=True)
class ReadSettings:
    """Settings for opening sources, for training or for validation."""

    encoder: EncoderSettings
    is_shuffled: bool = True
    slice_length: int | None = None
    """Maximum number of consecutive records that are read together; None to read each by itself."""
    shuffle_window: int = 0
    decoder: Any = UNSET
    """Decoder of parts, in place of the encoder's."""
    allow_code: bool = False
    """True to run Python files and import classes that a dataset.yaml or a join names."""


def open_entry(
    entry: SourceEntry | Join, reading: ReadSettings, worker_config: WorkerConfig | None = None
) -> SourceDataset:
    """Opens a source as a stream of one pass over its samples. Raises ValueError, which starts with
    the place of the entry.
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


def open_samples(entry: SourceEntry | Join, reading: ReadSettings) -> tuple[RecordSource, Load]:
    """Opens a source. Returns its records, and the function from a record to a sample. Raises
    ValueError, which starts with the place of the entry.
    """
    with named_by(entry):
        if isinstance(entry, Join):
            return _open_join(entry, reading)
        opened = open_records(entry, allow_code=reading.allow_code)
        return opened.source, _load_of(entry, opened, reading)


def _load_of(entry: SourceEntry, opened: OpenRecords, reading: ReadSettings) -> Load:
    """Returns the function from a record of an opened source to its sample."""
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
    reading: ReadSettings,
    decode: Decode,
) -> TypedLoad:
    """Returns the load for a prepared folder with a sample class. `source` has the records of it
    that are read, by which the field map is checked.
    """
    kind, decode = _sample_class(dataset, reading, decode)
    load = TypedLoad(dataset, kind, subflavors, decode)
    if dataset.sample_type.field_map and local_path(dataset.path) is not None:
        check_field_map(dataset.sample_type, source, decode)
    return load


def _open_join(join: Join, reading: ReadSettings) -> tuple[RecordSource, Load]:
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


def _joiner(join: Join, reading: ReadSettings) -> Callable[..., Any]:
    """Returns the function that joins samples: a joiner may be a function, or a class with
    `from_joined`.
    """
    kind = _imported(*join.joiner, reading.allow_code)
    return getattr(kind, "from_joined", kind)


def _decoder(reading: ReadSettings) -> Decode:
    """Returns the decoder of parts: a function (name of the part, bytes) -> value."""
    decoder = reading.encoder.decoder if reading.decoder is UNSET else reading.decoder
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


def _sample_class(
    webdataset: WebDataset, reading: ReadSettings, decode: Decode
) -> tuple[Any, Decode]:
    """Returns the sample class that dataset.yaml names, and the decoder of its parts.

    A class of this package is found by its name alone. A class of the user's program is found if
    the program has imported its module. Any other is imported only if code is allowed.
    """
    kind = webdataset.sample_type
    if kind.module.startswith(_OUR_MODULES):
        if kind.name not in SAMPLE_TYPES:
            raise ValueError(
                f"{kind.where}: unknown class {shown(kind.name)}; "
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
    """Raises ValueError if the field map has a field that the class `made` lacks, or lacks one that
    it needs.
    """
    names = getattr(made, "__dataclass_fields__", {})
    for name in kind.field_map:
        if names and name not in names:
            own = [field for field in names if not field.startswith("__")]
            raise ValueError(
                f"{kind.where}: field_map: {kind.name} has no field {shown(name)}; "
                f"{nearest(name, own)}"
            )
    if kind.field_map and names:
        for name in sorted(
            required_names(made) - kind.field_map.keys() - {"__key__", "__restore_key__"}
        ):
            raise ValueError(
                f"{kind.where}: field_map: {kind.name} needs a field {shown(name)}; "
                "say where it comes "
                "from"
            )


def _known(module: str, name: str) -> type | None:
    """Returns a sample class or a factory from a module that the program has imported already, or
    None. No new code runs by that.
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
