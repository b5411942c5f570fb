"""pure. Files of JSON lines that a run may be killed over: written valid, cut back, read as far as they are whole."""

import json
import math
import os
from pathlib import Path
from typing import Any


def json_line(kind: str, **values: Any) -> str:
    """One line; a number that JSON doesn't have becomes null."""

    def valid(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: valid(part) for name, part in value.items()}
        return None if isinstance(value, float) and not math.isfinite(value) else value

    return json.dumps({"kind": kind, **{name: valid(value) for name, value in values.items()}}, allow_nan=False)


def truncate_after(path: Path, iteration: int) -> None:
    """Cuts a file of JSON lines behind its lines of steps up to `iteration`; a file that isn't there is left so.

    Lines without "iteration" stay with the step that follows them. What a killed run left half-written goes too. The
    cut is one system call, so it happens whole or not at all.
    """
    if not path.exists():
        return
    keep = end = 0
    with path.open("rb") as file:
        for line in file:
            if not line.endswith(b"\n"):
                break
            end += len(line)
            line_iteration = json.loads(line).get("iteration")
            if line_iteration is None:
                continue
            if line_iteration > iteration:
                break
            keep = end
    os.truncate(path, keep)


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """The lines of a file that may still be written to: what stands after its last newline is left out."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n")[:-1]]
