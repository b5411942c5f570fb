"""pure. Short names for sources, for logs: as much of each path as tells it from the others."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import PurePosixPath

from megatron.blending.formats.sources import SOURCES


def short_names(paths: Sequence[str]) -> list[str]:
    """`["data/a/chats.jsonl", "data/b/chats.jsonl", "web/"] -> ["a/chats", "b/chats", "web"]`.

    Without the suffix of a kind of file where that leaves them apart; equal paths are numbered: `chats`, `chats#2`.
    """
    parts = [PurePosixPath(path).parts or (path,) for path in paths]
    levels = [[_ending(part, count, has_suffix) for part in parts] for count, has_suffix in _levels(parts)]
    names = []
    for number in range(len(paths)):
        column = [level[number] for level in levels]
        names.append(next((name for name, level in zip(column, levels) if level.count(name) == 1), column[0]))
    seen: Counter[str] = Counter()
    for number, name in enumerate(names):
        seen[name] += 1
        names[number] = name if seen[name] == 1 else f"{name}#{seen[name]}"
    return names


def _levels(parts: Sequence[tuple[str, ...]]) -> list[tuple[int, bool]]:
    longest = max(map(len, parts), default=1)
    return [(count, has_suffix) for count in range(1, longest + 1) for has_suffix in (False, True)]


def _ending(parts: tuple[str, ...], count: int, has_suffix: bool) -> str:
    path = PurePosixPath(*parts[-count:])
    return str(path if has_suffix or path.suffix not in SOURCES else path.with_suffix(""))
