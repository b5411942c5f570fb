"""A run that is interrupted at random moments, again and again, has the losses of one that never
was.

python -m tests.functional_tests.interruptions --kinds TERM KILL-rank --number 40

Of a signal that asks, and of a time limit, every rank ends with status 0, with the last step saved;
after a KILL of a rank, or of the launcher, all ranks are gone within 10 seconds.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil
import torch

from tests.functional_tests.fault_injection import LAYOUTS
from tests.functional_tests.faults import LONGEST_SECONDS, OPTIONS, steps_of, write_chats
from tests.functional_tests.forked_runs import launch

KINDS = ("INT", "TERM", "TERM-rank", "time limit", "KILL-rank", "KILL-launcher")
LONGEST_MOMENT = 1.5
"""Seconds after a first step at which an interruption comes; half of that time is spent saving and
evaluating.
"""


class Interrupted:
    """One run, as often interrupted as asked for."""

    def __init__(self, kind: str, layout: str, root: Path) -> None:
        self._kind, self._layout = kind, LAYOUTS[layout]
        self._folder = root / f"{kind}-{layout}".replace(" ", "_")
        self._random = random.Random(f"{kind} {layout}")
        self._arguments = [*OPTIONS, *self._layout.flags.split(), "--lr-decay-style", "constant"]
        self._arguments += ["--data-path", str(root / "chats.jsonl"), "--num-workers", "1"]

    def start(self, run: Path, *more: str) -> tuple[int, Path]:
        """The launcher's process, and the folder of its files."""
        files = run / f"launch{len(list(run.glob('launch*')))}"
        folders = ("--run-dir", run, "--save", run / "checkpoints", "--load", run / "checkpoints")
        arguments = [*self._arguments, *map(str, folders), *more]
        return launch(files, self._layout.world_size, arguments, None, -1), files

    def interrupt(self) -> str:
        """Start or continue the run, interrupt it; what did not hold, or ''."""
        run = self._folder / "run"
        before = max(steps_of(run), default=0)
        limit = (
            ("--exit-duration-in-mins", str(self._random.uniform(0.1, 1) / 60))
            if "limit" in self._kind
            else ()
        )
        launcher, files = self.start(run, "--train-iters", "100000", *limit)
        wait_until(lambda: max(steps_of(run), default=0) > before)
        ranks = [psutil.Process(pid) for pid in json.loads((files / "pids.json").read_text())]
        everybody = [
            process for rank in ranks for process in [rank, *rank.children(recursive=True)]
        ]
        time.sleep(self._random.uniform(0, LONGEST_MOMENT))
        start = time.monotonic()
        number = (
            signal.Signals[f"SIG{self._kind.split('-')[0]}"] if "limit" not in self._kind else None
        )
        if number is not None:
            os.kill(self._random.choice(ranks).pid if "rank" in self._kind else launcher, number)
        _, alive = psutil.wait_procs(everybody, timeout=30)
        seconds = time.monotonic() - start
        for process in alive:
            process.kill()
        os.waitpid(launcher, 0)
        if alive or (seconds > LONGEST_SECONDS and "limit" not in self._kind):
            return f"{len(alive)} left, {seconds:.1f} s until all were gone"
        if self._kind.startswith("KILL"):
            return ""
        codes = json.loads((files / "outcome.json").read_text())["codes"]
        tracker = (run / "checkpoints/latest_checkpointed_iteration.txt").read_text()
        if any(codes) or int(tracker) != max(steps_of(run)):
            return f"exit codes {codes}, step {max(steps_of(run))}, saved {tracker}; see {files}"
        return ""

    def compare(self) -> str:
        """The same run without an interruption; what differs, or ''."""
        found = steps_of(self._folder / "run")
        whole = self._folder / "whole"
        os.waitpid(self.start(whole, "--train-iters", str(max(found)))[0], 0)
        expected = steps_of(whole)
        differing = [step for step in expected if found.get(step) != expected[step]]
        return (
            f"{len(differing)} of {len(expected)} steps differ, from {differing[0]}"
            if differing
            else ""
        )


def wait_until(happened: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not happened():
        assert time.monotonic() < end, "no step"
        time.sleep(0.01)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS)
    parser.add_argument("--layout", choices=LAYOUTS, default="DP2")
    parser.add_argument("--number", type=int, default=40, help="interruptions of each kind")
    options, more = parser.parse_known_args(arguments)
    OPTIONS.extend(more)  # of the trainer, such as --async-save
    torch.set_num_threads(1)
    ctypes.CDLL(None).prctl(
        36, 1
    )  # the child subreaper: ranks whose launcher is killed become this process's
    root, bad = Path(tempfile.mkdtemp()), 0
    write_chats(root / "chats.jsonl", 40)
    for kind in options.kinds:
        start = time.monotonic()
        run = Interrupted(kind, options.layout, root)
        failures = [failure for _ in range(options.number) if (failure := run.interrupt())]
        failures += [failure] if (failure := run.compare()) else []
        bad += bool(failures)
        seconds = time.monotonic() - start
        print(
            f"{options.number} x {kind}, {options.layout}: {failures or 'holds'} ({seconds:.0f} s)",
            flush=True,
        )
    if not bad:
        shutil.rmtree(root)
    sys.exit(f"{bad} kinds do not hold; see {root}" if bad else 0)


if __name__ == "__main__":
    main()
