"""pure. Reads a JSON file with a list of objects. The whole list is kept in memory: it is for small
files.

Invariant: each read returns new objects, so that changing one has no effect on later epochs.
"""

import pickle

from megatron.blending.formats.files import open_file
from megatron.blending.formats.json_text import parse_json
from megatron.blending.formats.other_forms import HEAD_BYTES, encoding_fault
from megatron.blending.formats.record import FileSource, Record, RecordError, check_index


class JsonArraySource(FileSource):
    """The objects of a JSON list, counted from 0. Each is kept pickled, and unpickled by a read."""

    def _open(self) -> None:
        path = self._path
        self._file = open_file(path)
        content = self._file.read(0, self._file.size)
        fault = encoding_fault(path, content[:HEAD_BYTES])
        if fault is not None:
            raise ValueError(f"{path}: {fault}")
        try:
            text = content.decode("utf-8-sig")
        except UnicodeDecodeError as error:
            raise ValueError(
                f"{path}: not UTF-8 at byte {error.start + 1}; convert the file"
            ) from error
        items = parse_json(
            path,
            text,
            "fix the file, or, if it holds objects one after the other, write one per line into a "
            f".jsonl: jq -c . {path}",
        )
        if not isinstance(items, list):
            raise ValueError(
                f"{path}: must hold a list of objects, but holds a {type(items).__name__}; write "
                "one (pandas: orient='records')"
            )
        self._items = [pickle.dumps(item, pickle.HIGHEST_PROTOCOL) for item in items]

    def __len__(self) -> int:
        return len(self._items)

    def __getitem__(self, index: int) -> Record:
        check_index(index, self)
        item = pickle.loads(self._items[index])
        if not isinstance(item, dict):
            raise RecordError(
                f"{self.describe(index)}: must be a JSON object, but is a {type(item).__name__}; "
                "fix the item"
            )
        return item

    def describe(self, index: int) -> str:
        return f"{self._path} item {index}"
