"""Every fault of the matrix in every layout: python -m tests.functional_tests.faults --layouts DP2

Each is a run of 6 steps that continues step 2 and goes wrong; then, where it ended, the same run
without the fault. It must give the losses of one that was never disturbed. What must hold:

    nobody hangs, nobody is left, no rank says that it went well
    all ranks are gone within 5 seconds of a fault; of one that stops a rank, within the timeout of
        groups
    one line tells the rank and the cause, also where torchrun takes its summary from; without a
        launcher, each rank prints it
    who was only slow, or stopped for a while, trains on to the same end
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch

from tests.functional_tests.fault_injection import (
    AT_START,
    COVERED,
    ENDS,
    LAYOUTS,
    MATRIX,
    PHASE_OF,
    Fault,
    Layout,
)
from tests.functional_tests.forked_runs import launch

GROUP_TIMEOUT_SECONDS = 9.0
LONGEST_SECONDS = 10.0
"""In which ranks are gone after their launcher, or a rank, was killed at any moment."""
NOTICED_SECONDS = {"STOP": GROUP_TIMEOUT_SECONDS}
"""In which all other ranks are gone after a fault, by its kind."""
OTHERS_NOTICED_SECONDS = 5.0
EXACT = (
    "loss",
    "grad_norm",
    "lr",
    "tokens",
    "square_sum",
    "num_loss_tokens",
    "sequences",
    "consumed_samples",
)
OPTIONS = (
    "--num-layers 2 --hidden-size 16 --num-attention-heads 2 --seq-length 96 "
    "--position-embedding-type rope --global-batch-size 4 --lr 1e-2 --sequence-packing "
    "--swiglu --normalization RMSNorm --disable-bias-linear "
    "--over-length-policy truncate --train-iters 6 --save-interval 2 --eval-interval 2 "
    f"--eval-iters 1 --distributed-timeout-minutes {GROUP_TIMEOUT_SECONDS / 60}"
).split()


class Case(NamedTuple):
    """A fault in a layout; None is the run that nothing disturbs."""

    fault: Fault | None
    layout: str


class Outcome(NamedTuple):
    """What became of a case."""

    case: Case
    failures: list[str]
    seconds: float
    """From the fault to the end of the last rank, or of the last but the stopped one."""
    said: str


class Running:
    """A case under way: the run that goes wrong, then the one that continues it."""

    def __init__(self, case: Case, root: Path) -> None:
        self.case = case
        self._layout = LAYOUTS[case.layout]
        self._root = root
        self._folder = root / f"{case.layout}-{case.fault}".replace(" ", "_")
        self._reference = root / f"{reference_layout(case.layout)}-None"
        self._failures: list[str] = []
        self._seconds, self._said = 0.0, ""
        self._is_faulty = case.fault is not None
        if self._is_faulty:
            shutil.copytree(self._reference / "run", self._folder / "run")
            (self._folder / "run/checkpoints/latest_checkpointed_iteration.txt").write_text("2")
            for step in (4, 6):
                shutil.rmtree(self._folder / f"run/checkpoints/iter_{step:07d}")
        self._process = self._start(case.fault)

    def _start(self, fault: Fault | None) -> int:
        run = self._folder / "run"
        arguments = [
            *OPTIONS,
            *self._layout.flags.split(),
            *("--data-path", os.environ["DATA"], "--run-dir", str(run)),
            *("--save", str(run / "checkpoints"), "--load", str(run / "checkpoints")),
            *(fault.options(run) if fault is not None else ()),
        ]
        rank = fault.rank(self._layout) if fault is not None else -1
        return launch(
            self._attempt(),
            self._layout.world_size,
            arguments,
            fault,
            rank,
            has_launcher=self._layout.has_launcher,
        )

    def _attempt(self) -> Path:
        return self._folder / ("faulty" if self._is_faulty else "whole")

    def poll(self) -> Outcome | None:
        """The outcome, once there is one."""
        if not os.waitpid(self._process, os.WNOHANG)[0]:
            return None
        path = self._attempt() / "outcome.json"
        if not path.exists():
            self._failures.append("the launcher failed")
            return self._outcome()
        found = json.loads(path.read_text())
        if self._is_faulty:
            self._judge(found)
            if self.case.fault is not None and self.case.fault.kind not in ENDS:
                return self._outcome()  # it was delayed, and trained to its end
            if self.case.fault is not None and self.case.fault.stage in AT_START:
                return self._outcome()  # nothing was written
            self._is_faulty = False
            self._process = self._start(None)
            return None
        if any(found["codes"]) or found["hangs"]:
            self._failures.append(f"continued: exit codes {found['codes']}")
        elif self.case.fault is not None and steps_of(self._folder / "run") != steps_of(
            self._reference / "run"
        ):
            self._failures.append("continued with other losses")
        return self._outcome()

    def _judge(self, found: dict) -> None:
        fault = self.case.fault
        assert fault is not None
        codes = found["codes"]
        rank = fault.rank(self._layout)
        if found["hangs"]:
            self._failures.append("hangs")
        if found["num_orphans"]:
            self._failures.append(f"{found['num_orphans']} orphans")
        if fault.kind not in ENDS:
            if any(codes):
                self._failures.append(f"exit codes {codes}")
            elif steps_of(self._folder / "run") != steps_of(self._reference / "run"):
                self._failures.append("other losses")
            return
        if not all(codes):
            self._failures.append(f"exit codes {codes}")
        self._judge_time(found, fault, rank)
        self._judge_lines(found, fault, rank)

    def _judge_time(self, found: dict[str, Any], fault: Fault, rank: int) -> None:
        """Judge how long the others took to end. Some faults, as other options, have no moment."""
        ends = found["ends"]
        counted = [end for number, end in enumerate(ends) if fault.kind != "STOP" or number != rank]
        path = self._attempt() / "moment"
        moment = float(path.read_text()) - found["start"] if path.exists() else min(ends)
        self._seconds = max(counted) - moment
        longest = NOTICED_SECONDS.get(fault.kind, OTHERS_NOTICED_SECONDS)
        if fault.stage in ("encode", "stream"):
            longest = LONGEST_SECONDS  # of a lost worker, or the end of the data: ranks save first
        if self._seconds > longest:
            self._failures.append(f"{self._seconds:.1f} s until all were gone")

    def _judge_lines(self, found: dict[str, Any], fault: Fault, rank: int) -> None:
        """Judge what the ranks said."""
        codes, ends = found["codes"], found["ends"]
        logs = [(self._attempt() / f"rank{number}.log").read_text() for number in range(len(codes))]
        lines_of_ranks = [
            re.findall(r"^pretrain_sft.py: error: (.*)", log, re.MULTILINE) for log in logs
        ]
        is_silent = fault.kind in ("KILL", "STOP") and fault.stage != "encode"  # by another process
        first = min(
            (number for number in range(len(ends)) if number != rank or fault.kind != "STOP"),
            key=lambda number: ends[number],
        )
        error = self._attempt() / f"error{first}.json"
        if error.exists():
            summary = json.loads(error.read_text())["message"]["message"]
        else:
            summary = f"rank {first}: {codes[first]}"
        lines = [line for lines in lines_of_ranks for line in lines]
        self._said = (lines or [summary])[0]
        if not self._layout.has_launcher:
            said = [(1 - is_silent) if number == rank else 1 for number in range(len(codes))]
            if list(map(len, lines_of_ranks)) != said or len(set(lines)) != 1:
                self._failures.append(f"messages of each rank: {lines_of_ranks}")
            summary = self._said
        # Before it handles signals, a rank is ended by the launcher, which names the killed one.
        elif len(lines) != 1 and not (fault.kind == "KILL" and fault.stage in AT_START):
            self._failures.append(f"{len(lines)} messages")
        cause = {
            "exception": f"injected in {fault.stage}",
            "refused": f"injected in {fault.stage}",
            "disk full": "No space left on device",
            "end of data": "end of the data|data ended",
            "other data": "data",
            "other options": "--lr is 0.02|--hidden-size is 32",
        }.get(fault.kind, "")
        for text in (self._said, summary):
            if not re.search(rf"\brank {rank}\b", text) or not re.search(cause, text):
                self._failures.append(f"told: {text}")
                break
        if (tracebacks := "".join(logs).count("Traceback (most recent call last)")) > 1:
            self._failures.append(f"{tracebacks} tracebacks")

    def _outcome(self) -> Outcome:
        if not self._failures and self.case.fault is not None:
            shutil.rmtree(self._folder)
        return Outcome(self.case, self._failures, self._seconds, self._said)


def outcomes(cases: list[Case], root: Path, at_once: int) -> Iterator[Outcome]:
    """Runs all, some at a time; the undisturbed run of each layout before its others."""
    waiting, running = list(cases), list[Running]()
    while waiting or running:
        while waiting and len(running) < at_once:
            running.append(Running(waiting.pop(0), root))
        for case in list(running):
            outcome = case.poll()
            if outcome is not None:
                running.remove(case)
                yield outcome
        time.sleep(0.02)


def reference_layout(layout: str) -> str:
    """The layout whose undisturbed run has the same losses."""
    return layout.removesuffix(" alone")


def is_distinct(fault: Fault, layout: Layout) -> bool:
    """Whether this is not the same in this layout as the fault on rank 0."""
    is_twin = fault.kind in ("KILL", "STOP") and fault.on_last
    return not (is_twin and fault.rank(layout) == 0)


def covering(cases: list[Case]) -> list[Case]:
    """Greedily the fewest cases that have each kind (on rank 0 and on another), phase and layout of
    all: small worlds first, kinds in turns.
    """

    def features(case: Case) -> set[str]:
        assert case.fault is not None
        phase = PHASE_OF[case.fault.stage]
        return {f"{case.fault.kind}, {case.fault.on_last}", phase, case.layout}

    def worth(case: Case) -> tuple[float, int]:
        is_new = len(features(case) & missing)
        return is_new / (2 + LAYOUTS[case.layout].world_size), -sum(
            len(features(case) & features(c)) for c in chosen
        )

    missing = set().union(*map(features, cases))
    chosen: list[Case] = []
    while missing:
        chosen.append(max(cases, key=worth))
        missing -= features(chosen[-1])
    return chosen


def table(results: list[dict[str, Any]]) -> str:
    """As Markdown: a row for each fault, a column for each layout."""
    found = {(tuple(result["case"][0]), result["case"][1]): result for result in results}
    lines = [f"| fault | {' | '.join(LAYOUTS)} |", f"|---{'|---' * len(LAYOUTS)}|"]
    for fault in MATRIX:
        cells = []
        for layout in LAYOUTS:
            result = found.get((tuple(fault), layout))
            if result is None:
                cells.append("not run")
            elif result["failures"]:
                cells.append("; ".join(result["failures"]))
            else:
                cells.append(f"{result['seconds']:.1f}" if fault.kind in ENDS else "continues")
        lines.append(f"| {fault} | {' | '.join(cells)} |")
    return "\n".join(lines)


def steps_of(run: Path) -> dict[int, dict[str, float]]:
    """What each step of a run must share with the same run undisturbed."""
    path = run / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    records = [json.loads(line) for line in lines if line.endswith("}")]
    steps = (record for record in records if record["kind"] == "train")
    return {record["iteration"]: {name: record[name] for name in EXACT} for record in steps}


def write_chats(path: Path, number: int) -> None:
    with path.open("w") as file:
        for i in range(number):
            messages = [
                {"role": "user", "content": f"{i}?"},
                {"role": "assistant", "content": "yes " * (1 + i * 7 % 29)},
            ]
            file.write(json.dumps({"messages": messages}) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layouts", nargs="+", choices=LAYOUTS, default=list(LAYOUTS))
    parser.add_argument("--covering", action="store_true", help="the part that every test run does")
    parser.add_argument("--only", default="", help="faults whose name matches this expression")
    parser.add_argument(
        "--at-once", type=int, default=3, help="runs at a time; most of their time is waiting"
    )
    parser.add_argument(
        "--folder", type=Path, help="where runs are kept (default: a temporary folder)"
    )
    parser.add_argument(
        "--results",
        type=Path,
        help="a line of JSON per case is added there; those that hold are left out",
    )
    parser.add_argument("--table", action="store_true", help="only print what is in --results")
    options, more = parser.parse_known_args()
    if options.table:
        print(table([json.loads(line) for line in options.results.read_text().splitlines()]))
        return
    OPTIONS.extend(more)  # of the trainer, such as --async-save
    torch.set_num_threads(1)
    root = options.folder or Path(tempfile.mkdtemp())
    root.mkdir(parents=True, exist_ok=True)
    write_chats(root / "chats.jsonl", 40)
    write_chats(root / "other.jsonl", 39)
    os.environ.update(
        DATA=str(root / "chats.jsonl"), OTHER_DATA=str(root / "other.jsonl"), OMP_NUM_THREADS="1"
    )
    cases = [
        Case(fault, layout)
        for layout in options.layouts
        for fault in MATRIX
        if re.search(options.only, str(fault)) and is_distinct(fault, LAYOUTS[layout])
    ]
    if options.covering:
        cases = covering([case for case in cases if case.layout in COVERED])
    if options.results is not None and options.results.exists():
        found = [json.loads(line) for line in options.results.read_text().splitlines()]
        done = {
            (tuple(result["case"][0]), result["case"][1])
            for result in found
            if not result["failures"]
        }
        cases = [case for case in cases if case not in done]
    bad = 0
    layouts = dict.fromkeys(reference_layout(case.layout) for case in cases)
    wholes = [Case(None, layout) for layout in layouts]
    for part in (wholes, cases):
        for outcome in outcomes(part, root, options.at_once):
            name = f"{outcome.case.layout}: {outcome.case.fault or 'undisturbed'}"
            bad += bool(outcome.failures)
            print(
                f"{name}: {'; '.join(outcome.failures) or 'holds'} ({outcome.seconds:.1f} s) "
                f"{outcome.said}",
                flush=True,
            )
            if options.results is not None and outcome.case.fault is not None:
                with options.results.open("a") as file:
                    file.write(json.dumps(outcome._asdict()) + "\n")
    if options.folder is None and not bad:
        shutil.rmtree(root)
    sys.exit(f"{bad} of {len(cases)} cases do not hold; see {root}" if bad else 0)


if __name__ == "__main__":
    main()
