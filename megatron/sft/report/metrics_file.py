"""pure. `metrics.jsonl`: written as a run goes, beside boards and what the user sees; read back for
its report.

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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, asdict, fields
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from megatron.packing.user_files import parse_json
from megatron.sft.report.boards import Board
from megatron.sft.report.line_file import LineFile
from megatron.sft.report.metrics import (
    DERIVED,
    DRAWN,
    DRAWN_OF_EVALUATIONS,
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
_MAX_SHOWN = 100

T = TypeVar("T", StepMetrics, Evaluation)


class MetricsWriter:
    """Writes a run's metrics to its file and to boards, and shows a progress bar on a terminal or
    else log lines.

    Made by one process of the run. Price: one small write per call, no host sync.
    """

    def __init__(
        self,
        run_dir: Path | str,
        *,
        train_iters: int,
        log_interval: int,
        resume_iteration: int | None = None,
        boards: Sequence[Board] = (),
    ) -> None:
        """Opens the file; `boards` are closed with it.

        A run that resumes after `resume_iteration` steps drops the lines of later steps; without it
        the run is a new one and its file starts empty. Where there is no terminal, every
        `log_interval`-th step gets a line on stdout.
        """
        path = Path(run_dir) / METRICS_FILE
        path.parent.mkdir(parents=True, exist_ok=True)
        truncate_after(path, -1 if resume_iteration is None else resume_iteration)
        self._file = LineFile(path)
        self._boards = list(boards)
        self._train_iters = train_iters
        self._log_interval = log_interval
        self._bar = (
            progress_bar(train_iters, resume_iteration or 0) if sys.stderr.isatty() else None
        )

    def step(self, metrics: StepMetrics) -> None:
        """Writes and shows one training step."""
        derived = {name: getattr(metrics, name) for name in DERIVED}
        # The order of the fields of StepMetrics, those of its packs last.
        values = dict.fromkeys(StepMetrics.__annotations__) | asdict(metrics) | derived
        if not metrics.delays:
            del values["delays"], values["waiting"]
        self._file.write(json_line("train", **_with_former_names(values)))
        drawn = {f"train/{name}": getattr(metrics, name) for name in DRAWN}
        drawn |= {f"train/loss of {name}": source.loss for name, source in metrics.sources.items()}
        drawn |= {f"train/{name}": value for name, value in metrics.figures.items()}
        self._add_to_boards(drawn, metrics.iteration)
        if self._bar is not None:
            self._bar.set_postfix_str(metrics.to_postfix(), refresh=False)
            self._bar.update(metrics.iteration - self._bar.n)
        elif metrics.iteration % self._log_interval == 0:
            print(metrics.to_line(self._train_iters), flush=True)

    def evaluation(self, evaluation: Evaluation) -> None:
        """Writes and shows the loss over held-out data."""
        drawn = {name: getattr(evaluation, name) for name in DRAWN_OF_EVALUATIONS}
        self._file.write(json_line("evaluation", **_with_former_names(asdict(evaluation) | drawn)))
        self._add_to_boards(
            {
                f"{evaluation.split}/{name}": value
                for name, value in drawn.items()
                if math.isfinite(value)
            },
            evaluation.iteration,
        )
        self._say(evaluation.to_line())

    def answers(self, iteration: int, answers: Sequence[tuple[str, str]]) -> None:
        """Writes and shows (prompt, answer) of the model in training."""
        pairs = [{"prompt": prompt, "answer": answer} for prompt, answer in answers]
        self.event("answers", iteration=iteration, answers=pairs)
        for prompt, answer in answers:
            self._say(f"answer after step {iteration} | {answer_line(prompt, answer)}")

    def _say(self, line: str) -> None:
        if self._bar is not None:
            self._bar.write(line)
        else:
            print(line, flush=True)

    def event(self, name: str, **fields: object) -> None:
        """Writes something that happened, `event("run", iteration=0, seq_length=1024,
        global_batch_size=16)`.

        With an `iteration` the line lasts or falls with that step when the run is resumed.
        """
        self._file.write(json_line("event", event=name, **fields))

    def _add_to_boards(self, values: dict[str, float], iteration: int) -> None:
        for board in [*self._boards]:
            try:
                board.add(values, iteration)
            except Exception as error:
                # Any error of a board's library, files or service is no reason to end a run.
                self._boards.remove(board)
                print(f"note: {_failed(board, error)}; training continues without it", flush=True)

    def close(self) -> None:
        """Closes the file, the boards and the progress bar."""
        self._file.close()
        for board in self._boards:
            try:
                board.close()
            except Exception as error:
                print(f"note: {_failed(board, error)}", flush=True)
        if self._bar is not None:
            self._bar.close()


def answer_line(prompt: str, answer: str) -> str:
    """Returns `question -> answer`, each at most 100 characters of one line."""

    def short(text: str) -> str:
        line = " ".join(text.split())
        return line if len(line) <= _MAX_SHOWN else f"{line[: _MAX_SHOWN - 3]}..."

    return f"{short(prompt)} -> {short(answer)}"


def _with_former_names(values: Mapping[str, Any]) -> dict[str, Any]:
    return {**values, **{old: values[new] for old, new in FORMER_NAMES.items()}}


def _failed(board: Board, error: Exception) -> str:
    return (
        f"{type(board).__name__} failed ({type(error).__name__}: "
        f"{' '.join(str(error).split()):.200})"
    )


def progress_bar(train_iters: int, done: int) -> Any:
    """Returns a bar over the run's steps on stderr."""
    from tqdm import tqdm

    return tqdm(total=train_iters, initial=done, unit="step", dynamic_ncols=True)


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
    """Type of each field, and whether it may be missing; but for `sources`, which is of a type of
    its own.
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
