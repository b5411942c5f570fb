"""pure. Reads the folder `.nv-meta` of a prepared folder, which `python -m megatron.blending
prepare` and energon write.

    .info.json, or .info.yaml   shards and their numbers of samples
    split.yaml, or split.json   shards of each part (train, val), and excluded samples
    dataset.yaml                kind of sample, and the sources of its fields

Python code that a file names is neither imported nor executed here.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from megatron.blending.arguments import nearest, shown
from megatron.blending.formats.files import is_file, join_location, read_text
from megatron.blending.formats.json_text import parse_json
from megatron.blending.formats.prepared.braces import expand_braces
from megatron.blending.formats.yaml_place import Place, described
from megatron.blending.formats.yaml_reader import Items, Table, read_yaml

FOLDER = ".nv-meta"
_SAVED_TO_DISK = {"dataset_dict.json": "['train']", "state.json": ""}
"""Files of `save_to_disk` of HuggingFace datasets -> the split to take, for a message."""
SQLITE = "index.sqlite"
CRUDE = "CrudeWebdataset"

_MAX_VALUES = 1_000_000
_MAX_SAMPLES = 1 << 48

_OUR_MODULES = re.compile(r"megatron\.(energon|blending)(\..*)?")
_LEGACY_CLASS = re.compile(r"(\w+)Webdataset")
_DATASET_KEYS = (
    "__module__ __class__ sample_type field_map sample_loader part_filter subflavors "
    "subflavor split_config"
).split()


@dataclass(frozen=True, kw_only=True)
class SampleType:
    """Kind of the samples of a data set: the class `name` in `module`. Exactly one of `is_crude`,
    `field_map` and `sample_loader` is given, and makes the fields.
    """

    module: str
    name: str
    is_crude: bool = False
    """True if a sample is the parts themselves, which a cooker turns into a sample."""
    field_map: Mapping[str, str] = field(default_factory=dict)
    """Field -> its source: `{"text": "txt", "label": "json[class]"}`; see `field_map`."""
    sample_loader: str | None = None
    """`file.py:function` beside the YAML file."""
    part_filter: str | tuple[str, ...] | None = None
    """`file.py:function`, or names of the parts to read; None for all."""
    split_config: str | None = None
    """File with the splits, in place of split.yaml."""
    where: str = ""
    """File and line, for errors."""


@dataclass(frozen=True)
class SplitPart:
    """One part of a data set, such as train."""

    shards: tuple[tuple[str, int], ...]
    """(shard, number of samples), in order."""
    excluded: tuple[tuple[str, str], ...]
    """(shard, key) of samples that are left out."""
    name: str = ""


def read_info(root: str) -> dict[str, int]:
    """Returns the number of samples by shard, in the order of their ids in the index. Raises
    ValueError for a folder that is not prepared.
    """
    path = join_location(root, f"{FOLDER}/.info.json")
    if is_file(path):
        content = _read_json(path)
    else:
        path = join_location(root, f"{FOLDER}/.info.yaml")
        if not is_file(path):
            for name, split in _SAVED_TO_DISK.items():
                if is_file(join_location(root, name)):
                    raise ValueError(
                        f"{root}: was written by save_to_disk of HuggingFace datasets; convert it "
                        f"with load_from_disk({root!r}){split}.to_parquet('data.parquet') and "
                        "pass that file"
                    )
            raise ValueError(
                f"{root}: is not prepared; run python -m megatron.blending prepare {root}"
            )
        content = read_yaml(path, read_text(path))
    counts = content.get("shard_counts") if isinstance(content, dict) else None
    if not isinstance(counts, dict) or not all(
        type(n) is int and 0 <= n < _MAX_SAMPLES for n in counts.values()
    ):
        raise ValueError(
            f"{path}: shard_counts must map shards to numbers of samples; prepare the data set "
            "again"
        )
    return dict(counts)


def _check_shards(shards: Sequence[str], counts: Mapping[str, int], where: str) -> None:
    for shard in shards:
        if shard not in counts:
            raise ValueError(
                f"{where}: shard {shown(shard)} is not in .info.json; "
                f"{nearest(shard, counts) if len(counts) < 1000 else 'prepare the data set again'}"
            )


def read_split_part(root: str, part: str, split_config: str = "split.yaml") -> SplitPart:
    """Returns part `part` of the data set. Raises ValueError, naming file and key, if there is no
    such part.
    """
    counts = read_info(root)
    path, content = _read_splits(root, split_config)
    parts = content["split_parts"]
    if part not in parts:
        raise ValueError(
            f"{path}: split_parts has no {shown(part)}; {nearest(part, parts, 'the parts')}"
        )
    shards = _expanded(parts[part], f"{path}: split_parts.{part}")
    excluded = set(_expanded(content.get("exclude"), f"{path}: exclude"))
    _check_shards(shards, counts, f"{path}: split_parts.{part}")
    kept = {shard: counts[shard] for shard in shards if shard not in excluded}
    return SplitPart(
        tuple((shard, counts[shard]) for shard in shards if shard in kept),
        tuple(sample for entry in sorted(excluded) if (sample := _excluded_sample(entry, kept))),
        part,
    )


def read_split_names(root: str, split_config: str = "split.yaml") -> list[str]:
    """Returns the names of the parts with at least one shard."""
    return [
        part
        for part, shards in _read_splits(root, split_config)[1]["split_parts"].items()
        if shards
    ]


def _read_splits(root: str, split_config: str) -> tuple[str, dict[str, Any]]:
    """Returns the path and the content of the file with the splits."""
    path = join_location(root, f"{FOLDER}/{split_config}")
    if split_config == "split.yaml" and not is_file(path):
        path = join_location(root, f"{FOLDER}/split.json")
    if not is_file(path):
        read_info(root)  # raises for a folder that is not prepared at all
        raise ValueError(
            f"{root}/{FOLDER}/{split_config}: no such file; name another, or prepare the data set "
            "again"
        )
    content = _read_json(path) if path.endswith(".json") else read_yaml(path, read_text(path))
    if not isinstance(content, dict) or not isinstance(content.get("split_parts"), dict):
        raise ValueError(
            f"{path}: split_parts must map names of parts to lists of shards; fix the file"
        )
    for key in content:
        if key not in ("split_parts", "exclude"):
            raise ValueError(
                f"{path}: unknown key {shown(key)}; "
                f"{nearest(key, ('split_parts', 'exclude'), 'the keys here')}"
            )
    return path, content


def _excluded_sample(entry: str, shards: Mapping[str, int]) -> tuple[str, str] | None:
    """Returns the shard and the key in an entry, or None if it names a whole shard: `"a/b.tar/c/d"
    -> ("a/b.tar", "c/d")`.
    """
    at = entry.find("/")
    while at >= 0:
        if entry[:at] in shards:
            return entry[:at], entry[at + 1 :]
        at = entry.find("/", at + 1)
    return None


def _expanded(patterns: object, where: str) -> list[str]:
    if patterns is None:
        return []
    if not isinstance(patterns, list) or not all(isinstance(pattern, str) for pattern in patterns):
        raise ValueError(f"{where}: must be a list of names; fix the file")
    try:
        return [name for pattern in patterns for name in expand_braces(pattern)]
    except ValueError as error:
        raise ValueError(f"{where}: {error}; fix the file") from None


def read_dataset_config(
    root: str, dataset_config: str = "dataset.yaml"
) -> tuple[SampleType, dict[str, Any]]:
    """Returns the kind of sample and the subflavors in a dataset.yaml. Raises ValueError, naming
    file, line and key, if it is wrong.
    """
    path = join_location(root, f"{FOLDER}/{dataset_config}")
    if not is_file(path):
        read_info(root)  # raises for a folder that is not prepared at all
        raise ValueError(
            f"{path}: no such file; write one, or run python -m megatron.blending prepare with "
            "--sample-type and --field-map"
        )
    content = read_yaml(path, read_text(path))
    place = Place(path, 1, "")
    table = place.table(content)
    place.check_keys(table, _DATASET_KEYS)
    subflavors = (
        dict(place.at("subflavors", table).table(table["subflavors"]))
        if table.get("subflavors")
        else {}
    )
    return replace(
        _sample_type(table, place), split_config=place.text(table, "split_config")
    ), subflavors


def _sample_type(table: Table, place: Place) -> SampleType:
    module, name = _class_of(table, place)
    part_filter = _part_filter(table, place)
    where = str(place)
    if name == CRUDE:
        for key in ("sample_type", "field_map", "sample_loader"):
            if key in table:
                raise place.at(key, table).error(f"has no meaning for a {CRUDE}; remove it")
        return SampleType(
            module=module, name=name, is_crude=True, part_filter=part_filter, where=where
        )
    loader = place.text(table, "sample_loader")
    if ("field_map" in table) == (loader is not None):
        raise place.error("exactly one of field_map and sample_loader must be there")
    if loader is not None:
        return SampleType(
            module=module, name=name, sample_loader=loader, part_filter=part_filter, where=where
        )
    field_map = place.at("field_map", table).table(table["field_map"])
    if not field_map:
        raise place.at("field_map", table).error(
            "must say where fields come from, but is empty; write text: txt"
        )
    for key, source in field_map.items():
        if not isinstance(source, str):
            raise place.at("field_map", table).error(
                f"{key} must be the name of a part, but is {described(source)}"
            )
    return SampleType(
        module=module, name=name, field_map=dict(field_map), part_filter=part_filter, where=where
    )


def _class_of(table: Table, place: Place) -> tuple[str, str]:
    """Returns module and name of the sample's class. A legacy name of a data set is translated:
    TextWebdataset has samples of TextSample.
    """
    if "sample_type" in table:
        place = place.at("sample_type", table)
        table = place.table(table["sample_type"])
        place.check_keys(table, ("__module__", "__class__"))
    module = place.text(table, "__module__") or "megatron.energon"
    name = place.text(table, "__class__")
    if name is None:
        raise place.error("__class__ is missing; name the class of the samples, such as TextSample")
    legacy = _LEGACY_CLASS.fullmatch(name)
    if legacy and name != CRUDE and _OUR_MODULES.fullmatch(module):
        name = f"{legacy[1]}Sample"
    return module, name


def _part_filter(table: Table, place: Place) -> str | tuple[str, ...] | None:
    given = table.get("part_filter")
    if given is None or isinstance(given, str):
        return given
    if not isinstance(given, Items) or not all(isinstance(part, str) for part in given):
        raise place.at("part_filter", table).error(
            "must be file.py:function, or a list of names of parts"
        )
    return tuple(given)


def _read_json(path: str) -> Any:
    text = read_text(path)
    if sum(map(text.count, "[{,")) > _MAX_VALUES:
        raise ValueError(
            f"{path}: has more than {_MAX_VALUES:,} values; prepare the data set again"
        )
    return parse_json(path, text)
