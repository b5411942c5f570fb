"""Every fault of the matrix in every layout: python -m tests.functional_tests.faults --layouts DP2

Each is a run of 6 steps that continues step 2 and goes wrong; then, where it ended, the same run
without the fault. It must give the losses of one that was never disturbed. What must hold:

    nobody hangs, nobody is left, no rank says that it went well
    all ranks are gone within 10 seconds of the first; of one that is stopped, within the timeout of
        groups;
    one line tells the rank and the cause, also where torchrun's summary takes it from
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

from tests.functional_tests.fault_injection import ENDS, LAYOUTS, MATRIX, Fault
from tests.functional_tests.forked_runs import launch

GROUP_TIMEOUT_SECONDS = 9.0
LONGEST_SECONDS = 10.0
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
    """From the end of the first rank, or of the stopped one's others, to that of the last."""
    said: str


class Running:
    """A case under way: the run that goes wrong, then the one that continues it."""

    def __init__(self, case: Case, root: Path) -> None:
        self.case = case
        self._layout = LAYOUTS[case.layout]
        self._root = root
        self._folder = root / f"{case.layout}-{case.fault}".replace(" ", "_")
        self._reference = root / f"{case.layout}-None"
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
            *(fault.options() if fault is not None else ()),
        ]
        rank = fault.rank(self._layout) if fault is not None else -1
        return launch(self._attempt(), self._layout.world_size, arguments, fault, rank)

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
        codes, ends = found["codes"], found["ends"]
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
        counted = [end for number, end in enumerate(ends) if fault.kind != "STOP" or number != rank]
        self._seconds = max(counted) - min(ends)
        if self._seconds > LONGEST_SECONDS:
            self._failures.append(f"{self._seconds:.1f} s until all were gone")
        logs = "".join(
            (self._attempt() / f"rank{number}.log").read_text() for number in range(len(codes))
        )
        lines = re.findall(r"^pretrain_sft.py: error: (.*)", logs, re.MULTILINE)
        if len(lines) != 1 and not (
            fault.stage in ("start", "load") and fault.kind == "KILL" and not lines
        ):
            self._failures.append(f"{len(lines)} messages")
        first = next(
            (
                number
                for number, end in sorted(enumerate(ends), key=lambda pair: pair[1])
                if number != rank or fault.kind != "STOP"
            )
        )
        error = self._attempt() / f"error{first}.json"
        told = (
            json.loads(error.read_text())["message"]["message"]
            if error.exists()
            else f"rank {first}: {codes[first]}"
        )
        self._said = (lines or [told])[0]
        cause = {
            "exception": f"injected in {fault.stage}",
            "disk full": "No space left on device",
            "end of data": "end of the data|data ended",
            "other data": "data",
            "other options": "--lr is 0.02|--hidden-size is 32",
        }.get(fault.kind, "")
        for text in (self._said, told):
            if not re.search(rf"\brank {rank}\b", text) or not re.search(cause, text):
                self._failures.append(f"told: {text}")
                break
        if logs.count("Traceback (most recent call last)") > 1:
            self._failures.append(f"{logs.count('Traceback (most recent call last)')} tracebacks")

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


def covering(cases: list[Case]) -> list[Case]:
    """Greedily the fewest cases that have each kind, stage and layout of all: small worlds first,
    kinds in turns.
    """

    def features(case: Case) -> set[str]:
        assert case.fault is not None
        return {case.fault.kind, case.fault.stage, case.layout}

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
    parser.add_argument("--only", default="", help="faults whose name holds this")
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
        if options.only in str(fault)
    ]
    if options.covering:
        cases = covering(cases)
    if options.results is not None and options.results.exists():
        found = [json.loads(line) for line in options.results.read_text().splitlines()]
        done = {
            (tuple(result["case"][0]), result["case"][1])
            for result in found
            if not result["failures"]
        }
        cases = [case for case in cases if case not in done]
    bad = 0
    wholes = [Case(None, layout) for layout in dict.fromkeys(case.layout for case in cases)]
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
