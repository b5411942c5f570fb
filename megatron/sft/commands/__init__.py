"""The subcommands of `megatron-sft`, one file each.

To add one, write a file with `main(arguments, program)` and add its line to `COMMANDS`. Every
`main` parses its options with `packing.flags.parse_flags`, and turns a user's mistake (FlagError,
ValueError, OSError) into one line on stderr and status 2.
"""

from __future__ import annotations

from typing import NamedTuple


class Subcommand(NamedTuple):
    """A subcommand. Its module is imported only when it runs, so that the others start quickly."""

    module: str
    """Module with `main(arguments, program)`. `program` is the command as the user typed it, for
    help and messages.
    """
    about: str
    """Its line in --help."""


_HERE = "megatron.sft.commands"
COMMANDS = {
    "train": Subcommand("megatron.sft.run", "fine-tune a model (also without the word train)"),
    "plan": Subcommand(f"{_HERE}.plan", "compare packing schedulers and layouts, without a GPU"),
    "fit": Subcommand(f"{_HERE}.fit", "estimate the memory of a run, without a GPU"),
    "show": Subcommand(
        f"{_HERE}.show", "show samples as they are trained, trained tokens in color"
    ),
    "score": Subcommand(
        "megatron.sft.score", "write log-probabilities of answers, for train --loss"
    ),
    "chat": Subcommand(f"{_HERE}.chat", "talk to a model or a checkpoint in the terminal"),
    "inspect": Subcommand(
        f"{_HERE}.inspect", "describe data, a blend, a model folder or checkpoints"
    ),
    "export": Subcommand(f"{_HERE}.export", "write a checkpoint as a HuggingFace folder"),
    "report": Subcommand(f"{_HERE}.report", "print and draw what a run achieved"),
    "calibrate": Subcommand(f"{_HERE}.calibrate", "measure what packs cost on this device"),
    "doctor": Subcommand(f"{_HERE}.doctor", "find contamination between packed sequences"),
    "rules": Subcommand(f"{_HERE}.rules", "print what is refused, and the way out"),
    "prepare": Subcommand(f"{_HERE}.prepare", "index tar shards or JSONL files for random access"),
}
"""Name -> subcommand, in the order of --help."""
OF_OTHERS = {
    **dict.fromkeys(("sft", "pt", "pretrain", "finetune", "fine-tune"), "train"),
    **dict.fromkeys(("infer", "inference", "generate", "webchat"), "chat"),
    **dict.fromkeys(("merge-lora", "merge", "merge_sharded_fsdp_weights"), "train --lora-merge"),
    **dict.fromkeys(("preprocess", "tokenize"), "show"),
    "estimate-memory": "fit",
}
"""Name of a subcommand in other trainers -> ours, for the error about an unknown command."""


def table() -> str:
    """Returns the list of subcommands for --help, one a line."""
    width = max(map(len, COMMANDS))
    return "\n".join(f"  {name:{width}}  {each.about}" for name, each in COMMANDS.items())
