"""pure. The format of `metrics.jsonl` in the folder of a run, and reading it. `metrics_writer`
writes it.

Each line is a JSON object of one of three kinds:

    {"kind": "event", "event": "run", "iteration": 0, "seq_length": 1024, ...}
    {"kind": "train", "iteration": 1, "loss": 5.61, ...}
    {"kind": "evaluation", "iteration": 1, "split": "valid", "loss": 5.2, "num_tokens": 8192}

Lines are in the order of their steps. A run that was killed and resumed has the same steps as one
that was never stopped. NaN and infinity are written as null, so that every line is valid JSON.
"""

import json
import math
import sys
import typing
from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from megatron.packing.folder_gate import open_output
from megatron.packing.user_files import parse_json
from megatron.sft.report.metrics import (
    Evaluation,
    SourceMetrics,
    StepMetrics,
)

METRICS_FILE = "metrics.jsonl"
PACKS_FILE = "packs.jsonl"
"""File with a line per step: the lengths of its sequences, by data-parallel rank and microbatch. If
some samples are trees, "sizes" has those of all samples in order (`Decision.pack_sizes`).

{"iteration": 1, "capacity": 1024, "packs": [[[700, 300], [512]], [[1000], [600, 424]]]}
"""

T = TypeVar("T", StepMetrics, Evaluation)


class Metrics(NamedTuple):
    """Content of `metrics.jsonl`."""

    steps: list[StepMetrics]
    evaluations: list[Evaluation]
    events: list[dict[str, Any]]


def read_metrics(run_dir: Path | str) -> Metrics:
    """Reads `metrics.jsonl`, null as NaN. Damaged lines are reported and skipped: one line must not
    cost the report of a run of weeks. Raises ValueError if there is no file.
    """
    path = Path(run_dir) / METRICS_FILE
    if not path.is_file():
        raise ValueError(
            f"{path} must be the metrics of a run, but there is no such file; give the folder of a "
            "run"
        )
    metrics = Metrics(steps=[], evaluations=[], events=[])
    for record in read_jsonl(path, _is_line):
        if record["kind"] == "event":
            metrics.events.append(record)
        elif record["kind"] == "evaluation":
            metrics.evaluations.append(from_record(Evaluation, record))
        else:
            metrics.steps.append(from_record(StepMetrics, record))
    return metrics


def _is_line(record: dict[str, Any]) -> bool:
    """Returns whether a line has all fields of its kind, in the right types."""
    if record.get("kind") == "event":
        event = record.get("event")
        return isinstance(event, str) and (
            event not in ("run", "resumed") or type(record.get("seq_length")) is int
        )
    kind = {"train": StepMetrics, "evaluation": Evaluation}.get(str(record.get("kind")))
    if kind is None or not _fits(record.get("sources", {}), Mapping[str, Mapping[str, Any]]):
        return False
    return _has_fields(record, kind) and all(
        _has_fields(source, SourceMetrics) for source in record.get("sources", {}).values()
    )


def _has_fields(values: Mapping[str, Any], kind: type) -> bool:
    columns = _columns(kind).items()
    return all(
        _fits(values[name], hint) if name in values else has_default
        for name, (hint, has_default) in columns
    )


@cache
def _columns(kind: Any) -> dict[str, tuple[Any, bool]]:
    """Returns (type, whether it may be missing) by field. `sources` is left out: its values are
    objects of their own.
    """
    hints = typing.get_type_hints(kind)
    with_default = {
        one.name: not one.default is one.default_factory is MISSING for one in fields(kind)
    }
    return {name: (hints[name], found) for name, found in with_default.items() if name != "sources"}


def _fits(value: Any, hint: Any) -> bool:
    """Returns whether a JSON value has a type. An int must be at least 0; null is a float, NaN."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is list:
        return isinstance(value, list) and all(_fits(part, arguments[0]) for part in value)
    if origin is not None:
        return isinstance(value, dict) and all(_fits(part, arguments[1]) for part in value.values())
    if hint is int:
        return type(value) is int and value >= 0
    return (
        value is None or type(value) in (int, float)
        if hint is float
        else hint is Any or isinstance(value, hint)
    )


def from_record(kind: type[T], record: dict[str, Any]) -> T:
    """Returns the object of the class `kind` that a line was written from, null as NaN."""

    def read(cls: type, values: dict[str, Any]) -> dict[str, Any]:
        known = [one.name for one in fields(cls) if one.name in values]
        return {name: math.nan if values[name] is None else values[name] for name in known}

    sources = {
        name: SourceMetrics(**read(SourceMetrics, one))
        for name, one in record.get("sources", {}).items()
    }
    return kind(**{**read(kind, record), "sources": sources})


def json_line(kind: str, **values: object) -> str:
    """Returns a line of JSON with its newline. NaN and infinity become null."""

    def valid(value: object) -> object:
        if isinstance(value, dict):
            return {name: valid(part) for name, part in value.items()}
        return None if isinstance(value, float) and not math.isfinite(value) else value

    return (
        json.dumps(
            {"kind": kind, **{name: valid(value) for name, value in values.items()}},
            allow_nan=False,
        )
        + "\n"
    )


def is_packs(record: dict[str, Any]) -> bool:
    """Returns whether a line of packs.jsonl has the form shown at `PACKS_FILE`."""
    packs: Any = record.get("packs")
    return (
        _fits(packs, list[list[list[int]]])
        and bool(packs)
        and all(0 not in pack for rank in packs for pack in rank)
        and all(type(record.get(name)) is int for name in ("iteration", "capacity"))
    )


def truncate_after(path: Path, iteration: int) -> None:
    """Removes the lines of steps after `iteration` from a file of JSON lines. A missing file is
    ignored.

    Lines without "iteration", and damaged ones, are kept or removed with the step after them. A
    half-written line at the end is removed. The file is truncated by a single system call.
    """
    if not path.exists():
        return
    # `end` is the end of the line read last. `keep` follows it only at lines of steps, so that
    # lines without a step before a removed one are removed with it.
    keep = end = 0
    with open_output(path, "r+b") as file:
        for line in file:
            if not line.endswith(b"\n"):
                break
            end += len(line)
            line_iteration = (_parsed(line) or {}).get("iteration")
            if type(line_iteration) is not int:
                continue
            if line_iteration > iteration:
                break
            keep = end
        file.truncate(keep)


def read_jsonl(
    path: Path, is_sound: Callable[[dict[str, Any]], bool] = bool
) -> list[dict[str, Any]]:
    """Returns the lines of a file that may still be written to: a last line without a newline is
    ignored. Lines that are not JSON objects, or not `is_sound`, are skipped, with a note on stderr.
    """
    records = []
    damaged = []
    for number, line in enumerate(path.read_bytes().split(b"\n")[:-1], 1):
        record = _parsed(line)
        if record is not None and is_sound(record):
            records.append(record)
        else:
            damaged.append(number)
    if damaged:
        more = f" and {len(damaged) - 1} more lines" if len(damaged) > 1 else ""
        print(f"note: {path}:{damaged[0]}{more}: damaged, and left out", file=sys.stderr)
    return records


def _parsed(line: bytes) -> dict[str, Any] | None:
    try:
        record = parse_json(line.decode())
    except ValueError:
        return None
    return record if isinstance(record, dict) else None
