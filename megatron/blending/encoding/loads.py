"""pure. From a record, as its source reads it, to a sample: what a LeafDataset calls. All may be pickled."""

from collections.abc import Callable
from typing import Any

from megatron.blending.encoding.fields import required_names
from megatron.blending.encoding.samples import SAMPLE_TYPES, CrudeSample, SourceInfo
from megatron.blending.formats.record import Record
from megatron.blending.formats.webdataset import WebDataset

_new: Any = object.__new__


class TypedLoad:
    """A record as the sample that dataset.yaml says."""

    def __init__(self, dataset: WebDataset, kind: Any, subflavors: dict[str, Any], decode: Any) -> None:
        self._dataset = dataset
        self.kind = kind
        is_ours = kind in SAMPLE_TYPES.values()
        self._is_plain = is_ours and required_names(kind) <= {"__key__", *dataset.sample_type.field_map}
        self._is_loaded = dataset.sample_type.sample_loader is not None
        self._subflavors = subflavors
        self._decode = decode

    def __call__(self, record: Record, restore_key: tuple[Any, ...]) -> Any:
        if self._is_loaded:
            record = {**record, "__restore_key__": restore_key, "__subflavors__": self._subflavors}
        fields = self._dataset.fields(record, self._decode)
        fields["__restore_key__"] = restore_key
        fields["__subflavors__"] = self._subflavors
        fields["__sources__"] = (SourceInfo(self._dataset.path, restore_key[-1], record["__shard__"]),)
        if not self._is_plain:
            return self.kind(**fields)
        # What the class's own `__init__` does, in a third of its time: the other fields have defaults in the class.
        sample = _new(self.kind)
        sample.__dict__ = fields
        return sample


class CrudeLoad:
    """A record as a CrudeSample, or as what the cooker makes of that."""

    def __init__(self, fields: Any, subflavors: dict[str, Any], path: str, cook: Callable[[Any], Any] | None) -> None:
        self._fields = fields
        self._path = path
        self._subflavors = subflavors
        self._cook = cook
        self.__failure_tolerance__ = getattr(cook, "__failure_tolerance__", None)

    def __call__(self, record: Record, restore_key: tuple[Any, ...]) -> Any:
        sample = CrudeSample(self._fields(record, restore_key))
        sample["__restore_key__"] = restore_key
        sample["__subflavors__"] = self._subflavors
        sample["__sources__"] = (SourceInfo(self._path, restore_key[-1], sample["__shard__"]),)
        return sample if self._cook is None else self._cook(sample)


class WebdatasetFields:
    def __init__(self, dataset: WebDataset, decode: Any) -> None:
        self._dataset = dataset
        self._decode = decode

    def __call__(self, record: Record, restore_key: tuple[Any, ...]) -> dict[str, Any]:
        return self._dataset.fields(record, self._decode)


class FileFields:
    """A record of a file: its key is its number there, also where only a part of the file is read."""

    def __init__(self, name: str, first: int, is_json: bool) -> None:
        self._name = name
        self._first = first
        self._is_json = is_json

    def __call__(self, record: Record, restore_key: tuple[Any, ...]) -> dict[str, Any]:
        key = str(self._first + restore_key[-1])
        if self._is_json:
            return {"__key__": key, "__shard__": self._name, "json": record}
        return {"__key__": key, "__shard__": self._name, **record}
