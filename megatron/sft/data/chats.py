"""pure. Opens a source of records as a source of samples to train on.

Each file format becomes a record as ChatEncoder reads it:

    JSONL, JSON, Parquet, CSV        the object, or the row
    WebDataset, TextSample           {"text": ...}
    WebDataset, crude                its parts: `txt` becomes the text, the keys of `json` (an
                                     object, or a list of messages) are added to it
    .bin/.idx                        {"tokens": ...}, all of them trained

The subflavor `sample_weight` of a source, in a metadataset or a dataset.yaml, scales the loss of
all its samples. `weight` in a record scales the loss of that record.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from megatron.blending.formats.decode import decode_text
from megatron.blending.formats.files import local_path
from megatron.blending.formats.json_forms import JsonObject
from megatron.blending.formats.prepared.field_check import check_field_map
from megatron.blending.formats.prepared.nv_meta import SampleType
from megatron.blending.formats.prepared.webdataset import WebDataset
from megatron.blending.formats.record import Record, RecordSource
from megatron.blending.formats.sources import JSON_SUFFIXES
from megatron.blending.loading.time_limit import TIME_LIMIT
from megatron.blending.metadatasets.records import OpenRecords, name_of, named_by, open_records
from megatron.blending.metadatasets.tree import Join, SourceEntry
from megatron.blending.streams.failures import SkipSample
from megatron.blending.streams.source import SourceDataset
from megatron.packing.quoting import shown
from megatron.sft.data.chat_encoder import ChatEncoder, Dropped, EncodedSample, SampleError
from megatron.sft.data.records import formats as record_formats
from megatron.sft.data.records.table_columns import check_columns
from megatron.sft.data.records.values import MAX_WEIGHT

SAMPLE_WEIGHT = "sample_weight"
_TEXT_SAMPLE = "TextSample"


@dataclass(frozen=True, kw_only=True)
class ChatLoad:
    """Function from a record of one source to its sample. Loader workers call it."""

    encoder: ChatEncoder
    content: Callable[[Any], Mapping[str, Any]]
    """Function from a record as the file has it to one that ChatEncoder reads."""
    weight: float
    """Weight of the source in the loss."""
    source: int = 0
    """Number of the source in its split."""
    path: str = ""
    """File or folder of the source, for errors."""

    def __call__(self, record: Record, key: tuple[str, int, int]) -> tuple[int, EncodedSample]:
        """Returns the number of the source and the sample.

        Raises SkipSample, with the reason, for a record without a token to train on, and
        SampleError for a broken one.
        """
        place = f"{self.path} record {key[2]}"
        TIME_LIMIT.subject = place
        made = self.encoder.encode(self.content(record), self.weight)
        if isinstance(made, Dropped):
            raise SkipSample(made.reason)
        return self.source, made.named(place)

    def read(self, record: Record) -> record_formats.Reading:
        """Returns the content of a record, before it is encoded."""
        return self.encoder.read(self.content(record))

    def numbered(self, source: int) -> ChatLoad:
        """Returns a copy whose samples carry the number `source`."""
        return replace(self, source=source)

    def list_unread(self, source: RecordSource) -> None:
        """Logs the keys of the first record that are not read. Done here, before workers are
        forked, the line appears once and not once per worker.
        """
        with suppress(Exception):  # a broken record is reported when training comes to it
            self.encoder.list_unread(self.content(source[0]))


def num_tokens(source: SourceDataset, record: Record, number: int) -> int:
    """Returns the number of tokens of a record's sample; raises as `ChatLoad` does."""
    assert isinstance(source.load, ChatLoad)
    return len(source.load(record, (source.name, 0, number))[1].tokens)


def open_chats(entry: SourceEntry | Join, encoder: ChatEncoder) -> SourceDataset:
    """Opens a source whose records become samples. Raises ValueError, which begins with the place
    of the entry, if its records cannot be text.
    """
    source_weight(entry.subflavors, f"{entry.where}: subflavors: ")
    opened = open_unjoined(entry)
    with named_by(entry):
        content = _content_of(opened)
        if opened.forms is not None:
            encoder.note(*check_columns(opened.forms, encoder.columns))
    if encoder.images is not None:
        images = encoder.images.within(os.path.dirname(opened.path))
        encoder = replace(encoder, images=images)
    load = ChatLoad(
        encoder=encoder,
        content=content,
        weight=source_weight(opened.subflavors),
        path=opened.path,
    )
    load.list_unread(opened.source)
    multiplier = entry.shuffle_over_epochs_multiplier
    return SourceDataset(opened.source, load=load, multiplier=multiplier, name=name_of(entry))


def open_unjoined(entry: SourceEntry | Join) -> OpenRecords:
    """Returns the records of a source. Raises ValueError for a join: its samples are made by the
    user's Python code, which the trainer does not import.
    """
    if isinstance(entry, Join):
        raise ValueError(
            f"{entry.where}: a join makes samples by Python code, {'.'.join(entry.joiner)}, which "
            "is not imported here; write the joined samples into files of their own"
        )
    return open_records(entry)


def _content_of(opened: OpenRecords) -> Callable[[Any], Mapping[str, Any]]:
    """Returns the function from a record of this source to one that ChatEncoder reads."""
    folder = opened.folder
    if folder is None:
        if opened.forms is not None:
            return of_row
        return of_json if opened.path.endswith(JSON_SUFFIXES) else of_parts
    if folder.sample_type.is_crude:
        return partial(_of_crude, folder)
    _check_text(folder.sample_type)
    if local_path(folder.path) is not None:
        check_field_map(folder.sample_type, opened.source, decode_text)
    return partial(_of_text_sample, folder)


def _check_text(kind: SampleType) -> None:
    if kind.name != _TEXT_SAMPLE:
        raise ValueError(
            f"has samples of {kind.name}, but must have text: prepare it as {_TEXT_SAMPLE}, or as "
            "CrudeWebdataset with parts txt or json"
        )
    if kind.field_map.keys() != {"text"}:
        raise ValueError(
            f"{kind.where}: field_map: {_TEXT_SAMPLE} has one field, text, but "
            f"{', '.join(kind.field_map)} stand there"
        )


def _of_text_sample(folder: WebDataset, record: Record) -> dict[str, Any]:
    return {"text": folder.fields(record, decode_text)["text"]}


def _of_crude(folder: WebDataset, record: Record) -> dict[str, Any]:
    return of_parts(folder.fields(record, decode_text))


def of_json(value: Any) -> Mapping[str, Any]:
    """Returns the record of a JSON value, which is an object or a list of messages. Any other value
    makes an empty record, which ChatEncoder refuses with the list of formats.
    """
    if isinstance(value, list):
        return {"messages": value}
    return value if isinstance(value, Mapping) else {}


def of_row(row: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the record of a table's row, whose structs lose their keys that are null: Arrow gives
    each struct of a column the keys of all. Maps and objects of JSON text keep theirs.

    `{"tools": [{"x": 1, "y": None}]} -> {"tools": [{"x": 1}]}`
    """
    return of_parts({name: _without_nulls(value) for name, value in row.items()})


def _without_nulls(value: Any) -> Any:
    if isinstance(value, JsonObject):
        return JsonObject((key, _without_nulls(part)) for key, part in value.items())
    if isinstance(value, dict):
        return {key: _without_nulls(part) for key, part in value.items() if part is not None}
    return [_without_nulls(part) for part in value] if isinstance(value, list) else value


def of_parts(parts: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the record of the parts of a WebDataset sample, or of columns with names like theirs.

    `{"__key__": "0", "txt": "t", "json": {"weight": 2}} -> {"text": "t", "weight": 2}`
    """
    # Names with two underscores (__key__) are bookkeeping of the folder, not content.
    record = {name: value for name, value in parts.items() if not name.startswith("__")}
    if "txt" in record:
        record["text"] = record.pop("txt")
    inner = of_json(record.pop("json", None))
    return {**record, **inner}


def source_weight(subflavors: Mapping[str, Any], where: str = "") -> float:
    """Returns the weight of all samples of a source in the loss: `sample_weight`, or 1."""
    weight = subflavors.get(SAMPLE_WEIGHT, 1.0)
    if (
        isinstance(weight, bool)
        or not isinstance(weight, int | float)
        or not 0 < weight <= MAX_WEIGHT
    ):
        raise SampleError(
            f"{where}{SAMPLE_WEIGHT} must be a number above 0, up to {MAX_WEIGHT}, but is "
            f"{shown(weight)}"
        )
    return float(weight)
