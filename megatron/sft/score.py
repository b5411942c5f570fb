"""pure. `megatron-sft score`: writes the log-probabilities of all records' answers under a model,
as the reference of preference tuning, or with --loss reward the scores of a reward model.

Takes the options of training with `--reference-file FILE`, which it writes and `train` reads, or
with `--write-scores FILE`, a line per record. It runs forward passes alone, on as many processes as
training would.
"""

from __future__ import annotations

from collections.abc import Sequence

from megatron.packing.flag_help import Command
from megatron.sft.arguments.other_trainers import answers_to
from megatron.sft.arguments.parse import COMMON
from megatron.sft.environment import exit_with_message
from megatron.sft.run import main as train

_SHOWN = {
    "File to write": ("reference_file", "write_scores"),
    **{title: COMMON[title] for title in ("Start from", "Data")},
    "Forward passes": ("global_batch_size", "bf16"),
    "Layout": COMMON["Layout"],
}
_FLAG, _WRITES, _SCORES = "--reference-file", "--write-reference-file", "--write-scores"


def main(arguments: Sequence[str], program: str) -> None:
    """Writes the file; a wrong option or record is one line, with status 2."""
    ours = [
        each.replace(_FLAG, _WRITES, 1) if each.split("=")[0] == _FLAG else each
        for each in arguments
    ]
    names = {each.split("=")[0] for each in ours}
    if not names & {_WRITES, _SCORES, "--help", "-h", "--help-all"}:
        failure = ValueError(
            f"{_FLAG} FILE, or {_SCORES} FILE of a reward model, is required: the file to write"
        )
        exit_with_message(program, failure)
    command = Command(
        program=program,
        about="Write the log-probabilities of answers under a model, or a reward model's scores.",
        usage="--reference-file FILE --loss dpo [--nproc-per-node 8] [options of training]",
        common=_SHOWN,
        answers=answers_to,
    )
    train([*_defaults(names), *ours], program, command)


def _defaults(names: set[str]) -> list[str]:
    """Returns options that scoring does not read, unless a file may have them."""
    if "--config" in names:
        return []
    loss = "reward" if _SCORES in names else "dpo"
    found = [] if "--loss" in names else ["--loss", loss]
    if not names & {"--train-iters", "--train-epochs", "--train-samples"}:
        found += ["--train-iters", "1"]
    return found if "--lr" in names else [*found, "--lr", "0"]
