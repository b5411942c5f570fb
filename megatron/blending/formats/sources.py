"""pure. Opens a file of records by its suffix.

.jsonl .ndjson    one JSON object per line                          JsonlSource
.json             a list of JSON objects, or one per line           JsonArraySource, JsonlSource
.parquet          rows of a table                                   ParquetSource
.csv .tsv         rows of a table; the first line has their names   DelimitedSource
.bin              token sequences of Megatron's tools, with .idx    IndexedSource
"""

import json
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import PurePosixPath

from megatron.blending.formats.delimited import DelimitedSource
from megatron.blending.formats.files import is_file, is_folder, local_path, open_file
from megatron.blending.formats.indexed import IndexedSource
from megatron.blending.formats.json_array import JsonArraySource
from megatron.blending.formats.jsonl import JsonlSource
from megatron.blending.formats.parquet import ParquetSource
from megatron.blending.formats.record import Record, RecordError, RecordSource

__all__ = ["SOURCES", "Record", "RecordError", "RecordSource", "open_source"]

_FIRST_BYTES = 1 << 22


def open_json(path: str) -> RecordSource:
    """Opens a JSON file: a list, or one object per line, as datasets and Spark write it."""
    file = open_file(path)
    head = file.read(0, min(file.size, _FIRST_BYTES))
    line, _, rest = head.decode("utf-8-sig", "replace").lstrip().partition("\n")
    if line.startswith("{") and rest.strip():
        with suppress(ValueError, RecursionError):
            json.loads(line)
            return JsonlSource(path)
    return JsonArraySource(path)


SOURCES: dict[str, Callable[[str], RecordSource]] = {
    ".jsonl": JsonlSource,
    ".ndjson": JsonlSource,
    ".json": open_json,
    ".parquet": ParquetSource,
    ".csv": DelimitedSource,
    ".tsv": DelimitedSource,
    ".bin": IndexedSource,
}
JSON_SUFFIXES = (".jsonl", ".ndjson", ".json")
"""Suffixes of files whose records are JSON values. Those of other files are rows of columns."""


def open_source(path: str | os.PathLike[str]) -> RecordSource:
    """Opens a local file or a URL. Raises ValueError if there is no such file, if its suffix is not
    known, or if it has no records.
    """
    location = os.fspath(path)
    if local_path(location) is not None and not is_file(location):
        fault = (
            "is a directory; name a file in it"
            if is_folder(location)
            else "no such file; check the path"
        )
        raise ValueError(f"{path}: {fault}")
    kind = SOURCES.get(PurePosixPath(location).suffix)
    if kind is None:
        raise ValueError(
            f"{path}: suffix must be one of {', '.join(SOURCES)}; convert or rename the file"
        )
    source = kind(location)
    if len(source) == 0:
        raise ValueError(f"{path}: has no records; leave it out of the data")
    return source
