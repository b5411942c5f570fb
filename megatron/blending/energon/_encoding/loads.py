"""pure. Loads: functions from a record to a sample, which a SourceDataset calls. All can be
pickled.
"""

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from dataclasses import fields as dataclass_fields
from typing import Any

from megatron.blending.energon._encoding.fields import required_names
from megatron.blending.energon._encoding.samples import SAMPLE_TYPES, CrudeSample
from megatron.blending.energon._encoding.source_info import SourceInfo
from megatron.blending.formats.decode import Decode
from megatron.blending.formats.prepared.webdataset import WebDataset
from megatron.blending.formats.record import Record
from megatron.blending.streams.failures import failure_tolerance_of
from megatron.blending.streams.seeding import mark_of

_new: Any = object.__new__


class TypedLoad:
    """Function from a record to a sample of the class that dataset.yaml names."""

    def __init__(
        self, dataset: WebDataset, kind: type, subflavors: dict[str, Any], decode: Decode
    ) -> None:
        self._dataset = dataset
        self.kind = kind
        is_ours = kind in SAMPLE_TYPES.values()
        self._is_plain = is_ours and required_names(kind) <= {
            "__key__",
            *dataset.sample_type.field_map,
        }
        self._defaults = (
            {one.name: one.default for one in dataclass_fields(kind)} if self._is_plain else {}
        )
        self._is_loaded = dataset.sample_type.sample_loader is not None
        self._subflavors = subflavors
        self._decode = decode

    def __call__(self, record: Record, restore_key: tuple[Any, ...]) -> object:
        if self._is_loaded:
            record = {**record, "__restore_key__": restore_key, "__subflavors__": self._subflavors}
        fields = self._dataset.fields(record, self._decode)
        fields["__restore_key__"] = restore_key
        fields["__subflavors__"] = self._subflavors
        fields["__sources__"] = (
            SourceInfo(self._dataset.path, restore_key[-1], record["__shard__"]),
        )
        if not self._is_plain:
            return self.kind(**fields)
        # Does the same as the class's own `__init__`, in a third of its time.
        sample = _new(self.kind)
        sample.__dict__ = {**self._defaults, **fields}
        return sample


@dataclass(frozen=True, kw_only=True)
class _CrudeBase:
    """Base of loads that make a CrudeSample, and pass it through the cooker if there is one."""

    path: str
    subflavors: dict[str, Any]
    cook: Callable[[Any], Any] | None

    @property
    def __failure_tolerance__(self) -> int | None:
        return failure_tolerance_of(self.cook)

    @property
    def __restore_seeds__(self) -> bool:
        return bool(mark_of(self.cook, "__restore_seeds__"))


@dataclass(frozen=True, kw_only=True)
class CrudeLoad(_CrudeBase):
    """Load for a prepared folder: the crude sample has the parts of the record."""

    dataset: WebDataset
    decode: Decode

    def __call__(self, record: Record, restore_key: tuple[Any, ...]) -> object:
        sample = CrudeSample(self.dataset.fields(record, self.decode))
        sample["__restore_key__"] = restore_key
        sample["__subflavors__"] = self.subflavors
        sample["__sources__"] = (SourceInfo(self.path, restore_key[-1], sample["__shard__"]),)
        return sample if self.cook is None else self.cook(sample)


@dataclass(frozen=True, kw_only=True)
class FileLoad(_CrudeBase):
    """Load for a file: the crude sample has the columns of the record, or a JSON object as "json".
    Its key is the number of the record in the file.
    """

    first: int
    is_json: bool

    def __call__(self, record: Record, restore_key: tuple[Any, ...]) -> object:
        (sample,) = self.many([record], [restore_key])
        if isinstance(sample, Exception):
            raise sample
        return sample

    def many(self, records: Iterable[Record], restore_keys: Iterable[tuple[Any, ...]]) -> list[Any]:
        """Returns the samples of many records; if the cooker raises, the place of the sample has
        the exception. It is one loop: a call per record would take a fifth longer.
        """
        path, first, is_json = self.path, self.first, self.is_json
        name, subflavors, cook, samples = os.path.basename(path), self.subflavors, self.cook, []
        for record, restore_key in zip(records, restore_keys):
            number = restore_key[-1]
            sample = CrudeSample()
            # The number in the whole file: record 2 of a subset from 100 on has the key "102".
            sample["__key__"] = str(first + number)
            sample["__shard__"] = name
            if is_json:
                sample["json"] = record
            else:
                sample.update(record)
            sample["__restore_key__"] = restore_key
            sample["__subflavors__"] = subflavors
            sample["__sources__"] = (SourceInfo(path, number, name),)
            try:
                samples.append(sample if cook is None else cook(sample))
            except Exception as error:
                samples.append(error)
        return samples
