"""pure. Expands folders and patterns in --data-path to files."""

from __future__ import annotations

import fnmatch
import glob
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from megatron.blending.formats.sources import SOURCES

_PATTERN = set("*?[")
_PREPARED = ".nv-meta"
_WEIGHTS = ("*.safetensors", "pytorch_model*.bin", "adapter_model.bin", "*.index.json")
"""Names of weight files of models and adapters, by any library."""
_MAX_LISTED = 5


def expanded(path: str, flag: str) -> tuple[str, ...]:
    """Returns the sorted files of a folder or pattern. A file, a URL and a prepared folder are
    returned as they are. Raises ValueError, naming `flag`, if there is no file of records.

    `"data/*.jsonl" -> ("data/a.jsonl", "data/b.jsonl")`
    """
    if os.path.isdir(path) and not _is_prepared(Path(path)):
        found = _data_files(_files_below(path))
        if not found:
            raise ValueError(
                f"{flag} {path}: has no file that ends in {', '.join(SOURCES)}, and is not "
                f"prepared; name another, or run megatron-sft prepare {path}"
            )
        return found
    if _PATTERN.isdisjoint(path) or os.path.exists(path) or "://" in path:
        return (path,)
    found = _data_files(map(Path, glob.glob(path, recursive=True)))
    if not found:
        raise ValueError(f"{flag} {path}: matches no file that ends in {', '.join(SOURCES)}")
    return found


def _files_below(path: str) -> Iterator[Path]:
    """Yields the files of a folder. Folders of runs, checkpoints and models below it are skipped:
    their JSON files are no records.
    """
    for folder, folders, names in os.walk(path):
        if folder != path and _is_made_by_runs(names):
            folders.clear()
            continue
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


def _data_files(paths: Iterable[Path]) -> tuple[str, ...]:
    """Returns the files of records among `paths`, without hidden ones."""
    return tuple(
        sorted(
            str(path)
            for path in paths
            if path.suffix in SOURCES and path.is_file() and not path.name.startswith(".")
        )
    )
