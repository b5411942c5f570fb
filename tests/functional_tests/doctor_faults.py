"""The doctor's proof: each fault is put back, and has to be named, in each precision."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from megatron.packing.doctor.examine import examine
from tests.functional_tests.doctor_cases import CASES, DTYPES, Case, subject_of


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


def main(arguments: Sequence[str] | None = None) -> None:
    """Examines all cases, and writes the page of results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", type=Path)
    parser.add_argument("--only", default="", help="part of the names of cases")
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES))
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    rows, failures = [], []
    start = time.process_time()
    for case in CASES:
        if options.only not in case.name:
            continue
        # Steps are examined in float32 and float64: bfloat16 rounds what is measured.
        dtypes = [d for d in options.dtypes if d != "bfloat16" or case.loss.step is None]
        answers = {dtype: wrong(case, dtype) for dtype in dtypes}
        for dtype, text in answers.items():
            if text:
                failures.append(f"{case.name}, {dtype}: {text}")
                print(failures[-1], flush=True)
        marks = " | ".join(
            "" if dtype not in answers else "WRONG" if answers[dtype] else "named"
            for dtype in options.dtypes
        )
        rows.append(f"| {case.name} | {', '.join(case.expected) or 'sound'} | {marks} |")
    seconds = time.process_time() - start
    print(f"{len(rows)} cases, {len(failures)} wrong, {seconds:.1f} CPU seconds")
    if options.write is not None:
        options.write.write_text("\n".join(page(rows, options.dtypes, seconds)) + "\n")
    sys.exit(bool(failures))


def page(rows: Sequence[str], dtypes: Sequence[str], seconds: float) -> Iterator[str]:
    """Yields the page of results."""
    num_faults = sum(case.is_fault for case in CASES)
    yield "# Faults of packing put back, and what the doctor calls them"
    yield ""
    yield (
        f"torch {torch.__version__}, CPU, one thread: {seconds:.0f} CPU seconds. {num_faults} "
        f"faults and {len(CASES) - num_faults} trainers without one, each in {len(dtypes)} "
        "precisions. *Named* means: just this finding and no other, born in the right module."
    )
    yield ""
    yield "```\nmake doctor-faults\n```"
    yield ""
    yield f"| put back | name | {' | '.join(dtypes)} |"
    yield "|---|---|" + "---|" * len(dtypes)
    yield from rows


if __name__ == "__main__":
    main()
