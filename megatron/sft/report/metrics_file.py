"""pure. `metrics.jsonl`, which `metrics_writer` writes as a run goes; read back for its report.

A run's folder holds `metrics.jsonl`, one JSON object per line, distinguished by "kind":

    {"kind": "event", "event": "run", "iteration": 0, "seq_length": 1024, ...}
    {"kind": "train", "iteration": 1, "loss": 5.61, ...}
    {"kind": "evaluation", "iteration": 1, "split": "valid", "loss": 5.2, "num_tokens": 8192}

Lines stand in the order of their steps, and each is written when its call returns. A run that was
killed and resumed leaves the same steps as one that was never stopped. NaN and infinity are null,
so that every line is valid JSON.
"""

import json
import math
import os
import sys
import typing
from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from megatron.packing.user_files import parse_json
from megatron.sft.report.metrics import (
    FORMER_NAMES,
    Evaluation,
    SourceMetrics,
    StepMetrics,
)

METRICS_FILE = "metrics.jsonl"
PACKS_FILE = "packs.jsonl"
"""A line per step with the lengths of its sequences, by data-parallel rank and microbatch:
{"iteration": 1, "capacity": 1024, "packs": [[[700, 300], [512]], [[1000], [600, 424]]]}
and, where some are trees, "sizes" of all samples, one after the other (`Decision.pack_sizes`)."""

T = TypeVar("T", StepMetrics, Evaluation)


class Metrics(NamedTuple):
    """Content of `metrics.jsonl`."""

    steps: list[StepMetrics]
    evaluations: list[Evaluation]
    events: list[dict[str, Any]]


def read_metrics(run_dir: Path | str) -> Metrics:
    """Reads what `MetricsWriter` wrote, null as NaN; ValueError if there is no file. Damaged lines
    are reported, and left
    out: a run of weeks is not lost for a line.
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
    """Returns whether a line of metrics has all that its kind must have, of the right types."""
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
    """Returns type of each field, and whether it may be missing; but for `sources`, which is of a
    type of its own.
    """
    hints = typing.get_type_hints(kind)
    with_default = {
        one.name: not one.default is one.default_factory is MISSING for one in fields(kind)
    }
    return {name: (hints[name], found) for name, found in with_default.items() if name != "sources"}


def _fits(value: Any, hint: Any) -> bool:
    """Returns whether a value of JSON is of a type: counts are at least 0, and null is a number
    that JSON does not have.
    """
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
    """Returns the dataclass instance that a line was written from, null as NaN."""
    record = {FORMER_NAMES.get(name, name): value for name, value in record.items()}

    def read(cls: type, values: dict[str, Any]) -> dict[str, Any]:
        known = [one.name for one in fields(cls) if one.name in values]
        return {name: math.nan if values[name] is None else values[name] for name in known}

    sources = {
        name: SourceMetrics(**read(SourceMetrics, one))
        for name, one in record.get("sources", {}).items()
    }
    return kind(**{**read(kind, record), "sources": sources})


def json_line(kind: str, **values: object) -> str:
    """Returns a line of JSON, its newline included; a number that JSON doesn't have becomes
    null."""

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
    """Returns whether a line of packs.jsonl is what `PACKS_FILE` says."""
    packs: Any = record.get("packs")
    return (
        _fits(packs, list[list[list[int]]])
        and bool(packs)
        and all(0 not in pack for rank in packs for pack in rank)
        and all(type(record.get(name)) is int for name in ("iteration", "capacity"))
    )


def truncate_after(path: Path, iteration: int) -> None:
    """Cuts a file of JSON lines behind its lines of steps up to `iteration`; a file that isn't
    there is left so.

    Lines without "iteration" stay with the step that follows them, as damaged ones do. What a
    killed run left half-written goes too. The cut is one system call, so it happens whole or not at
    all.
    """
    if not path.exists():
        return
    keep = end = 0
    with path.open("rb") as file:
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
    os.truncate(path, keep)


def read_jsonl(
    path: Path, is_sound: Callable[[dict[str, Any]], bool] = bool
) -> list[dict[str, Any]]:
    """Reads the lines of a file that may still be written to: what stands after its last newline is
    left out. So are lines that are no objects of JSON or not `is_sound`, and a note on stderr names
    them.
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
