"""pure. Writes the index files that reading by index needs, so that energon 7 can read them too.

A folder of tar shards gets `X.tar.idx` beside each shard and a `.nv-meta` folder; a JSONL file gets
`FILE.jsonl.idx`.

Invariant: each file is put in its place as a whole, and what makes a folder look prepared comes
last: a failure on the way leaves a folder that is as prepared as it was.
"""

import json
import os
import random
import re
import uuid
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import yaml

from megatron.blending.arguments import check_one_of, shown
from megatron.blending.formats.files import list_names, open_file
from megatron.blending.formats.jsonl import INDEX_SUFFIX, Progress, index_lines, unseen
from megatron.blending.formats.prepared.braces import collapse_numbers, expand_braces
from megatron.blending.formats.prepared.field_map import FieldMap
from megatron.blending.formats.prepared.nv_meta import CRUDE, FOLDER, SQLITE, read_info
from megatron.blending.formats.prepared.sample_index import DuplicateKeyError, SampleIndexWriter
from megatron.blending.formats.prepared.tar import TarError, TarScan, scan_tar

SAMPLE_TYPES = (
    "CaptioningSample ImageClassificationSample ImageSample InterleavedSample MultiChoiceVQASample "
    "OCRSample SimilarityInterleavedSample TextSample VQASample VidQASample"
).split()

_ENERGON_VERSION = "7.4.1"
_SHARDS_AHEAD_PER_WORKER = 2
_LOADER_FILE = "sample_loader.py"


@dataclass(frozen=True, kw_only=True)
class Preparation:
    """A Preparation says what is asked for, in the words of `energon prepare`."""

    split_ratio: tuple[float, ...] = (1.0, 0.0, 0.0)
    """Shares of the shards for the parts that `split_names` has, which are cut in order."""
    split_names: Sequence[str] = ("train", "val", "test")
    split_config: str = "split.yaml"
    """The file that says so, also as JSON."""
    shards: Sequence[str] = ()
    """Names, with braces; none: all below the folder."""
    split_parts: Sequence[str] = ()
    """`train:train/.*`: part, regular expression from the start of a shard's name, with braces;
    instead of shares.
    """
    exclude: str | None = None
    """Regular expression; a shard in whose name it is found is left out."""
    shuffle_tars: bool = False
    """Deal the shards in a random order, the same each time."""
    shuffle_seed: int = 42
    sample_type: str | None = None
    """Class of the samples, or CrudeWebdataset; None: no dataset.yaml is written."""
    field_map: Mapping[str, str] = field(default_factory=dict)
    dataset_yaml_name: str = "dataset.yaml"
    tar_index_only: bool = False
    """Write X.tar.idx and index.sqlite of a prepared folder again, and leave the rest."""
    force_overwrite: bool = False
    num_workers: int = 1

    def __post_init__(self) -> None:
        num_parts = len(self.split_names)
        if (
            len(self.split_ratio) != num_parts
            or min(self.split_ratio) < 0
            or sum(self.split_ratio) <= 0
        ):
            raise ValueError(
                f"--split-ratio must be {num_parts} shares like 8,1,1, but is {self.split_ratio}"
            )
        for part in self.split_parts:
            if ":" not in part:
                raise ValueError(
                    f"--split-parts must be like 'train:train/.*', but is {shown(part)}"
                )
        known = (*SAMPLE_TYPES, CRUDE)
        if self.sample_type is not None:
            check_one_of("--sample-type", self.sample_type, known)
        if self.field_map and self.sample_type in (None, CRUDE):
            raise ValueError("--field-map needs --sample-type, the class whose fields it names")
        FieldMap(self.field_map, "--field-map")


@dataclass(frozen=True)
class Prepared:
    """Summary of what was found and written."""

    counts: Mapping[str, int]
    """Samples of each shard."""
    split_parts: Mapping[str, Sequence[str]]
    empty_shards: Sequence[str]
    """Left out."""
    part_names: Sequence[str]


def prepare_jsonl(path: str, progress: Progress = unseen) -> int:
    """Writes the index of a JSONL file beside it; returns the number of records. About 1 GB/s."""
    offsets = index_lines(open_file(path), progress)
    if len(offsets) < 2:
        raise ValueError(f"{path}: has no records; leave it out of the data")
    _put(path + INDEX_SUFFIX, offsets.tobytes())
    return len(offsets) - 1


def prepare_webdataset(folder: str, asked: Preparation, progress: Progress = unseen) -> Prepared:
    """Prepares a folder of tar shards; ValueError if it cannot be, naming shard and byte, or the
    key of two samples.

    Reads all headers, and no contents, at about 10 microseconds per sample.
    """
    shards = _find_shards(folder, asked)
    dataset_config = _dataset_config(folder, asked)
    os.makedirs(os.path.join(folder, FOLDER), exist_ok=True)
    counts: dict[str, int] = {}
    empty, part_names = [], dict[str, None]()
    with SampleIndexWriter(os.path.join(folder, FOLDER, SQLITE)) as index:
        for shard, scan in progress(_scans(folder, shards, asked.num_workers), len(shards)):
            if not scan.samples:
                empty.append(shard)
                continue
            _add(index, shard, scan, counts)
            part_names.update((part.name, None) for sample in scan.samples for part in sample.parts)
        if not counts:
            raise ValueError(
                f"{folder}: none of its {len(shards)} tar files has a sample; check the names in "
                "them"
            )
        if asked.tar_index_only:
            _check_counts(folder, counts)
    _put_text(folder, "index.uuid", str(uuid.uuid4()))
    split_parts = {} if asked.tar_index_only else _deal(list(counts), asked)
    if not asked.tar_index_only:
        _write_config(folder, asked, counts, split_parts, dataset_config)
    return Prepared(counts, split_parts, empty, list(part_names))


def _find_shards(folder: str, asked: Preparation) -> list[str]:
    is_prepared = any(
        os.path.isfile(os.path.join(folder, FOLDER, name)) for name in (".info.json", ".info.yaml")
    )
    if asked.tar_index_only:
        return list(read_info(folder))
    if is_prepared and not asked.force_overwrite:
        raise ValueError(
            f"{folder}: is prepared already; pass --force-overwrite to prepare it again"
        )
    if asked.shards:
        return [name for pattern in asked.shards for name in expand_braces(pattern)]
    names = [
        name
        for pattern in ("*.tar", "*.tgz", "*.tar.gz")
        for name in list_names(folder, f"**/{pattern}")
    ]
    shards = [name for name in names if not (asked.exclude and re.search(asked.exclude, name))]
    for name in shards:
        if not name.endswith(".tar"):
            raise ValueError(
                f"{folder}: {name} is compressed, which allows no random access; gunzip or "
                "--exclude it"
            )
    if not shards:
        raise ValueError(
            f"{folder}: no .tar file is below it"
            + (", or all are excluded" if asked.exclude else "")
        )
    return shards


def _scans(folder: str, shards: Sequence[str], num_workers: int) -> Iterator[tuple[str, TarScan]]:
    """Scans the shards in order, by several processes; few are held at a time, however slow their
    reader is.
    """
    if num_workers < 2 or len(shards) < 2:
        for shard in shards:
            yield shard, _index_shard(folder, shard)
        return
    pending = deque(shards)
    with ProcessPoolExecutor(num_workers) as pool:
        ahead: deque[tuple[str, Future[TarScan]]] = deque()
        while pending or ahead:
            while pending and len(ahead) < num_workers * _SHARDS_AHEAD_PER_WORKER:
                ahead.append((pending[0], pool.submit(_index_shard, folder, pending.popleft())))
            shard, scan = ahead.popleft()
            try:
                yield shard, scan.result()
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise


def _index_shard(folder: str, shard: str) -> TarScan:
    path = os.path.join(folder, shard)
    try:
        scan = scan_tar(open_file(path))
    except TarError as error:
        raise ValueError(f"{path}: {error}; write the shard again, or pass --exclude") from None
    _put(
        path + ".idx",
        np.array([*(sample.start for sample in scan.samples), scan.end], np.uint64).tobytes(),
    )
    return scan


def _add(index: SampleIndexWriter, shard: str, scan: TarScan, counts: dict[str, int]) -> None:
    """Puts a shard's samples in the index, under the number that the shard has in .info.json."""
    number = len(counts)
    counts[shard] = len(scan.samples)
    try:
        index.add(number, scan)
    except DuplicateKeyError as error:
        first, second = (list(counts)[shard_id] for shard_id in error.shard_ids)
        place = f"twice in {first}" if first == second else f"in {first} and in {second}"
        raise ValueError(
            f"key {error.key!r} is {place}; keys must be unique in a data set, and members of one "
            "sample stand together: rename the files, for instance into a folder per shard"
        ) from None


def _check_counts(folder: str, counts: Mapping[str, int]) -> None:
    recorded = read_info(folder)
    for shard, count in recorded.items():
        if counts.get(shard, 0) != count:
            raise ValueError(
                f"{folder}: {shard} has {counts.get(shard, 0)} samples, but {count} when it was "
                "prepared; prepare all of it again, with --force-overwrite"
            )


def _deal(shards: list[str], asked: Preparation) -> dict[str, list[str]]:
    """Deals the shards to the parts: by expression, or cut in order where the shares, rounded down,
    end.
    """
    if asked.split_parts:
        expressions = dict(part.split(":", 1) for part in asked.split_parts)
        return {
            part: [
                shard
                for shard in shards
                if any(re.match(option, shard) for option in expand_braces(expression))
            ]
            for part, expression in expressions.items()
        }
    if asked.shuffle_tars:
        random.Random(asked.shuffle_seed).shuffle(shards)
    ends = [
        int(len(shards) * share) for share in np.cumsum(asked.split_ratio) / sum(asked.split_ratio)
    ]
    return {
        part: shards[start:end] for part, start, end in zip(asked.split_names, [0, *ends], ends)
    }


def _dataset_config(folder: str, asked: Preparation) -> dict[str, Any] | None:
    if asked.sample_type is None or asked.tar_index_only:
        return None
    named = {"__module__": "megatron.energon", "__class__": asked.sample_type}
    if asked.sample_type == CRUDE:
        return named
    if asked.field_map:
        return {"sample_type": named, "field_map": dict(asked.field_map)}
    if os.path.isfile(os.path.join(folder, FOLDER, _LOADER_FILE)):
        functions = {key: f"{_LOADER_FILE}:{key}" for key in ("sample_loader", "part_filter")}
        return {"sample_type": named, **functions}
    raise ValueError(
        f"""--sample-type {asked.sample_type} needs --field-map, such as '{{"text": "txt"}}', """
        f"or a {FOLDER}/{_LOADER_FILE}"
    )


def _write_config(
    folder: str,
    asked: Preparation,
    counts: Mapping[str, int],
    split_parts: Mapping[str, Sequence[str]],
    dataset_config: Mapping[str, Any] | None,
) -> None:
    if dataset_config is not None:
        _put_text(folder, asked.dataset_yaml_name, yaml.safe_dump(dataset_config, sort_keys=False))
    collapsed = {part: collapse_numbers(shards) for part, shards in split_parts.items()}
    split = {"split_parts": collapsed, "exclude": []}
    is_json = asked.split_config.endswith(".json")
    text = (
        json.dumps(split, indent=2)
        if is_json
        else yaml.safe_dump(split, sort_keys=False, allow_unicode=True)
    )
    _put_text(folder, asked.split_config, text)
    info = {"energon_version": _ENERGON_VERSION, "shard_counts": counts}
    legacy = os.path.join(folder, FOLDER, ".info.yaml")
    if os.path.isfile(legacy):
        os.remove(legacy)
    _put_text(folder, ".info.json", json.dumps(info, indent=2))


def _put_text(folder: str, name: str, text: str) -> None:
    _put(os.path.join(folder, FOLDER, name), text.encode())


def _put(path: str, content: bytes) -> None:
    temporary = f"{path}.{os.getpid()}.tmp"
    with open(temporary, "wb") as file:
        file.write(content)
    os.replace(temporary, path)
