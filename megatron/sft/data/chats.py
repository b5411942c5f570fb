"""pure. A source of megatron.blending as samples to train on: any of its formats becomes a record
that ChatEncoder reads.

    JSONL, JSON, Parquet             the object, or the row
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
from typing import Any

from megatron.blending.energon._encoding.loads import TypedLoad
from megatron.blending.energon._encoding.samples import TextSample
from megatron.blending.energon._encoding.source_entries import Reading, open_entry
from megatron.blending.formats.decode import decode_part
from megatron.blending.formats.record import Record
from megatron.blending.metadatasets.metadataset import Join, SourceEntry
from megatron.blending.streams.failures import SkipSample
from megatron.blending.streams.source import SourceDataset
from megatron.sft.data import layouts
from megatron.sft.data.chat_encoder import ChatEncoder, Dropped, EncodedSample, SampleError
from megatron.sft.data.messages import MAX_WEIGHT

SAMPLE_WEIGHT = "sample_weight"
_TEXT_PARTS = ("txt", "text", "json", "jsn")


def _decode_text(name: str, content: bytes) -> object:
    """Parts that are no text, such as images, stay bytes."""
    return decode_part(name, content) if name.rpartition(".")[2] in _TEXT_PARTS else content


class ChatTask:
    """Samples of a source -> sequences. Reads as a task encoder does, and counts tokens."""

    cookers = ()

    def __init__(self, encoder: ChatEncoder) -> None:
        self._encoder = encoder

    decoder = staticmethod(_decode_text)

    def uses(self, step: str) -> bool:
        return step == "encode_sample"

    def num_tokens(self, sample: EncodedSample) -> int:
        return len(sample.tokens)

    def encode_sample(self, sample: object) -> EncodedSample:
        """SkipSample with the reason for one that holds nothing to train on, SampleError for one
        that is broken.
        """
        weight = source_weight(subflavors_of(sample))
        made = self._encoder.encode(record_of(sample), weight)
        if isinstance(made, Dropped):
            raise SkipSample(made.reason)
        return made

    def read(self, sample: object) -> layouts.Reading:
        """Return what a sample says, before it is encoded."""
        return self._encoder.read(record_of(sample))

    def list_unread(self, opened: SourceDataset) -> None:
        """Log the keys of a source's first record that are not read: once, not in each process that
        reads.
        """
        if len(opened.source) and opened.load is not None:
            with suppress(Exception):  # a broken record is told where it is trained on
                self._encoder.list_unread(
                    record_of(opened.load(opened.source[0], (opened.name, 0, 0)))
                )


class ChatLoad:
    """Makes sequences of a source's records, where they are read."""

    def __init__(self, load: Callable[..., Any], task: ChatTask, source: int) -> None:
        """`load`: what makes samples of them; `source`: its number among those of the run."""
        self._load = load
        self._task = task
        self._source = source

    def __call__(self, record: Record, key: tuple[Any, ...]) -> tuple[int, EncodedSample]:
        """Return the number of the source and the sequence."""
        return self._source, self._task.encode_sample(self._load(record, key))

    def read(self, record: Record, key: tuple[Any, ...]) -> layouts.Reading:
        """Return what the record says, before it is encoded."""
        return self._task.read(self._load(record, key))


def open_chats(entry: SourceEntry | Join, task: ChatTask) -> SourceDataset:
    """Open a source; ValueError, starting with where it is named, if its samples cannot be text."""
    source_weight(entry.subflavors, f"{entry.where}: subflavors: ")
    opened: SourceDataset = open_entry(entry, Reading(encoder=task))
    kind = opened.load.kind if isinstance(opened.load, TypedLoad) else None
    if kind is not None and not issubclass(kind, TextSample):
        raise ValueError(
            f"{entry.where}: has samples of {kind.__name__}, but must have text: prepare it as "
            "TextSample, or as CrudeWebdataset with parts txt or json"
        )
    return opened


def record_of(sample: Any) -> dict[str, Any]:
    """What ChatEncoder reads, of a TextSample or of a crude sample's parts."""
    if isinstance(sample, TextSample):
        return {"text": sample.text}
    record = {name: value for name, value in sample.items() if not name.startswith("__")}
    if "txt" in record:
        record["text"] = record.pop("txt")
    inner = record.pop("json", None)
    if isinstance(inner, Mapping):
        return {**record, **inner}
    if isinstance(inner, list):
        record["messages"] = inner
    return record


def subflavors_of(sample: Any) -> Mapping[str, Any]:
    """What the metadataset and dataset.yaml say of the sample's source."""
    found = sample.get("__subflavors__") if isinstance(sample, Mapping) else sample.__subflavors__
    return found or {}


def source_weight(subflavors: Mapping[str, Any], where: str = "") -> float:
    """The weight that all samples of a source have in the loss."""
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
