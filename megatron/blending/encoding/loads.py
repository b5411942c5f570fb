"""pure. A SourceDataset calls these to make a sample of a record. All may be pickled."""

import os
from collections.abc import Callable, Iterable
from typing import Any

from megatron.blending.encoding.fields import required_names
from megatron.blending.encoding.samples import SAMPLE_TYPES, CrudeSample
from megatron.blending.encoding.source_info import SourceInfo
from megatron.blending.formats.decode import Decode
from megatron.blending.formats.prepared.webdataset import WebDataset
from megatron.blending.formats.record import Record
from megatron.blending.streams.failures import failure_tolerance_of

_new: Any = object.__new__


class TypedLoad:
    """A record as the sample that dataset.yaml says."""

    def __init__(self, dataset: WebDataset, kind: type, subflavors: dict[str, Any], decode: Decode) -> None:
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
    """A record of a prepared folder as a CrudeSample of its parts, or as what the cooker makes of that."""

    def __init__(
        self,
        dataset: WebDataset,
        subflavors: dict[str, Any],
        path: str,
        decode: Decode,
        cook: Callable[[Any], Any] | None,
    ) -> None:
        self._dataset = dataset
        self._subflavors = subflavors
        self._path = path
        self._decode = decode
        self.cook = cook
        self.__failure_tolerance__ = failure_tolerance_of(cook)

    def __call__(self, record: Record, restore_key: tuple[Any, ...]) -> Any:
        sample = CrudeSample(self._dataset.fields(record, self._decode))
        sample["__restore_key__"] = restore_key
        sample["__subflavors__"] = self._subflavors
        sample["__sources__"] = (SourceInfo(self._path, restore_key[-1], sample["__shard__"]),)
        return sample if self.cook is None else self.cook(sample)


class FileLoad:
    """A record of a file as a CrudeSample: of its columns, or with the object of a line as "json"; or what the cooker
    makes of that. Its key is its number in the file, also where only a part of the file is read.
    """

    def __init__(
        self, path: str, first: int, is_json: bool, subflavors: dict[str, Any], cook: Callable[[Any], Any] | None
    ) -> None:
        self._path = path
        self._name = os.path.basename(path)
        self._first = first
        self._is_json = is_json
        self._subflavors = subflavors
        self.cook = cook
        self.__failure_tolerance__ = failure_tolerance_of(cook)

    def __call__(self, record: Record, restore_key: tuple[Any, ...]) -> Any:
        return self.many([record], [restore_key])[0]

    def many(self, records: Iterable[Record], restore_keys: Iterable[tuple[Any, ...]]) -> list[Any]:
        """Return the samples of many records: in one loop, as calls would cost a fifth more."""
        path, name, first, is_json = self._path, self._name, self._first, self._is_json
        subflavors, cook, samples = self._subflavors, self.cook, []
        for record, restore_key in zip(records, restore_keys):
            number = restore_key[-1]
            sample = CrudeSample()
            sample["__key__"] = str(first + number)
            sample["__shard__"] = name
            if is_json:
                sample["json"] = record
            else:
                sample.update(record)
            sample["__restore_key__"] = restore_key
            sample["__subflavors__"] = subflavors
            sample["__sources__"] = (SourceInfo(path, number, name),)
            samples.append(sample if cook is None else cook(sample))
        return samples
