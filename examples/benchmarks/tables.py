"""pure. Reads records as libraries of tables wrote them, beside the same records in Python.

    make tables

`tables_written` writes the files. The page says of each whether a template gets the same turns,
calls and tools.
"""

from __future__ import annotations

import argparse
import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from datetime import date
from pathlib import Path
from typing import Any

from megatron.blending.metadatasets.metadataset import load_metadataset
from megatron.blending.metadatasets.tree import source_entries
from megatron.sft.data.chat_encoder import ChatEncoder
from megatron.sft.data.chats import ChatLoad, open_chats
from megatron.sft.data.record_notes import notes_on_records
from megatron.sft.data.records.formats import Reading
from megatron.sft.data.tokenizer import build_tokenizer

_ABOUT = """\
- `=`: the same turns, calls, tools, weights and ids, numbers to the last digit.
- `order`: the same with keys of arguments or schemas in another order, which a template writes.
- `note`: other ones, and a line at the start of a run says so.
- `no`: refused, in a line with the way out.
- `lost`: other ones, without a word: the library rounded, respelled or dropped a value before it
  wrote the file.
- Nothing: the library does not write such records.

Spark sorts the keys of all objects by name, leaves out empty ones (no arguments, a schema `{}`: 13,
19, 26), and writes JSON without nulls (17, 18). jq rounds whole numbers above 2^53, even where
nothing touches them (15). Arguments as JSON text keep their digits, nulls and order in each.
"""


class _Notes(logging.Handler):
    """Lines that a run would print, but for the list of keys that are not read."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        line = record.getMessage()
        if not line.startswith("not read of records"):
            self.lines.append(line)


def _comparable(reading: Reading) -> str:
    return json.dumps([_plain(reading.content), reading.weight])


def _sorted(texts: Sequence[str]) -> list[str]:
    return [json.dumps(json.loads(text), sort_keys=True) for text in texts]


def _plain(value: Any) -> Any:
    if hasattr(value, "_asdict"):
        return _plain(value._asdict())
    if isinstance(value, Mapping):
        return {key: _plain(part) for key, part in value.items()}
    if hasattr(value, "tolist"):
        return value.tolist()
    return [_plain(part) for part in value] if isinstance(value, (list, tuple)) else value


def outcome(path: Path, records: list[dict[str, Any]]) -> str:
    """Returns how a file is read: one of the words of the page."""
    encoder = ChatEncoder(build_tokenizer("ByteLevelTokenizer"), 1 << 20, "error")
    notes = _Notes()
    logger = logging.getLogger("megatron.sft.data")
    logger.handlers, logger.propagate = [notes], False
    expected = [_comparable(encoder.read(record)) for record in records]
    try:
        (entry,) = source_entries(load_metadataset(str(path), "train"))
        opened = open_chats(entry, encoder)
        assert isinstance(opened.load, ChatLoad)
        read = [
            _comparable(opened.load.read(opened.source[number])) for number in range(len(opened))
        ]
    except ValueError as error:
        return "no" if "\n" not in str(error) else "many lines"
    if read == expected:
        return "="
    if _sorted(read) == _sorted(expected):
        return "order"
    return "note" if notes.lines or notes_on_records([opened]) else "lost"


def table(folder: Path) -> Iterator[str]:
    """Yields the lines of a Markdown table: a row for each way to write, a column for each kind."""
    kinds: dict[str, list[dict[str, Any]]] = json.loads((folder / "records.json").read_text())
    ways = sorted(
        {path.name for number in range(len(kinds)) for path in (folder / str(number)).iterdir()}
    )
    yield f"| written by | {' | '.join(str(number) for number in range(len(kinds)))} |"
    yield "|---" * (len(kinds) + 1) + "|"
    for way in ways:
        paths = [folder / str(number) / way for number in range(len(kinds))]
        cells = [
            outcome(path, records) if path.exists() else ""
            for path, records in zip(paths, kinds.values())
        ]
        yield f"| {way.rpartition('.')[0]} ({way.rpartition('.')[2]}) | {' | '.join(cells)} |"
    yield ""
    yield from (f"{number}. {kind}" for number, kind in enumerate(kinds))


def main() -> None:
    """Writes the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--versions", required=True, help="of the libraries, for the page")
    parser.add_argument("--write", type=Path, required=True)
    options = parser.parse_args()
    lines = "\n".join(table(options.folder))
    counts = ", ".join(
        f"{lines.count(f'| {word} '):,} `{word}`" for word in ("=", "order", "note", "no", "lost")
    )
    options.write.write_text(
        f"# What data libraries change before a record is read\n\n{date.today()}, "
        f"{options.versions}; `make tables`. Of all files: {counts}.\n\n{_ABOUT}\n{lines}\n"
    )
    print(counts)


if __name__ == "__main__":
    main()
