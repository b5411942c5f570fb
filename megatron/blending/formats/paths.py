"""pure. Paths in files: local paths or URLs, relative to the file that names them."""

import os
import posixpath
import re

from megatron.blending.arguments import nearest

URL = "://"
_YAML_SUFFIXES = (".yaml", ".yml")


def resolve_path(path: str, beside: str) -> str:
    """Returns the location that the file `beside` means by `path`. Absolute paths and URLs are
    kept; any other path is relative to the folder of `beside`. `~` and `${VARIABLE}` are expanded.
    Raises ValueError for a variable that is not set.

    `resolve_path("a.jsonl", "/data/blend.yaml") -> "/data/a.jsonl"`
    """
    missing = [name for name in re.findall(r"\$\{(\w+)\}", path) if name not in os.environ]
    if missing:
        raise ValueError(f"{path}: the environment has no variable {missing[0]}; export it")
    path = os.path.expanduser(os.path.expandvars(path))
    if URL in path or os.path.isabs(path):
        return path
    if URL in beside:
        scheme, rest = beside.split(URL, 1)
        return scheme + URL + posixpath.normpath(posixpath.join(posixpath.dirname(rest), path))
    return os.path.normpath(os.path.join(os.path.dirname(beside), path))


def is_metadataset(path: str | os.PathLike[str]) -> bool:
    return os.fspath(path).lower().endswith(_YAML_SUFFIXES)


def is_folder(path: str) -> bool:
    """Returns whether a local path is a folder. A URL is assumed to be one if its last part has no
    suffix.
    """
    return os.path.isdir(path) if URL not in path else not posixpath.splitext(path)[1]


def check_exists(path: str, where: str) -> None:
    """Raises ValueError, with the most similar name, if a local path does not exist. A .bin file
    may be named without its suffix.
    """
    if URL in path or os.path.exists(path) or os.path.exists(path + ".bin"):
        return
    missing, folder = path, os.path.dirname(path) or "."
    while not os.path.isdir(folder) and os.path.dirname(folder) != folder:
        missing, folder = folder, os.path.dirname(folder) or "."
    there = sorted(os.listdir(folder))[:20] if os.path.isdir(folder) else []
    hint = nearest(os.path.basename(missing), there, f"in {folder} there")
    raise ValueError(f"{where}: {path}: no such file or folder; {hint}".removeprefix(": "))
