"""pure. Reads the samples of a prepared folder by index, and finds them by key.

Opening reads `.nv-meta` only. The numbers of samples per shard there give the shard of each index:
with shards of 3 and 5 samples, index 4 is sample 1 of the second. A shard is mapped when one of its
samples is first read, and its `.tar.idx` gives the offset of the sample. The tar headers in front
of the sample's parts have their names and sizes. So no memory grows with the number of samples.

Invariant: records are the same with and without index files, local and remote.
"""

import hashlib
import itertools
import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from megatron.blending.arguments import shown
from megatron.blending.formats.decode import Decode
from megatron.blending.formats.files import (
    LocalFile,
    join_location,
    local_path,
    read_ranges,
)
from megatron.blending.formats.prepared.field_map import FieldMap
from megatron.blending.formats.prepared.nv_meta import (
    FOLDER,
    SampleType,
    SplitPart,
    read_dataset_config,
    read_info,
    read_split_part,
)
from megatron.blending.formats.prepared.sample_index import SampleIndex
from megatron.blending.formats.prepared.shard import Shard, open_local_shard, open_remote_shard
from megatron.blending.formats.prepared.tar import BLOCK, TarError, header_key, parse_sample
from megatron.blending.formats.prepared.user_code import load_function
from megatron.blending.formats.record import (
    Record,
    RecordError,
    RecordSource,
    check_index,
    fingerprint_file,
)

_FINGERPRINT_SHARDS = 8
_META = ("__key__", "__shard__")
_FINGERPRINT_PROBES = 8


def open_webdataset(
    path: str,
    *,
    split_part: str,
    dataset_config: str = "dataset.yaml",
    split_config: str = "split.yaml",
    allow_code: bool = False,
) -> "WebDataset":
    """Opens one part of a prepared folder, local or a URL. Raises ValueError, naming file and key,
    if that is not possible.

    It takes milliseconds, as no shard is opened.

    allow_code: True to run Python files that dataset.yaml names. If False, such a folder is
    refused.
    """
    path = path.rstrip("/") or path
    sample_type, subflavors = read_dataset_config(path, dataset_config)
    part = read_split_part(path, split_part, sample_type.split_config or split_config)
    return WebDataset(path, part, sample_type, subflavors, allow_code=allow_code)


class WebDataset(RecordSource):
    """One part of a prepared folder. A record is {"__key__": str, "__shard__": str, part name:
    bytes, ...}.

    Excluded samples have no index. In large reads a sample takes 1 to 2 microseconds per part in
    addition to the copy of its bytes.
    """

    def __init__(
        self,
        path: str,
        part: SplitPart,
        sample_type: SampleType,
        subflavors: Mapping[str, Any],
        *,
        allow_code: bool = False,
    ) -> None:
        self.path = path
        self.sample_type = sample_type
        self.subflavors = dict(subflavors)
        self._shards = part.shards
        self._allow_code = allow_code
        self._is_local = local_path(path) is not None
        self._prefix = join_location(path, "")
        self._ends = np.cumsum([count for _, count in part.shards], dtype=np.int64)
        # A part of the cache's key: an object that opens the folder later must not get the maps of
        # this one, as files may have changed.
        self._opened_at = time.time_ns()
        self._starts = np.append(0, self._ends[:-1])
        self._skipped = self._find_skipped(part.excluded)
        # Samples 2 and 5 skipped -> 2 and 4 kept samples before them. Index i is sample i plus the
        # number of entries up to i: indices 0 1 2 3 4 are the samples 0 1 3 4 6.
        self._kept_before_skipped = self._skipped - np.arange(self._skipped.size)
        self._samples_of_file: list[range] | None = None
        self._index = SampleIndex(path)
        self._prepare_parts()
        if len(self) == 0:
            raise ValueError(
                f"{path}: split {shown(part.name)} has no samples; name another, or leave it out"
            )

    def __len__(self) -> int:
        return (int(self._ends[-1]) if len(self._ends) else 0) - len(self._skipped)

    def read(self, indices: Sequence[int]) -> list[Record | RecordError]:
        places = self._places(indices)
        pieces = (
            [self._mapped(*place) for place in places] if self._is_local else self._fetched(places)
        )
        records: list[Record | RecordError] = []
        for (number, sample), (content, start, end) in zip(places, pieces):
            record = {"__key__": "", "__shard__": self._shards[number][0]}
            try:
                record["__key__"] = parse_sample(content, start, end, record)
            except TarError as error:
                where = self._describe(number, sample)
                records.append(
                    RecordError(
                        f"{where}: {error}; write the shard again, and prepare the data set"
                    )
                )
                continue
            records.append(record if self._is_read is None else self._filtered(record))
        return records

    def _mapped(self, number: int, sample: int) -> "Piece":
        """Returns the mapped memory of a shard, and the start and end of a sample in it."""
        name, count = self._shards[number]
        file, content, offsets = open_local_shard(self._prefix, name, count, self._opened_at)
        assert isinstance(file, LocalFile)
        file.check()
        return content, offsets[sample], offsets[sample + 1]

    def _fetched(self, places: Sequence[tuple[int, int]]) -> "list[Piece]":
        shards = [self._shard(number) for number, _ in places]
        offsets = [
            (shard.offsets[sample], shard.offsets[sample + 1])
            for shard, (_, sample) in zip(shards, places)
        ]
        raws = read_ranges(
            [(shard.file, start, end) for shard, (start, end) in zip(shards, offsets)]
        )
        return [(raw, 0, len(raw)) for raw in raws]

    def _filtered(self, record: Record) -> Record:
        assert self._is_read is not None
        return {
            name: value for name, value in record.items() if name in _META or self._is_read(name)
        }

    def fields(self, record: Record, decode: Decode) -> dict[str, Any]:
        """Returns the fields of a record's sample by dataset.yaml. Parts that no field needs are
        not decoded. For a crude data set the fields are all parts, decoded.

        Raises ValueError if a field is missing.
        """
        if self._field_map is not None:
            fields = self._field_map(record, decode)
            fields["__key__"] = record["__key__"]
            return fields
        decoded = {
            name: decode(name, content) if isinstance(content, bytes) else content
            for name, content in record.items()
        }
        if self._sample_loader is not None:
            return {"__key__": record["__key__"], **self._sample_loader(decoded)}
        return decoded

    def num_bytes(self, records: range) -> int | None:
        """Returns the bytes of consecutive records in their archives, headers included; None for a
        remote folder.

        Each shard in between is opened, in about 30 microseconds.
        """
        if not self._is_local or not records:
            return None if not self._is_local else 0
        (first, start), (last, end) = self._places([records.start, records.stop - 1])
        total = 0
        for number in range(first, last + 1):
            offsets = self._shard(number).offsets
            # Samples a to b of a shard are the bytes from offsets[a] to offsets[b + 1].
            until = end + 1 if number == last else len(offsets) - 1
            total += int(offsets[until]) - int(offsets[start if number == first else 0])
        return total

    def find(self, keys: Iterable[str]) -> dict[str, int]:
        """Returns the index of each key, by `index.sqlite`. Keys that are not in this part are left
        out. Raises ValueError if there is no `index.sqlite`.
        """
        if self._samples_of_file is None:
            ranges = {
                shard: range(int(end) - count, int(end))
                for (shard, count), end in zip(self._shards, self._ends)
            }
            self._samples_of_file = [ranges.get(shard, range(0)) for shard in read_info(self.path)]
        found = {}
        for key, (file_id, sample) in self._index.find(keys).items():
            samples = (
                self._samples_of_file[file_id]
                if 0 <= file_id < len(self._samples_of_file)
                else range(0)
            )
            if 0 <= sample < len(samples) and (at := samples[sample]) not in self._skipped:
                # The reverse of `_places`: subtract the skipped samples before it.
                found[key] = at - int(np.searchsorted(self._skipped, at))
        return found

    def describe(self, index: int) -> str:
        return self._describe(*self._places([index])[0])

    def _describe(self, number: int, sample: int) -> str:
        return f"{self._prefix}{self._shards[number][0]} sample {sample}"

    def fingerprint(self) -> str:
        """Returns a hash of the names, sizes and exclusions of shards, of dataset.yaml, and of the
        content of 8 evenly spread shards.
        """
        kind = replace(self.sample_type, where="")
        digest = hashlib.blake2b(
            repr((self._shards, self._skipped.tolist(), kind)).encode(), digest_size=16
        )
        last = len(self._shards) - 1
        for number in sorted(
            {probe * last // (_FINGERPRINT_SHARDS - 1) for probe in range(_FINGERPRINT_SHARDS)}
        ):
            digest.update(
                fingerprint_file(
                    self._shard(number).file, self._shards[number][1], _FINGERPRINT_PROBES
                ).encode()
            )
        return digest.hexdigest()

    def _places(self, indices: Sequence[int]) -> list[tuple[int, int]]:
        """Returns the number of the shard and of the sample in it for each index.

        Shards of 3 and 5 samples, sample 1 excluded: index 0 is (0, 0), index 1 is (0, 2), index 2
        is (1, 0).
        """
        asked = np.asarray(indices, dtype=np.int64)
        if asked.size and not (asked.min() >= 0 and asked.max() < len(self)):
            for index in indices:
                check_index(index, self)
        if self._skipped.size:
            asked = asked + np.searchsorted(self._kept_before_skipped, asked, side="right")
        numbers = np.searchsorted(self._ends, asked, side="right")
        return list(zip(numbers.tolist(), (asked - self._starts[numbers]).tolist()))

    def _shard(self, number: int) -> Shard:
        name, count = self._shards[number]
        opened = open_local_shard if self._is_local else open_remote_shard
        return opened(self._prefix, name, count, self._opened_at)

    def _find_skipped(self, excluded: Sequence[tuple[str, str]]) -> npt.NDArray[np.int64]:
        """Returns the numbers of excluded samples in the part, in ascending order."""
        numbers = {name: number for number, (name, _) in enumerate(self._shards)}
        keys_of: dict[str, set[str]] = {}
        for name, key in excluded:
            keys_of.setdefault(name, set()).add(key)
        skipped = []
        for name, keys in keys_of.items():
            number = numbers[name]
            start = int(self._ends[number]) - self._shards[number][1]
            found = [sample for sample, key in enumerate(self._keys(number)) if key in keys]
            if len(found) < len(keys):
                warnings.warn(
                    f"{self.path}: {len(keys) - len(found)} excluded samples are not in {name}",
                    stacklevel=4,
                )
            skipped += [start + sample for sample in found]
        return np.array(sorted(skipped), np.int64)

    def _keys(self, number: int) -> list[str]:
        """Returns the keys of a shard's samples, from their first headers: 2 microseconds each."""
        shard = self._shard(number)
        file, offsets = shard.file, shard.offsets
        headers = read_ranges([(file, start, start + BLOCK) for start in offsets[:-1]])
        return [
            header_key(header) or parse_sample(file.read(start, end), 0, end - start, {})
            for header, (start, end) in zip(headers, itertools.pairwise(offsets))
        ]

    def _prepare_parts(self) -> None:
        """Creates the functions that read parts and fields. They may come from Python files, so
        that they are not pickled, but created again.
        """
        kind = self.sample_type
        folder = join_location(self.path, FOLDER)

        def function(reference: str, name: str) -> Callable[..., Any]:
            return load_function(
                reference, name, folder, allow_code=self._allow_code, where=kind.where
            )

        self._field_map = (
            FieldMap(kind.field_map, f"{kind.where}: field_map") if kind.field_map else None
        )
        self._sample_loader = (
            function(kind.sample_loader, "sample_loader") if kind.sample_loader else None
        )
        if isinstance(kind.part_filter, str):
            self._is_read: Callable[[str], bool] | None = function(kind.part_filter, "part_filter")
        else:
            self._is_read = None if kind.part_filter is None else set(kind.part_filter).__contains__

    def __getstate__(self) -> dict[str, Any]:
        made = ("_field_map", "_sample_loader", "_is_read")
        return {name: value for name, value in self.__dict__.items() if name not in made}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._prepare_parts()


Piece = tuple[Any, int, int]
"""(bytes or mapped memory, start, end): the place of a sample."""
