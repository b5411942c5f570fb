"""python -m tests.fuzz [--inputs 20000] [--seed 1] [--only NAME ...] [--write FILE]: every class of
hostile input.

Each bad input must end in one error of the project's own kind that names its file, within seconds
and megabytes. A class runs in a process of its own, so that a crash is found, too; input `n` of a
class depends on the seed, the name and n alone, and `--only NAME --first n --inputs 1` runs it
again.
"""

from __future__ import annotations

import argparse
import logging
import os
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from multiprocessing import get_context
from pathlib import Path
from random import Random
from typing import Any

from tests.fuzz.classes import CLASSES, InputClass

SECONDS = 5
MEGABYTES, INPUTS_PER_LOOK = 200, 50
LONGEST_MESSAGE = 10_000


class Hang(BaseException):
    """An input that takes too long."""


def run_class(
    one: InputClass, inputs: int, seed: int = 1, first: int = 0, progress: Any = None
) -> dict[str, Any]:
    """Return {"read", "refused", "worst_seconds", "faults": {kind: count}, "examples": {kind:
    text}}.
    """
    faults: Counter[str] = Counter()
    examples: dict[str, str] = {}
    refused = 0
    worst = 0.0
    folder = Path(
        tempfile.mkdtemp(prefix="fuzz", dir="/dev/shm" if os.path.isdir("/dev/shm") else None)
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        logging.disable()
        try:
            sound, read = one.make(folder)
            for example in sound:
                assert _outcome(read, example, 100 * SECONDS)[0] in ("read", "refused"), example
            memory = _memory()
            for number in range(first, first + inputs):
                if progress is not None:
                    progress.value = number
                content = one.input(sound, Random(f"{seed} {one.name} {number}"))
                start = time.process_time()
                kind, text = _outcome(read, content)
                worst = max(worst, time.process_time() - start)
                refused += kind == "refused"
                if kind not in ("read", "refused"):
                    faults[kind] += 1
                    examples.setdefault(kind, f"input {number}: {text}")
                if number % INPUTS_PER_LOOK == 0:
                    before, memory = memory, _memory()
                    if memory - before > MEGABYTES:
                        faults[f"{memory - before:.0f} MB more"] += 1
                        examples[f"{memory - before:.0f} MB more"] = (
                            f"one of the {INPUTS_PER_LOOK} up to {number}"
                        )
        finally:
            logging.disable(logging.NOTSET)
            shutil.rmtree(folder)
    read_through = inputs - refused - sum(faults.values())
    return {
        "read": read_through,
        "refused": refused,
        "worst": worst,
        "faults": faults,
        "examples": examples,
    }


def _outcome(read: Any, content: bytes, limit: float = SECONDS) -> tuple[str, str]:
    """Return "read", "refused", or what is wrong with how an input was refused, and the whole
    error.
    """
    signal.setitimer(signal.ITIMER_PROF, limit)  # of the processor, as others may use it, too
    signal.setitimer(signal.ITIMER_REAL, 20 * limit)  # of a clock, for who waits for nothing
    try:
        read(content)
        return "read", ""
    except (Exception, Hang) as error:
        message = str(error)
        is_own = type(error) is ValueError or type(error).__module__.startswith("megatron.")
        if is_own and isinstance(error, ValueError) and 0 < len(message) <= LONGEST_MESSAGE:
            return "refused", message
        frames = traceback.extract_tb(error.__traceback__)
        where = next(
            (frame for frame in reversed(frames) if "/megatron/" in frame.filename), frames[-1]
        )
        kind = f"long {type(error).__name__}" if is_own and message else type(error).__name__
        trace = "".join(traceback.format_exception(error))[-1500:]
        return f"{kind} at {Path(where.filename).name}:{where.lineno}", trace
    finally:
        for timer in (signal.ITIMER_PROF, signal.ITIMER_REAL):
            signal.setitimer(timer, 0)


def _memory() -> float:
    """Most megabytes that this process ever had."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def end_hang(*_: Any) -> None:
    raise Hang(f"more than {SECONDS} seconds")


def _in_process(name: str, inputs: int, seed: int, first: int, progress: Any, results: Any) -> None:
    for number in (signal.SIGPROF, signal.SIGALRM):
        signal.signal(number, end_hang)
    one = next(one for one in CLASSES if one.name == name)
    results.put(run_class(one, inputs, seed, first, progress))


def main() -> None:
    """Run the classes one after the other, and print a table; status 1 if anything is wrong."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--inputs", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--only", nargs="+", default=[one.name for one in CLASSES])
    parser.add_argument("--write", type=Path, help="Markdown file for the table")
    options = parser.parse_args()
    context = get_context("fork")
    rows, is_clean = [], True
    for name in options.only:
        progress, results = context.Value("q", -1), context.SimpleQueue()
        start = time.perf_counter()
        process = context.Process(
            target=_in_process,
            args=(name, options.inputs, options.seed, options.first, progress, results),
        )
        process.start()
        process.join()
        if process.exitcode or results.empty():
            print(
                f"{name}: the process ended with {process.exitcode} at input {progress.value}",
                flush=True,
            )
            rows.append(
                f"| {name} | ended with {process.exitcode} at input {progress.value} | | | |"
            )
            is_clean = False
            continue
        found = results.get()
        is_clean &= not found["faults"]
        bad = sum(found["faults"].values())
        seconds = time.perf_counter() - start
        row = (
            f"| {name} | {options.inputs:,} | {found['refused']:,} | {bad:,} | "
            f"{found['worst']:.2f} s |"
        )
        print(row, f"{seconds:.0f} s", flush=True)
        rows.append(row)
        for kind, count in found["faults"].most_common():
            print(f"    {count} x {kind}\n{found['examples'][kind]}\n", flush=True)
    head = (
        "| class | inputs | refused in a line | anything else | slowest "
        "|\n|---|---:|---:|---:|---:|\n"
    )
    if options.write:
        command = f"python -m tests.fuzz --inputs {options.inputs} --seed {options.seed}"
        options.write.write_text(
            f"# Hostile input\n\n`{command}`\n\n{head}" + "\n".join(rows) + "\n"
        )
    sys.exit(not is_clean)


if __name__ == "__main__":
    main()
