"""pure. Short names of sources for logs and metrics: the end of a path that no other path has."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import PurePosixPath

from megatron.blending.formats.sources import SOURCES


def short_names(paths: Sequence[str]) -> list[str]:
    """Returns a name for each path:
    `["data/a/chats.jsonl", "data/b/chats.jsonl", "web/"] -> ["a/chats", "b/chats", "web"]`.

    The suffix of a data file (.jsonl) is left out if the names differ without it. Equal paths are
    numbered: `chats`, `chats#2`.
    """
    parts = [PurePosixPath(path).parts or (path,) for path in paths]
    longest = max(map(len, parts), default=1)
    # Every path at growing length: chats, chats.jsonl, a/chats, a/chats.jsonl, ... A path takes the
    # first of its forms that no other path has at the same length.
    levels = [
        [_ending(part, count, has_suffix) for part in parts]
        for count in range(1, longest + 1)
        for has_suffix in (False, True)
    ]
    names = []
    for number in range(len(paths)):
        unique = (level[number] for level in levels if level.count(level[number]) == 1)
        names.append(next(unique, levels[0][number]))
    return _numbered(names)


def _ending(parts: tuple[str, ...], count: int, has_suffix: bool) -> str:
    path = PurePosixPath(*parts[-count:])
    return str(path if has_suffix or path.suffix not in SOURCES else path.with_suffix(""))


def _numbered(names: Sequence[str]) -> list[str]:
    """`["a", "b", "a"] -> ["a", "b", "a#2"]`."""
    seen: Counter[str] = Counter()
    numbered = []
    for name in names:
        seen[name] += 1
        numbered.append(name if seen[name] == 1 else f"{name}#{seen[name]}")
    return numbered
