"""pure. Parses one metadataset file. All keys are checked, so that a misspelt key is an error.

The result has the entries of the file as they are written. `metadataset` follows their paths and
combines files. Classes are recognised by name: `__module__: megatron.energon` is accepted, and no
module is imported because a file names it.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

from megatron.blending.arguments import nearest, shown
from megatron.blending.formats.yaml_place import Place, described
from megatron.blending.formats.yaml_reader import Table

UNSET: Any = type("Unset", (), {"__repr__": lambda self: "UNSET"})()

_KNOWN_MODULES = re.compile(r"megatron\.(energon|blending)(\..*)?")
_HEAD = ("__module__", "__class__")
_COMMON = ("split_part", "subflavor", "subflavors", "shuffle_over_epochs_multiplier")
_CONFIGS = ("dataset_config", "split_config")
_REFERENCE = ("path", *_COMMON, *_CONFIGS, "subset", "aux")
_JOIN = ("join", "joiner", *_COMMON, *_CONFIGS, "subset")
_SHARES = {"blend": "weight", "blend_epochized": "repetitions", "datasets": "weight"}
_NONMATCH = ("error", "skip", "none")
_PERCENT = re.compile(r"([0-9]+(?:\.[0-9]*)?|\.[0-9]+)%")


@dataclass(frozen=True)
class Range:
    """A part [start, end) of a source, in records (int) or in shares of it (Fraction). If `end` is
    None, it goes to the end.
    """

    start: int | Fraction
    end: int | Fraction | None

    @property
    def is_fraction(self) -> bool:
        return isinstance(self.start, Fraction)


@dataclass(frozen=True, kw_only=True)
class Reference:
    """A path to data or to another metadataset, with settings. UNSET means that the file does not
    set the multiplier; None is a setting.
    """

    path: str
    split_part: str | None = None
    subflavors: Mapping[str, Any] = field(default_factory=dict)
    multiplier: int | None = UNSET
    dataset_config: str | None = None
    split_config: str | None = None
    subset: Range | None = None
    aux: Mapping[str, str] = field(default_factory=dict)
    where: str = ""


@dataclass(frozen=True, kw_only=True)
class JoinEntry:
    """A join, as the file has it."""

    legs: tuple[tuple[str | None, Reference, str], ...]
    """(name if the join is a mapping, source, action for a key that the source lacks)."""
    joiner: tuple[str, str]
    """Module and name of the class or function that joins samples. It is not imported here."""
    split_part: str | None = None
    subflavors: Mapping[str, Any] = field(default_factory=dict)
    multiplier: int | None = UNSET
    subset: Range | None = None
    where: str = ""


@dataclass(frozen=True, kw_only=True)
class Group:
    """A `blend`, whose shares are weights, or a `blend_epochized`, whose shares are repetitions."""

    is_epochized: bool
    entries: tuple[tuple[Reference | JoinEntry, float], ...]
    subset: Range | None = None
    where: str = ""


Entry = Reference | JoinEntry | Group


def parse_metadataset(path: str, content: object) -> dict[str, Entry]:
    """Returns the entry of each split of a file. Raises ValueError with file, line and key, and
    with the most similar valid key.
    """
    place = Place(path, 1, "")
    table = place.table(content)
    place = Place(path, table.line, "")
    class_name = _class_name(place, table)
    place.check_keys(table, (*_HEAD, "splits"))
    if "splits" not in table:
        raise place.error("has no key 'splits'; put the data under splits: train: ...")
    place, splits = place.at("splits", table), place.at("splits", table).table(table["splits"])
    parse = _parse_v2_node if class_name == "MetadatasetV2" else _parse_v1_node
    return {name: parse(place.at(name, splits), splits[name]) for name in splits}


def _class_name(place: Place, table: Table) -> str:
    module, name = place.text(table, "__module__"), place.text(table, "__class__")
    if module is not None and not _KNOWN_MODULES.fullmatch(module):
        raise place.at("__module__", table).error(
            f"{shown(module)} is not imported because a file names it; write __module__: "
            "megatron.energon"
        )
    known = ("Metadataset", "MetadatasetV2")
    if name is not None and name not in known:
        raise place.at("__class__", table).error(
            f"unknown class {shown(name)}; {nearest(name, known)}"
        )
    return name or "Metadataset"


def _parse_v1_node(place: Place, value: object) -> Entry:
    table = place.table(value)
    if "datasets" not in table and {"path", "blend", "blend_epochized", "join"} & table.keys():
        raise place.error("is of the second form; begin the file with __class__: MetadatasetV2")
    place.check_keys(table, ("datasets",))
    # The first form has no subset and no aux, the last two keys of a reference.
    return _parse_group(place, table, "datasets", (*_REFERENCE[:-2], "weight"))


def _parse_v2_node(place: Place, value: object) -> Entry:
    table = place.table(value)
    kinds = [key for key in ("path", "join", "blend", "blend_epochized") if key in table]
    if len(kinds) > 1:
        raise place.error(f"has both {kinds[0]!r} and {kinds[1]!r}; keep one")
    if "datasets" in table and not kinds:
        raise place.error("has 'datasets', which is of the first form; write 'blend' instead")
    if kinds and kinds[0] in ("blend", "blend_epochized"):
        place.check_keys(table, (kinds[0], "subset"))
        return _parse_group(place, table, kinds[0], ())
    if not kinds:  # raises for a misspelt key; without any key at all, _parse_leg names `path`
        place.check_keys(table, ("path", "blend", "blend_epochized", *_JOIN[:2], *_REFERENCE[1:]))
    return _parse_leg(place, table, "")


def _parse_group(place: Place, table: Table, kind: str, reference_keys: tuple[str, ...]) -> Group:
    entries_place = place.at(kind, table)
    if kind not in table:
        raise place.error(f"has no key {shown(kind)}; put a list of sources under it")
    items = entries_place.items(table[kind])
    if not items:
        raise entries_place.error("has no sources; name at least one")
    share_key = _SHARES[kind]
    entries = []
    for index, item in enumerate(items):
        at = entries_place.at(index, items)
        entry = _parse_leg(at, at.table(item), share_key, reference_keys)
        entries.append((entry, at.share(item, share_key)))
    if not any(share for _, share in entries):
        raise entries_place.error(f"every {share_key} is 0; raise one")
    return Group(
        is_epochized=kind == "blend_epochized",
        entries=tuple(entries),
        subset=_parse_subset(place, table),
        where=str(entries_place),
    )


def _parse_leg(
    place: Place, table: Table, share_key: str, reference_keys: tuple[str, ...] = ()
) -> Reference | JoinEntry:
    if "join" in table and not reference_keys:
        place.check_keys(table, (*_JOIN, share_key))
        return _parse_join(place, table)
    if "path" not in table and ("blend" in table or "blend_epochized" in table):
        raise place.error(
            "a blend within a blend must be a file of its own; name that file with 'path'"
        )
    place.check_keys(table, reference_keys or (*_REFERENCE, share_key))
    path = place.text(table, "path")
    if path is None:
        raise place.error("has no 'path'")
    return Reference(
        path=path,
        dataset_config=place.text(table, "dataset_config"),
        split_config=place.text(table, "split_config"),
        aux=_parse_aux(place, table),
        **_parse_common(place, table),
    )


def _parse_common(place: Place, table: Table) -> dict[str, Any]:
    subflavors = (
        place.at("subflavors", table).table(table["subflavors"]) if table.get("subflavors") else {}
    )
    if "subflavor" in table:
        subflavors = {"__subflavor__": table["subflavor"], **subflavors}
    multiplier = table.get("shuffle_over_epochs_multiplier", UNSET)
    is_number = type(multiplier) is int and (multiplier >= 1 or multiplier == -1)
    if not (multiplier is UNSET or multiplier is None or is_number):
        raise place.at("shuffle_over_epochs_multiplier", table).error(
            f"must be a whole number of at least 1, -1 or null, but is {described(multiplier)}"
        )
    return {
        "split_part": place.text(table, "split_part"),
        "subflavors": _plain(subflavors),
        "multiplier": multiplier,
        "subset": _parse_subset(place, table),
        "where": str(place),
    }


def _plain(value: object) -> Any:
    """Returns the value as plain dicts and lists, without line numbers, as users get subflavors."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list) else value


def _parse_aux(place: Place, table: Table) -> dict[str, str]:
    """Returns the location of each side store. One given by `fs_path`, a plain folder of files,
    becomes filesystem://PATH.
    """
    if table.get("aux") is None:
        return {}
    place = place.at("aux", table)
    stores = place.table(table["aux"])
    paths = {}
    for name, value in stores.items():
        at = place.at(name, stores)
        if isinstance(value, Table):
            at.check_keys(value, ("path", "fs_path"))
            if len(value) != 1:
                raise at.error("must have one of 'path' and 'fs_path'")
            key = next(iter(value))
            path, prefix = at.text(value, key), "filesystem://" if key == "fs_path" else ""
        else:
            path, prefix = place.text(stores, name), ""
        if not path:
            raise at.error("must be a path, but is empty")
        paths[name] = prefix + path
    return paths


def _parse_join(place: Place, table: Table) -> JoinEntry:
    for key in _CONFIGS:
        if key in table:
            raise place.at(key, table).error(
                "must not be set on a join; set it on the sources that it joins"
            )
    legs_place = place.at("join", table)
    legs = table["join"]
    keys: list[Any] = (
        list(legs) if isinstance(legs, Table) else list(range(len(legs_place.items(legs))))
    )
    if len(keys) < 2:
        raise legs_place.error("must join at least two sources")
    parsed = tuple(
        (key if isinstance(key, str) else None, *_parse_joined(legs_place.at(key, legs), legs[key]))
        for key in keys
    )
    return JoinEntry(legs=parsed, joiner=_parse_joiner(place, table), **_parse_common(place, table))


def _parse_joined(at: Place, given: Any) -> tuple[Reference, str]:
    """Returns a source of a join, and its action for keys that it lacks."""
    leg = at.table(given)
    at.check_keys(leg, (*_REFERENCE[:-1], "nonmatch"))
    nonmatch = at.text(leg, "nonmatch") or "error"
    if nonmatch not in _NONMATCH:
        raise at.at("nonmatch", leg).error(
            f"must be one of {', '.join(_NONMATCH)}, but is {shown(nonmatch)}"
        )
    # A reference does not know `nonmatch`. Its errors need the lines, which a new Table lacks.
    without_nonmatch = Table((k, v) for k, v in leg.items() if k != "nonmatch")
    without_nonmatch.line, without_nonmatch.lines = leg.line, leg.lines
    reference = _parse_leg(at, without_nonmatch, "", _REFERENCE[:-1])
    assert isinstance(reference, Reference)
    return reference, nonmatch


def _parse_joiner(place: Place, table: Table) -> tuple[str, str]:
    if "joiner" not in table:
        raise place.error(
            "has a 'join' but no 'joiner'; name the sample class with __module__ and __class__"
        )
    at = place.at("joiner", table)
    joiner = at.table(table["joiner"])
    at.check_keys(joiner, ("__module__", "__class__", "__function__"))
    module = at.text(joiner, "__module__")
    names = [at.text(joiner, key) for key in ("__class__", "__function__")]
    names = [name for name in names if name]
    if module is None or len(names) != 1:
        raise at.error("must have '__module__' and one of '__class__' and '__function__'")
    return module, str(names[0])


def _parse_subset(place: Place, table: Table) -> Range | None:
    if table.get("subset") is None:
        return None
    place = place.at("subset", table)
    subset = place.table(table["subset"])
    place.check_keys(subset, ("range",))
    ends = place.at("range", subset).items(subset.get("range"))
    place = place.at("range", subset)
    if len(ends) != 2:
        raise place.error(f"must be [start, end], but has {len(ends)} numbers")
    start, end = (
        _parse_range_end(place, value, is_last) for value, is_last in zip(ends, (False, True))
    )
    if isinstance(start, Fraction) != isinstance(end, Fraction):
        raise place.error(
            f"must be two percentages or two numbers of samples, but is [{ends[0]}, {ends[1]}]"
        )
    if end is not None and (start or 0) >= end:
        raise place.error(f"is empty: [{ends[0]}, {ends[1]}]")
    return Range(start or 0, end) if not isinstance(start, Fraction) else Range(start, end)


def _parse_range_end(place: Place, value: object, is_last: bool) -> int | Fraction | None:
    if isinstance(value, str) and (match := _PERCENT.fullmatch(value)):
        share = Fraction(match[1]) / 100
        if share <= 1:
            return share
    if type(value) is int and value >= 0:
        return value
    if is_last and value == "end":
        return None
    raise place.error(
        "must be percentages from 0% to 100%, numbers of samples or 'end' as the last, but has "
        f"{described(value)}"
    )
