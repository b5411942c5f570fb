"""The subcommands of `megatron-sft`, a file each. A new one is a file with a function `main`, and
its line in `COMMANDS`.
"""

from __future__ import annotations

from typing import NamedTuple


class Subcommand(NamedTuple):
    """A subcommand. Its module is imported when it is started, so that others start quickly."""

    module: str
    """Has `main(arguments, program)`; `program` is what the user typed, for help and messages."""
    about: str


_HERE = "megatron.sft.commands"
COMMANDS = {
    "train": Subcommand("megatron.sft.run", "fine-tune a model (also without the word train)"),
    "plan": Subcommand(f"{_HERE}.plan", "compare packing schedulers and layouts, without a GPU"),
    "fit": Subcommand(f"{_HERE}.fit", "estimate the memory of a run, without a GPU"),
    "show": Subcommand(
        f"{_HERE}.show", "show samples as they are trained, trained tokens in color"
    ),
    "chat": Subcommand(f"{_HERE}.chat", "talk to a model or a checkpoint in the terminal"),
    "inspect": Subcommand(
        f"{_HERE}.inspect", "tell what data, a blend, a model or a checkpoint holds"
    ),
    "export": Subcommand(f"{_HERE}.export", "write a checkpoint as a HuggingFace folder"),
    "report": Subcommand(f"{_HERE}.report", "print and draw what a run achieved"),
    "calibrate": Subcommand(f"{_HERE}.calibrate", "measure what packs cost on this device"),
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
"""Subcommand of another trainer -> ours."""


def table() -> str:
    """Returns the subcommands, a line each."""
    width = max(map(len, COMMANDS))
    return "\n".join(f"  {name:{width}}  {each.about}" for name, each in COMMANDS.items())
