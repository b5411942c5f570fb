"""pure. Runs subcommands under the names that they had before. Old names work for one release."""

from __future__ import annotations

import importlib
import sys

from megatron.sft.commands import COMMANDS


def run_moved(old: str, name: str) -> None:
    """Runs the subcommand `name`, started as `python -m old`, and prints its new name."""
    print(
        f"note: python -m {old} is now megatron-sft {name} (python -m megatron.sft {name}); "
        "the old name works for one release",
        file=sys.stderr,
    )
    importlib.import_module(COMMANDS[name].module).main(sys.argv[1:], f"megatron-sft {name}")
