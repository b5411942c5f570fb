"""pure. A source of records as samples to train on: any of its formats becomes a record that
ChatEncoder reads.

    JSONL, JSON, Parquet, CSV        the object, or the row
    WebDataset, TextSample           {"text": ...}
    WebDataset, crude                its parts: txt is the text, json (an object, or a list of
                                     messages) the rest
    .bin/.idx                        {"tokens": ...}, trained on as they are

The subflavor `sample_weight` of a source, in a metadataset or a dataset.yaml, scales the loss of
all its samples, as `weight` in a record scales that record's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from megatron.blending.formats.decode import decode_text
from megatron.blending.formats.files import local_path
from megatron.blending.formats.prepared.field_check import check_field_map
from megatron.blending.formats.prepared.nv_meta import SampleType
from megatron.blending.formats.prepared.webdataset import WebDataset
from megatron.blending.formats.record import Record, RecordSource
from megatron.blending.formats.sources import JSON_SUFFIXES
from megatron.blending.metadatasets.metadataset import Join, SourceEntry
from megatron.blending.metadatasets.records import OpenRecords, name_of, named_by, open_records
from megatron.blending.streams.failures import SkipSample
from megatron.blending.streams.source import SourceDataset
from megatron.sft.data.chat_encoder import ChatEncoder, Dropped, EncodedSample, SampleError
from megatron.sft.data.records import formats as record_formats
from megatron.sft.data.records.messages import MAX_WEIGHT

SAMPLE_WEIGHT = "sample_weight"
_TEXT_SAMPLE = "TextSample"


@dataclass(frozen=True, kw_only=True)
class ChatLoad:
    """Makes sequences of a source's records, where they are read."""

    encoder: ChatEncoder
    content: Callable[[Any], Mapping[str, Any]]
    """A record of the source -> what ChatEncoder reads."""
    weight: float
    """Weight of the source in the loss."""
    source: int = 0
    """Its number among those of the run."""

    def __call__(self, record: Record, key: object) -> tuple[int, EncodedSample]:
        """Returns the number of the source and the sequence.

        SkipSample with the reason for a record that holds nothing to train on, SampleError for one
        that is broken.
        """
        made = self.encoder.encode(self.content(record), self.weight)
        if isinstance(made, Dropped):
            raise SkipSample(made.reason)
        return self.source, made

    def read(self, record: Record) -> record_formats.Reading:
        """Returns what a record says, before it is encoded."""
        return self.encoder.read(self.content(record))

    def numbered(self, source: int) -> ChatLoad:
        """Returns the same for the source of that number."""
        return replace(self, source=source)

    def list_unread(self, source: RecordSource) -> None:
        """Logs the keys of a source's first record that are not read: once, not in each process
        that reads.
        """
        with suppress(Exception):  # a broken record is reported where it is trained on
            self.encoder.list_unread(self.content(source[0]))


def num_tokens(source: SourceDataset, record: Record, number: int) -> int:
    """Returns the length of the sequence that a record of a source of chats makes; raises as
    `ChatLoad` does.
    """
    assert isinstance(source.load, ChatLoad)
    return len(source.load(record, number)[1].tokens)


def open_chats(entry: SourceEntry | Join, encoder: ChatEncoder) -> SourceDataset:
    """Returns a source as sequences; ValueError, starting with where it is named, if its records
    cannot be text.
    """
    source_weight(entry.subflavors, f"{entry.where}: subflavors: ")
    opened = open_unjoined(entry)
    with named_by(entry):
        content = _content_of(opened)
    load = ChatLoad(encoder=encoder, content=content, weight=source_weight(opened.subflavors))
    load.list_unread(opened.source)
    multiplier = entry.shuffle_over_epochs_multiplier
    return SourceDataset(opened.source, load=load, multiplier=multiplier, name=name_of(entry))


def open_unjoined(entry: SourceEntry | Join) -> OpenRecords:
    """Returns the records of a source; ValueError for a join, whose samples only code can make."""
    if isinstance(entry, Join):
        raise ValueError(
            f"{entry.where}: a join makes samples by Python code, {'.'.join(entry.joiner)}, which "
            "is not imported here; write the joined samples into files of their own"
        )
    return open_records(entry)


def _content_of(opened: OpenRecords) -> Callable[[Any], Mapping[str, Any]]:
    """Returns the function from a record of this source to what ChatEncoder reads."""
    folder = opened.folder
    if folder is None:
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
    """Returns what ChatEncoder reads of a JSON value: an object, or a list of messages."""
    if isinstance(value, list):
        return {"messages": value}
    return value if isinstance(value, Mapping) else {}


def of_parts(parts: Mapping[str, Any]) -> dict[str, Any]:
    """Returns what ChatEncoder reads of a row, or of a sample's parts.

    `{"__key__": "0", "txt": "t", "json": {"weight": 2}} -> {"text": "t", "weight": 2}`
    """
    # Names such as __key__ are the folder's bookkeeping, not content.
    record = {name: value for name, value in parts.items() if not name.startswith("__")}
    if "txt" in record:
        record["text"] = record.pop("txt")
    inner = of_json(record.pop("json", None))
    return {**record, **inner}


def source_weight(subflavors: Mapping[str, Any], where: str = "") -> float:
    """Returns the weight that all samples of a source have in the loss."""
    weight = subflavors.get(SAMPLE_WEIGHT, 1.0)
    if (
        isinstance(weight, bool)
        or not isinstance(weight, int | float)
        or not 0 < weight <= MAX_WEIGHT
    ):
        raise SampleError(
            f"{where}{SAMPLE_WEIGHT} must be a number above 0, up to {MAX_WEIGHT}, but is "
            f"{weight!r:.60}"
        )
    return float(weight)
