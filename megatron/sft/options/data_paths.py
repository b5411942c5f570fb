"""pure. Expands folders and patterns in --data-path to files."""

from __future__ import annotations

import fnmatch
import glob
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from megatron.blending.formats.sources import SOURCES

_PATTERN = set("*?[")
_PREPARED = ".nv-meta"
_WEIGHTS = ("*.safetensors", "pytorch_model*.bin", "adapter_model.bin", "*.index.json")
"""Names of weight files of models and adapters, by any library."""
_OF_DATASETS = {"dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json"}
"""Files that the library datasets writes beside records."""
_PACKED = {".gz", ".zst", ".bz2", ".xz", ".zip"}
_HELD_OUT = re.compile(
    r"(?<![a-z])(test|testing|eval|evaluation|dev|val|valid|validation)(?![a-z])", re.IGNORECASE
)
_TRAIN = re.compile(r"(?<![a-z])train(ing)?(?![a-z])", re.IGNORECASE)
"""Names of splits, as datasets finds them in the names of files and folders."""
_MAX_LISTED = 5


def expanded(path: str, flag: str) -> tuple[str, ...]:
    """Returns the sorted files of a folder or pattern. A file, a URL and a prepared folder are
    returned as they are. Files of a folder that are named as data to validate or test with are left
    out. Raises ValueError, naming `flag`, if there is no file of records.

    `"data/*.jsonl" -> ("data/a.jsonl", "data/b.jsonl")`
    """
    if os.path.isdir(path) and not _is_prepared(Path(path)):
        found = _data_files(_files_below(path), f"{flag} {path}")
        if not found:
            raise ValueError(
                f"{flag} {path}: has no file that ends in {', '.join(SOURCES)}, and is not "
                f"prepared; name another, or run megatron-sft prepare {path}"
            )
        held_out = set(_held_out(path, found))
        return tuple(name for name in found if name not in held_out)
    if _PATTERN.isdisjoint(path) or os.path.exists(path) or "://" in path:
        return (path,)
    found = _data_files(map(Path, glob.glob(path, recursive=True)), f"{flag} {path}")
    if not found:
        raise ValueError(f"{flag} {path}: matches no file that ends in {', '.join(SOURCES)}")
    return found


def notes_on_held_out(paths: Sequence[str], flag: str) -> list[str]:
    """Returns a line for each folder with files that `expanded` leaves out, and for each pattern
    with files of such names, which it does not leave out.
    """
    notes = []
    for path in paths:
        is_folder = os.path.isdir(path)
        if is_folder and not _is_prepared(Path(path)):
            files = _data_files(_files_below(path), f"{flag} {path}")
        elif is_folder or (files := expanded(path, flag)) == (path,):
            continue
        base = path if is_folder else os.path.commonpath([*files, os.path.dirname(files[0])])
        names = [os.path.relpath(name, base) for name in _held_out(base, files)]
        if names:
            more = " ..." if len(names) > _MAX_LISTED else ""
            outcome, way_out = (
                ("not trained", "pass them to --valid-data-path, or a pattern to train on them")
                if is_folder
                else ("trained", "name a folder, or a narrower pattern, to leave them out")
            )
            notes.append(
                f"{flag} {path}: {len(names)} of {len(files)} files are named as data to validate "
                f"or test with, and are {outcome}: {' '.join(names[:_MAX_LISTED])}{more}; {way_out}"
            )
    return notes


def _held_out(folder: str, files: Sequence[str]) -> list[str]:
    """Returns the files that are named as held-out data, unless all of them are."""
    stems = {name: os.path.splitext(os.path.relpath(name, folder))[0] for name in files}
    held_out = [
        name for name, stem in stems.items() if _HELD_OUT.search(stem) and not _TRAIN.search(stem)
    ]
    return held_out if len(held_out) < len(files) else []


def _files_below(path: str) -> Iterator[Path]:
    """Yields the files of a folder. Folders below it are skipped that are hidden, as those of
    Jupyter's copies, or of runs, checkpoints and models, whose JSON files are no records.
    """
    for folder, folders, names in os.walk(path):
        if folder != path and _is_made_by_runs(names):
            folders.clear()
            continue
        folders[:] = [name for name in folders if not name.startswith(".")]
        yield from (Path(folder, name) for name in names)


def _is_made_by_runs(names: Sequence[str]) -> bool:
    """Returns whether a folder with these files is the folder of a run, a checkpoint, complete or
    not, a model or an adapter.
    """
    is_described = not {"config.json", "adapter_config.json"}.isdisjoint(names)
    return (
        {"options.json", "metrics.jsonl"} <= set(names)
        or bool(fnmatch.filter(names, "*.distcp"))
        or (is_described and any(fnmatch.filter(names, pattern) for pattern in _WEIGHTS))
    )


def one_of(path: str, flag: str) -> str:
    """Returns the single file of a path with a weight. Raises ValueError if there are several."""
    found = expanded(path, flag)
    if len(found) > 1:
        more = " ..." if len(found) > _MAX_LISTED else ""
        raise ValueError(
            f"{flag} {path} has a weight, but stands for {len(found)} files "
            f"({' '.join(found[:_MAX_LISTED])}{more}); give each file its weight"
        )
    return found[0]


def _is_prepared(folder: Path) -> bool:
    return (folder / _PREPARED).is_dir() or any(folder.glob("*.tar"))


def _data_files(paths: Iterable[Path], asked: str) -> tuple[str, ...]:
    """Returns the files of records among `paths`, without hidden ones. Raises ValueError for one
    that has records but cannot be read: nobody would miss a shard that is left out.
    """
    found = []
    for path in sorted(paths, key=str):
        if path.name.startswith(".") or path.name in _OF_DATASETS or not path.is_file():
            continue
        if path.suffix in SOURCES:
            found.append(str(path))
        elif path.suffix.lower() in SOURCES or _is_packed(path):
            raise ValueError(
                f"{asked}: {path.name} would be left out, as no {path.suffix} is read; unpack or "
                "convert it, or give a pattern of the others"
            )
    return tuple(found)


def _is_packed(path: Path) -> bool:
    """Returns whether a file has records in another form: `a.jsonl.gz`, `data.arrow`."""
    return path.suffix == ".arrow" or (
        path.suffix in _PACKED and Path(path.stem).suffix.lower() in SOURCES
    )
