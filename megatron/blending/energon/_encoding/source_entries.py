"""pure. This opens the source entries of a metadataset: their records become samples of the task.

What a record becomes depends on the source: the sample class of its dataset.yaml, or a CrudeSample,
which the task encoder's cooker makes a sample of; a line of JSONL is a CrudeSample with the object
as "json", a row of Parquet or a token sequence one with its columns. Without any cooker crude
samples go to `encode_sample` as they are.
"""

import importlib
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from megatron.blending.arguments import nearest
from megatron.blending.energon._encoding.cooking import DECODE, Reader, choose_cook
from megatron.blending.energon._encoding.fields import required_names
from megatron.blending.energon._encoding.file_store import (
    SystemFileStore,
    WebdatasetFileStore,
    open_store,
)
from megatron.blending.energon._encoding.join import JoinedLoad, JoinSource
from megatron.blending.energon._encoding.loads import CrudeLoad, FileLoad, TypedLoad
from megatron.blending.energon._encoding.samples import SAMPLE_TYPES
from megatron.blending.formats import files
from megatron.blending.formats.decode import Decode, SampleDecoder, decode_part, keep_bytes
from megatron.blending.formats.files import is_file, local_path
from megatron.blending.formats.paths import URL, is_folder
from megatron.blending.formats.prepared.field_map import FieldMap, Missing
from megatron.blending.formats.prepared.nv_meta import SampleType
from megatron.blending.formats.prepared.webdataset import WebDataset, open_webdataset
from megatron.blending.formats.record import Record, RecordSource
from megatron.blending.formats.source_part import part_of
from megatron.blending.formats.sources import SOURCES, open_source
from megatron.blending.metadatasets.metadataset import Join, SourceEntry
from megatron.blending.streams.source import SourceDataset
from megatron.blending.streams.worker_config import WorkerConfig

_OUR_MODULES = ("megatron.energon", "megatron.blending")
_JSON_SUFFIXES = (".jsonl", ".ndjson", ".json")
_TOKENS_SUFFIX = ".bin"
_NUM_PROBED = 64
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
    """In place of the encoder's."""
    allow_code: bool = False
    """Whether Python files and classes that a dataset.yaml or a join names may be run."""


def open_entry(
    entry: SourceEntry | Join, reading: Reading, worker_config: WorkerConfig | None = None
) -> SourceDataset:
    """Return a source as a SourceDataset: one pass over its samples. ValueError starts with where
    it is named.
    """
    source, load = open_records(entry, reading)
    sources = [leg.entry for leg in entry.legs] if isinstance(entry, Join) else [entry]
    return SourceDataset(
        source,
        load=load,
        shuffle=reading.is_shuffled,
        multiplier=entry.shuffle_over_epochs_multiplier,
        slice_length=reading.slice_length,
        shuffle_window=reading.shuffle_window,
        name=" + ".join(f"{one.path} {one.split_part}{one.subset}" for one in sources),
        worker_config=worker_config,
    )


def open_records(entry: SourceEntry | Join, reading: Reading) -> tuple[RecordSource, Load]:
    """Return the records of a source, and what makes a sample of each; ValueError starts with where
    it is named.
    """
    try:
        return _open_join(entry, reading) if isinstance(entry, Join) else _open(entry, reading)
    except ValueError as error:
        fault = f"{error!s:.2000}"
        raise ValueError(
            fault if fault.startswith(entry.where) else f"{entry.where}: {fault}"
        ) from None


def _open(entry: SourceEntry, reading: Reading) -> tuple[RecordSource, Load]:
    decode = _decoder(reading)
    path = file_of(entry.path)
    if path is not None:
        return _open_file(entry, path, reading, decode)
    webdataset, subflavors = _open_webdataset(entry, reading)
    source = part_of(webdataset, entry.subset)
    if not webdataset.sample_type.is_crude:
        if entry.aux:
            raise ValueError(
                f"aux is for crude data, but the samples are of {webdataset.sample_type.name}; "
                "remove it"
            )
        return source, _typed_load(webdataset, source, subflavors, reading, decode)
    stores = {name: open_store(path, decode, entry.where) for name, path in entry.aux.items()}
    primary = WebdatasetFileStore(entry.path, decode)
    cook = choose_cook(reading.encoder.cookers, subflavors, stores, primary, entry.where)
    return source, CrudeLoad(
        path=entry.path, subflavors=subflavors, cook=cook, dataset=webdataset, decode=decode
    )


def _typed_load(
    dataset: WebDataset,
    source: RecordSource,
    subflavors: dict[str, Any],
    reading: Reading,
    decode: Decode,
) -> TypedLoad:
    """`source`: what is read of the data set."""
    load = TypedLoad(dataset, _sample_class(dataset, reading), subflavors, decode)
    if dataset.sample_type.field_map and local_path(dataset.path) is not None:
        _check_fields(dataset.sample_type, source, decode)
    return load


def _check_fields(kind: SampleType, source: RecordSource, decode: Decode) -> None:
    """ValueError if a field comes from a part, or a key in JSON, that none of 64 samples has,
    evenly spread over all.

    Most often it is the first that is read, and no other. Of remote data none is: each would cost
    several requests. What fewer samples have is refused too, as by default a run ends when a
    hundred in a row fail.
    """
    field_map = FieldMap(kind.field_map, f"{kind.where}: field_map")
    suspects: dict[str, list[Missing]] = {name: [] for name in kind.field_map}
    num_read = 0
    for index in dict.fromkeys(
        at * (len(source) - 1) // (_NUM_PROBED - 1) for at in range(_NUM_PROBED)
    ):
        try:
            missing = field_map.missing(source[index], decode)
        except Exception:
            # Whatever a user's decoder raises: what is wrong with a sample is said when it is used.
            continue
        num_read += 1
        suspects = {
            name: [*faults, missing[name]] for name, faults in suspects.items() if name in missing
        }
        if not suspects:
            return
    if num_read:
        name, faults = next(iter(suspects.items()))
        way_out = (
            ". If some others do, name an alternative behind a comma"
            if len(source) > _NUM_PROBED
            else ""
        )
        raise ValueError(
            f"{kind.where}: field_map: {name}: none of {num_read} samples that were read has "
            f"{_told(faults)}{way_out}"
        )


def _told(faults: Sequence[Missing]) -> str:
    """Say what is not there, and what may have been meant; of a key rather than of a part."""
    key = next((fault for fault in faults if fault.within), faults[0])
    there = dict.fromkeys(
        name for fault in faults if fault.within == key.within for name in fault.there
    )
    if not key.within:
        return f"a part {key.name!r}; {nearest(key.name, there, 'parts')}"
    if key.held and not there:
        return f"a key {key.name!r} in {key.within}: that is no object, but of type {key.held}"
    return f"a key {key.name!r} in {key.within}; {nearest(key.name, there, 'keys')}"


def file_of(path: str) -> str | None:
    """Return the file of records that a path or URL means, None if it means a prepared folder.

    Token sequences may be named by either of their files, or by what these have in common; of a URL
    without suffix, which else is a folder, this asks the storage.
    """
    stem, suffix = os.path.splitext(path)
    if suffix == ".idx" and is_file(stem + _TOKENS_SUFFIX):
        return stem + _TOKENS_SUFFIX
    if is_folder(path) and (URL not in path or files.is_folder(path)):
        return None
    if suffix not in SOURCES and is_file(path + _TOKENS_SUFFIX):
        return path + _TOKENS_SUFFIX
    return None if is_folder(path) else path


def _open_file(
    entry: SourceEntry, path: str, reading: Reading, decode: Decode
) -> tuple[RecordSource, Load]:
    whole = open_source(path)
    stores = {name: open_store(store, decode, entry.where) for name, store in entry.aux.items()}
    primary = SystemFileStore(os.path.dirname(path), decode)
    cook = choose_cook(reading.encoder.cookers, entry.subflavors, stores, primary, entry.where)
    first, is_json = entry.subset.of(len(whole)).start, path.endswith(_JSON_SUFFIXES)
    load = FileLoad(
        path=path, subflavors=dict(entry.subflavors), cook=cook, first=first, is_json=is_json
    )
    return part_of(whole, entry.subset), load


def _open_webdataset(entry: SourceEntry, reading: Reading) -> tuple[WebDataset, dict[str, Any]]:
    webdataset = open_webdataset(
        entry.path,
        split_part=entry.split_part,
        dataset_config=entry.dataset_config,
        split_config=entry.split_config,
        allow_code=reading.allow_code,
    )
    return webdataset, {**webdataset.subflavors, **entry.subflavors}


def _open_join(join: Join, reading: Reading) -> tuple[RecordSource, Load]:
    decode = _decoder(reading)
    sources: list[WebDataset] = []
    loads: list[Load] = []
    for leg in join.legs:
        if not is_folder(leg.entry.path):
            raise ValueError(
                f"{leg.entry.where}: a join is of prepared folders, but {leg.entry.path} is none"
            )
        webdataset, subflavors = _open_webdataset(leg.entry, reading)
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
    """Return the function of a joiner, or `from_joined` of its class."""
    kind = _imported(*join.joiner, reading.allow_code)
    return getattr(kind, "from_joined", kind)


def _decoder(reading: Reading) -> Decode:
    """Return what the encoder's `decoder` stands for: (name of a part, bytes) -> value."""
    decoder = reading.encoder.decoder if reading.decoder is UNSAID else reading.decoder
    if decoder is None:
        return keep_bytes
    if decoder is DECODE:
        return SampleDecoder(allow_code=True) if reading.allow_code else decode_part
    if not callable(decoder):
        name = type(reading.encoder).__name__
        raise ValueError(f"{name}.decoder must be a SampleDecoder or None, but is {decoder!r}")
    return decoder


def _sample_class(webdataset: WebDataset, reading: Reading) -> Any:
    """Return the class that dataset.yaml names: one of ours by its name alone, any other only if
    code is allowed.
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
        made = _imported(kind.module, kind.name, reading.allow_code)
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
    return made


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
