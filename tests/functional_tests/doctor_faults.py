"""The doctor's proof: each fault is put back, and has to be named, in each precision."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import megatron.core
import torch

from megatron.packing.doctor.examine import examine
from tests.functional_tests.doctor_cases import CASES, DTYPES, Case, subject_of
from tests.functional_tests.doctor_loops import LOOP_CASES, SCRIPTS, LoopCase, wrong_of_script


def wrong(case: Case, dtype: str) -> str:
    """Returns what the doctor says wrongly of a case, or "" if it is right."""
    diagnosis = examine(subject_of(case, DTYPES[dtype]))
    names = tuple(each.name for each in diagnosis.findings)
    if names != case.expected or diagnosis.is_sound == case.is_fault:
        return f"found {names}, not {case.expected}"
    mixing = diagnosis.evidence.mixing
    if case.module and case.module not in (mixing.module if mixing else ""):
        return f"born in {mixing and mixing.module}, not {case.module}"
    return ""


class Rows(NamedTuple):
    """Rows of one table of the page."""

    lines: list[str]
    failures: list[str]


def examined_cases(
    cases: Sequence[Any], judge: Callable[[Any, str], str], dtypes: Sequence[str], label: str
) -> Rows:
    """Returns a row for each case, and what the doctor says wrongly.

    Args:
        cases: Case or LoopCase.
        judge: takes a case and a precision; returns what is wrong, or "".
        dtypes: precisions.
        label: what stands before the name of a case in messages.
    """
    lines, failures = [], []
    for case in cases:
        answers = {dtype: judge(case, dtype) for dtype in dtypes}
        for dtype, text in answers.items():
            if text:
                failures.append(f"{label}{case.name}, {dtype}: {text}")
                print(failures[-1], flush=True)
        marks = " | ".join("WRONG" if answers[dtype] else "named" for dtype in dtypes)
        first = f"{case.script} | " if isinstance(case, LoopCase) else ""
        lines.append(f"| {first}{case.name} | {', '.join(case.expected) or 'sound'} | {marks} |")
    return Rows(lines, failures)


class _Answers:
    """Answers that are kept beside the page until it is written, and the CPU seconds of them."""

    def __init__(self, path: Path | None) -> None:
        self._path = None if path is None else path.with_suffix(".part.json")
        self._kept: dict[str, tuple[str, float]] = {}
        if self._path is not None and self._path.exists():
            self._kept = json.loads(self._path.read_text())

    def of(self, judge: Callable[[Any, str], str]) -> Callable[[Any, str], str]:
        """Returns a judge that asks another one for what is not kept."""

        def answer(case: Any, dtype: str) -> str:
            key = f"{getattr(case, 'script', 'toy')}: {case.name}, {dtype}"
            if key not in self._kept:
                start = sum(os.times()[:4])
                self._kept[key] = judge(case, dtype), sum(os.times()[:4]) - start
                if self._path is not None:
                    self._path.write_text(json.dumps(self._kept))
            return self._kept[key][0]

        return answer

    def seconds(self) -> float:
        return sum(seconds for _, seconds in self._kept.values())

    def forget(self) -> None:
        if self._path is not None:
            self._path.unlink(missing_ok=True)


def _wrong_of_script(case: LoopCase, dtype: str) -> str:
    return wrong_of_script(case, dtype, timeout_seconds=600.0)  # on a busy machine, too


def main(arguments: Sequence[str] | None = None) -> None:
    """Examines all cases, and writes the page of results; a run that was stopped goes on."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", type=Path)
    parser.add_argument("--only", default="", help="part of the names of cases")
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES))
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    kept = _Answers(options.write)
    cases = [case for case in CASES if options.only in case.name]
    toy = examined_cases(cases, kept.of(wrong), options.dtypes, "")
    scripts = [case for case in LOOP_CASES if options.only in f"{case.script}: {case.name}"]
    loops = examined_cases(scripts, kept.of(_wrong_of_script), options.dtypes, "script: ")
    seconds = kept.seconds()
    num_wrong = len(toy.failures) + len(loops.failures)
    num_cases = len(toy.lines) + len(loops.lines)
    print(f"{num_cases} cases, {num_wrong} wrong, {seconds:.1f} CPU seconds")
    if options.write is not None:
        lines = page(toy.lines, loops.lines, options.dtypes, seconds)
        options.write.write_text("\n".join(lines) + "\n")
        kept.forget()
    sys.exit(bool(num_wrong))


def page(
    toy: Sequence[str], scripts: Sequence[str], dtypes: Sequence[str], seconds: float
) -> Iterator[str]:
    """Yields the page of results."""
    num_faults = sum(case.is_fault for case in CASES)
    num_patched = sum(bool(case.expected) for case in LOOP_CASES)
    yield "# Faults of packing put back, and what the doctor calls them"
    yield ""
    yield (
        f"torch {torch.__version__}, megatron-core {megatron.core.__version__}, CPU, one thread a "
        f"process: {seconds:.0f} CPU seconds. "
        f"{num_faults} faults and {len(CASES) - num_faults} trainers without one, and "
        f"{num_patched} faults patched into {len(SCRIPTS)} training scripts, each in {len(dtypes)} "
        "precisions. *Named* means: just this finding and no other, born in the right module. In "
        "bfloat16 a step is measured four times with embeddings that differ by a rounding; what "
        "the repeats differ by is what it may do."
    )
    yield ""
    yield "```\nmake doctor-faults\n```"
    yield ""
    yield f"| put back | name | {' | '.join(dtypes)} |"
    yield "|---|---|" + "---|" * len(dtypes)
    yield from toy
    yield ""
    yield (
        "Training scripts, run by `megatron-sft doctor --script`: the plug-in's example, and "
        "loops written after what TRL, verl and Megatron-LM do, and transformers' own Trainer in "
        "two processes. A fault is a few words of the script, changed in a copy."
    )
    yield ""
    yield f"| script | put back | name | {' | '.join(dtypes)} |"
    yield "|---|---|---|" + "---|" * len(dtypes)
    yield from scripts


if __name__ == "__main__":
    main()
