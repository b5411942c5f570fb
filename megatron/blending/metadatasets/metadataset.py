"""pure. Reads a metadataset, and the metadatasets that it names, as one tree of frozen values (see
`tree`). Only YAML files are opened, no data.

`load_metadataset(path, split)` follows paths from file to file. Settings of an outer file are
passed down to the sources of the inner one:

    split                            the innermost that is set
    subflavors                       merged; the outer file takes precedence
    shuffle_over_epochs_multiplier   multiplied; None takes precedence, then -1
    subset                           a part of a part

Weights are not passed down. Each blend stays a level of the tree: its weights are shares among its
own children.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Any

from megatron.blending.arguments import nearest, shown
from megatron.blending.formats.files import read_text
from megatron.blending.formats.paths import check_exists, is_folder, is_metadataset, resolve_path
from megatron.blending.formats.yaml_reader import read_yaml
from megatron.blending.metadatasets.metadataset_file import (
    UNSET,
    Entry,
    Group,
    JoinEntry,
    Range,
    Reference,
    parse_metadataset,
)
from megatron.blending.metadatasets.tree import (
    DATASET_CONFIG,
    EVERYTHING,
    SPLIT_CONFIG,
    Blend,
    Epochized,
    Join,
    JoinLeg,
    Node,
    SourceEntry,
    Subset,
)

_FILE_SYSTEM = "filesystem://"


@dataclass(frozen=True)
class _Outer:
    """Settings that outer files pass down."""

    split: str
    subflavors: Mapping[str, Any] = field(default_factory=dict)
    multiplier: int | None = 1
    subset: Subset = EVERYTHING
    trail: tuple[tuple[str, str], ...] = ()
    """(file, split) of each outer file, from the first one on."""


_Files = dict[str, dict[str, Entry]]


def load_metadataset(
    path: str | os.PathLike[str],
    split: str,
    *,
    settings: Reference | None = None,
    files: _Files | None = None,
) -> Node:
    """Returns the tree of `split` in the metadataset `path`. If `path` is data, the tree is a
    single SourceEntry.

    Raises ValueError, one line with file, line and key, for an unknown key or a wrong value, a
    missing path, a missing split, or files that name one another in a circle.

    Args:
        settings: settings of the whole, as an outer metadataset would set them.
        files: content of files by path, which then need not exist on disk.
    """
    path = os.fspath(path)
    reference = Reference(path=path) if settings is None else replace(settings, path=path)
    return _follow(reference, path, _Outer(split), {} if files is None else dict(files))


def _follow(reference: Reference, path: str, outer: _Outer, files: _Files) -> Node:
    """Returns the source of a reference, or the tree of a split if it names a metadataset."""
    split = reference.split_part or outer.split
    outer = replace(_combined(reference, outer), split=split)
    if not is_metadataset(path) and path not in files:
        return _source_entry(reference, path, outer)
    _check_outer(reference, path)
    # A file may name another split of itself, as long as no split comes back to itself.
    if (path, split) in outer.trail:
        circle = " -> ".join([*(file for file, _ in outer.trail), path])
        raise _error(reference.where, f"the files name one another in a circle: {circle}")
    entries = _read(path, files, reference.where)
    if split not in entries:
        raise _error(
            reference.where or path,
            f"{path} has no split {shown(split)}; {nearest(split, entries)}",
        )
    return _resolve(
        entries[split], path, replace(outer, trail=(*outer.trail, (path, split))), files
    )


def _check_outer(reference: Reference, path: str) -> None:
    """Raises ValueError if a reference to a metadataset has settings that only data can have."""
    for key in ("dataset_config", "split_config", "aux"):
        if getattr(reference, key):
            raise _error(
                reference.where,
                f"{shown(key)} is for data; {path} is a metadataset, so set it in there",
            )
    if reference.subset and not reference.subset.is_fraction:
        raise _error(
            reference.where,
            "subset of a metadataset must be percentages, as there is no one order to count",
        )


def _resolve(entry: Entry, path: str, outer: _Outer, files: _Files) -> Node:
    """Returns the tree of an entry. Its paths are relative to the file `path`, which has it."""
    if isinstance(entry, Reference):
        return _follow(entry, _resolved(entry.path, path, entry.where), outer, files)
    if isinstance(entry, JoinEntry):
        return _join(entry, path, outer, files)
    if entry.subset is not None:
        if not entry.subset.is_fraction:
            raise _error(
                entry.where,
                "subset of a blend must be percentages; set numbers of samples on its sources",
            )
        # 50-100 % of a blend is the second half of each of its sources.
        outer = replace(outer, subset=_subset(entry.subset, outer.subset))
    children = tuple((_resolve(child, path, outer, files), share) for child, share in entry.entries)
    return _group(entry, children)


def _group(entry: Group, children: tuple[tuple[Node, float], ...]) -> Blend | Epochized:
    made, other, name = (
        (Epochized, Blend, "blend") if entry.is_epochized else (Blend, Epochized, "blend_epochized")
    )
    for child, _ in children:
        if isinstance(child, other):
            raise _error(
                entry.where,
                f"holds a {name} ({child.where}); all levels must be of one kind, or no epoch has "
                "an end",
            )
    return made(children=children, where=entry.where)


def _source_entry(reference: Reference, path: str, outer: _Outer) -> SourceEntry:
    check_exists(path, reference.where)
    if not is_folder(path):
        for key in ("dataset_config", "split_config"):
            if getattr(reference, key):
                raise _error(
                    reference.where,
                    f"{shown(key)} is for folders with .nv-meta, but {path} is a file; remove it",
                )
    return SourceEntry(
        path=path,
        split_part=outer.split,
        subflavors=outer.subflavors,
        shuffle_over_epochs_multiplier=outer.multiplier,
        dataset_config=reference.dataset_config or DATASET_CONFIG,
        split_config=reference.split_config or SPLIT_CONFIG,
        subset=outer.subset,
        aux={
            name: _store(store, outer.trail[-1][0], reference.where)
            for name, store in reference.aux.items()
        },
        where=reference.where or path,
    )


def _store(store: str, beside: str, where: str) -> str:
    prefix = _FILE_SYSTEM if store.startswith(_FILE_SYSTEM) else ""
    return prefix + _resolved(store.removeprefix(prefix), beside, where)


def _resolved(path: str, beside: str, where: str) -> str:
    try:
        return resolve_path(path, beside)
    except ValueError as failure:
        raise _error(where, str(failure)) from None


def _join(entry: JoinEntry, path: str, outer: _Outer, files: _Files) -> Join:
    settings = replace(_combined(entry, outer), split=entry.split_part or outer.split)
    legs: list[JoinLeg] = []
    # The order of a join is that of its primary source, and so are multiplier and subset.
    primary = _combined(entry.legs[0][1], replace(settings, subflavors={}))
    for name, reference, nonmatch in entry.legs:
        leg_path = _resolved(reference.path, path, reference.where)
        if is_metadataset(leg_path):
            raise _error(reference.where, f"a join is of data, but {leg_path} is a metadataset")
        if legs and reference.subset:
            raise _error(
                reference.where,
                "subset is for the first source of a join, or for the join; remove it",
            )
        leg = replace(
            _combined(reference, _Outer(reference.split_part or settings.split)), subset=EVERYTHING
        )
        legs.append(JoinLeg(name, _source_entry(reference, leg_path, leg), nonmatch))
    return Join(
        legs=tuple(legs),
        joiner=entry.joiner,
        subflavors=settings.subflavors,
        shuffle_over_epochs_multiplier=primary.multiplier,
        subset=primary.subset,
        where=entry.where,
    )


def _combined(entry: Reference | JoinEntry, outer: _Outer) -> _Outer:
    """Returns the settings to pass down into `entry`: its own, combined with the outer ones."""
    return replace(
        outer,
        subflavors={**entry.subflavors, **outer.subflavors},
        multiplier=multiplied(
            outer.multiplier, 1 if entry.multiplier is UNSET else entry.multiplier
        ),
        subset=outer.subset if entry.subset is None else _subset(entry.subset, outer.subset),
    )


def multiplied(outer: int | None, inner: int | None) -> int | None:
    """Returns the product of an outer and an inner multiplier. None (no shuffling) takes
    precedence, then -1 (at random): `2, 3 -> 6`, `2, -1 -> -1`, `None, -1 -> None`.
    """
    if outer is None or inner is None:
        return None
    return -1 if -1 in (outer, inner) else outer * inner


def _subset(inner: Range, outer: Subset) -> Subset:
    """Returns the part `outer` of the range `inner`. Numbers of records can stand on a source only,
    so that all outer subsets are shares: 50-100 % of [0, 10) are [5, 10).
    """
    if inner.is_fraction:
        return Subset(from_share=Fraction(inner.start), to_share=Fraction(inner.end or 1)).within(
            outer
        )
    return Subset(int(inner.start), None if inner.end is None else int(inner.end)).within(outer)


def _read(path: str, files: _Files, where: str) -> dict[str, Entry]:
    if path not in files:
        files[path] = parse_metadataset(path, read_yaml(path, read_text(path, where)))
    return files[path]


def _error(where: str, fault: str) -> ValueError:
    return ValueError(f"{where}: {fault}" if where else fault)
