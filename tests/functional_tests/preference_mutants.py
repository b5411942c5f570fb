"""Faults put into preference losses, and whether a layout of the oracle shows them:

    python -m tests.functional_tests.preference_mutants --write PAGE [--only TEXT]

Each fault is a piece of text of one file, replaced in a copy of the package. The layouts of the
rows below then run beside the reference, which is not changed.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

from tests.functional_tests import preference_layouts

ROOT = Path(__file__).parents[2]
HEAD, LOSS = "megatron/sft/model/score_head.py", "megatron/sft/training/preference/rewards.py"
PAIRS = "megatron/sft/training/preference/objective.py"
LAYOUTS = {
    "tensor": "tp2sp-pp1-cp1-dp1-tied-plain-default",
    "data": "tp1-pp1-cp1-dp2-tied-plain-default",
    "context": "tp1-pp1-cp2-dp1-grouped-plain-default",
}


class Mutant(NamedTuple):
    """A fault, and the layout that must show it."""

    name: str
    file: str
    before: str
    after: str
    layout: str
    loss: str = "reward"

    @property
    def row(self) -> str:
        """Name of the row of `preference_layouts` that must show it."""
        return f"{LAYOUTS[self.layout]} {self.loss}"


MUTANTS = (
    Mutant(
        "gradients of hidden states are summed over tensor parallel",
        HEAD,
        "tensor_parallel_output_grad=False",
        "tensor_parallel_output_grad=True",
        "tensor",
    ),
    Mutant(
        "scores are not negated",
        HEAD,
        "index_copy(0, rows, -scores)",
        "index_copy(0, rows, scores)",
        "data",
    ),
    Mutant("margins are added", LOSS, "chosen - scores - extra", "chosen - scores + extra", "data"),
    Mutant("margins are ignored", LOSS, "- extra[MARGIN].double()", "- 0 * extra[MARGIN]", "data"),
    Mutant(
        "centring takes the difference",
        LOSS,
        "(chosen + scores) ** 2",
        "(chosen - scores) ** 2",
        "data",
    ),
    Mutant(
        "chosen answers count as pairs",
        LOSS,
        "(extra[RANK] > 0).double()",
        "(extra[RANK] >= 0).double()",
        "data",
    ),
    Mutant(
        "a mean over this rank's pairs",
        LOSS,
        "numbers = summed_over_replicas(numbers)",
        "pass",
        "data",
    ),
    Mutant(
        "each context-parallel rank counts", LOSS, "int(dist.get_rank(group) == 0)", "1", "context"
    ),
    Mutant(
        "a pair's partner is the first chosen answer of the pack",
        "megatron/sft/training/preference/rows.py",
        "(same_record & (rank == 0)",
        "((rank == 0)",
        "data",
    ),
    Mutant(
        "the last token but one is scored",
        "megatron/sft/data/preference/sides.py",
        "is_scored[-1] =",
        "is_scored[-2] =",
        "data",
    ),
    Mutant(
        "a mean over this rank's pairs",
        PAIRS,
        "numbers = summed_over_replicas(numbers)",
        "pass",
        "data",
        "sigmoid",
    ),
    Mutant(
        "the reference has the weights of the step",
        PAIRS,
        "with self._reference.weights():",
        "if True:",
        "data",
        "sigmoid",
    ),
    Mutant(
        "chats to imitate count as pairs",
        PAIRS,
        "is_first if self._is_marked else rank.gt(0)",
        "is_first if self._is_marked else rank.ne(0)",
        "data",
        "sigmoid, chats",
    ),
    Mutant(
        "the cross entropy of chosen answers has the divisor of pairs",
        PAIRS,
        "(self._totals.terms / self._totals.nll_tokens)",
        "(self._totals.terms / self._totals.terms)",
        "data",
        "sigmoid, bco_pair, sft",
    ),
    Mutant(
        "both answers have the length of the rejected one",
        PAIRS,
        "count[partner], count)",
        "count, count)",
        "data",
        "ipo, ld_alpha",
    ),
    Mutant(
        "tokens behind the shorter answer count as others",
        PAIRS,
        "policy = alpha * sums.answer + (1 - alpha) * sums.head",
        "policy = sums.answer",
        "data",
        "ipo, ld_alpha",
    ),
    Mutant(
        "answers have each other's log-probabilities of the file",
        "megatron/sft/data/preference/encode.py",
        'fields["reference"] = totals',
        'fields["reference"] = totals[::-1]',
        "data",
        "ipo, ld_alpha, file",
    ),
    Mutant(
        "the prompt does not count in ORPO's cross entropy",
        PAIRS,
        "nll_sums = sums.whole if options.nll_of_prompt else sums.answer",
        "nll_sums = sums.answer",
        "data",
        "orpo",
    ),
    Mutant(
        "KTO's divergence is this rank's",
        PAIRS,
        "sums = summed_over_replicas(sums)",
        "pass",
        "data",
        "kto",
    ),
    Mutant(
        "an answer's partner of KTO is its own",
        "megatron/sft/data/preference/partners.py",
        "answer = other.labels[start:]",
        "answer = own.labels[first:]",
        "data",
        "kto",
    ),
    Mutant(
        "path sums of each context-parallel rank are its own",
        "megatron/packing/model/path_log_probs.py",
        "return reduce_from_tensor_model_parallel_region(sums, group=cp_group)",
        "return sums",
        "context",
        "sigmoid",
    ),
)


def shows(mutant: Mutant) -> bool:
    """Returns whether the layout of a fault differs from the reference, or fails."""
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        for name in ("megatron", "tests"):
            shutil.copytree(ROOT / name, place / name, ignore=shutil.ignore_patterns("__pycache__"))
        file = place / mutant.file
        text = file.read_text(encoding="utf-8")
        if text.count(mutant.before) != 1:
            raise SystemExit(f"{mutant.name}: {mutant.file} must hold {mutant.before!r} once")
        file.write_text(text.replace(mutant.before, mutant.after), encoding="utf-8")
        command = [sys.executable, "-W", "ignore", "-m", preference_layouts.__name__]
        done = subprocess.run(
            [*command, "--only", mutant.row, "--results", str(place / "results")],
            cwd=place,
            env={**os.environ, "PYTHONPATH": str(place)},
            capture_output=True,
            check=False,
            text=True,
        )
        # Differences, or first margins that are not 0. A copy that does not run shows nothing.
        said = (f"over {preference_layouts.LIMIT:.0e}: ", "AssertionError: ")
        if done.returncode and not any(words in done.stderr for words in said):
            raise SystemExit(f"{mutant.name}: {done.stderr[-3000:]}")
        return done.returncode != 0


def main() -> None:
    """Prints a row per fault, and writes the page; fails if a layout shows none."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", type=Path)
    parser.add_argument("--only", default="", help="part of the name of a fault")
    given = parser.parse_args()
    rows, missed = [], []
    for mutant in MUTANTS:
        if given.only not in mutant.name:
            continue
        is_shown = shows(mutant)
        rows.append(f"| {mutant.name} | {mutant.row} | {'yes' if is_shown else 'NO'} |")
        print(rows[-1], flush=True)
        missed += [] if is_shown else [mutant.name]
    if given.write is not None:
        given.write.write_text(page(rows), encoding="utf-8")
    if missed:
        raise SystemExit(f"not shown: {', '.join(missed)}")


def page(rows: list[str]) -> str:
    """Returns the page in Markdown."""
    return "\n".join(
        [
            "# Faults in preference losses",
            "",
            f"`make preference-mutants` on {time.strftime('%Y-%m-%d')}, torch {version('torch')}, "
            f"megatron-core {version('megatron-core')}. Each fault is put into a copy of the code, "
            "and one layout of the oracle is run beside the reference.",
            "",
            "| fault | layout | shown |",
            "|---|---|---|",
            *rows,
            "",
        ]
    )


if __name__ == "__main__":
    main()
