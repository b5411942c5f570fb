"""pure. Opens the records of a source entry: a file of records or a prepared folder, whole or in
part.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from megatron.blending.formats import files
from megatron.blending.formats.files import is_file
from megatron.blending.formats.json_forms import TableForms
from megatron.blending.formats.parquet import ParquetSource
from megatron.blending.formats.paths import URL, is_folder
from megatron.blending.formats.prepared.webdataset import WebDataset, open_webdataset
from megatron.blending.formats.record import RecordSource
from megatron.blending.formats.source_part import SourcePart
from megatron.blending.formats.sources import SOURCES, open_source
from megatron.blending.metadatasets.tree import EVERYTHING, Join, SourceEntry, Subset

_TOKENS_SUFFIX = ".bin"


class OpenRecords(NamedTuple):
    """The records of a source entry."""

    source: RecordSource
    """All records, or the subset that the entry asks for."""
    path: str
    """Path of the file, or of the prepared folder."""
    subflavors: dict[str, Any]
    """Subflavors of the folder's dataset.yaml, changed by those of the metadataset."""
    folder: WebDataset | None = None
    """The whole prepared folder, which decodes its records; None for a file."""
    first: int = 0
    """Number in the file of the first record of `source`."""
    forms: TableForms | None = None
    """JSON forms of the columns of a table with types; None for other files and folders."""


def open_records(entry: SourceEntry, *, allow_code: bool = False) -> OpenRecords:
    """Opens the records of an entry. Raises ValueError, which starts with the place of the entry.

    allow_code: True to run Python files that a dataset.yaml names. If False, such a folder is
    refused.
    """
    with named_by(entry):
        path = file_of(entry.path)
        if path is not None:
            whole = open_source(path)
            return OpenRecords(
                part_of(whole, entry.subset),
                path,
                dict(entry.subflavors),
                first=entry.subset.of(len(whole)).start,
                forms=whole.forms if isinstance(whole, ParquetSource) else None,
            )
        folder, subflavors = open_folder(entry, allow_code)
        return OpenRecords(part_of(folder, entry.subset), entry.path, subflavors, folder)


def open_folder(entry: SourceEntry, allow_code: bool) -> tuple[WebDataset, dict[str, Any]]:
    """Opens the whole prepared folder of an entry, and returns it with the subflavors."""
    folder = open_webdataset(
        entry.path,
        split_part=entry.split_part,
        dataset_config=entry.dataset_config,
        split_config=entry.split_config,
        allow_code=allow_code,
    )
    return folder, {**folder.subflavors, **entry.subflavors}


@contextmanager
def named_by(entry: SourceEntry | Join) -> Iterator[None]:
    """Context in which each ValueError gets the place of the entry as its beginning."""
    try:
        yield
    except ValueError as error:
        fault = f"{error!s:.2000}"
        raise ValueError(
            fault if fault.startswith(entry.where) else f"{entry.where}: {fault}"
        ) from None


def name_of(entry: SourceEntry | Join) -> str:
    """Returns the name of a source in states and errors."""
    sources = [leg.entry for leg in entry.legs] if isinstance(entry, Join) else [entry]
    return " + ".join(f"{one.path} {one.split_part}{one.subset}" for one in sources)


def file_of(path: str) -> str | None:
    """Returns the file of records that a path or URL names; None if it names a prepared folder.

    Token sequences may be named by one of their two files, or without a suffix.
    """
    # By suffix first: for a URL each look into the storage is a request.
    stem, suffix = os.path.splitext(path)
    if suffix == ".idx" and is_file(stem + _TOKENS_SUFFIX):
        return stem + _TOKENS_SUFFIX
    if is_folder(path) and (URL not in path or files.is_folder(path)):
        return None
    if suffix not in SOURCES and is_file(path + _TOKENS_SUFFIX):
        return path + _TOKENS_SUFFIX
    return None if is_folder(path) else path


def part_of(source: RecordSource, subset: Subset) -> RecordSource:
    """Returns the subset of a source; raises ValueError if it is empty, or beyond the source."""
    if subset == EVERYTHING:
        return source
    records = subset.of(len(source))
    if not records:
        raise ValueError(f"its subset leaves none of its {len(source)} samples; make it larger")
    return SourcePart(source, records)
