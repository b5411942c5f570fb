"""pure. Starts a subcommand, or training if none is named.

    megatron-sft train ...          one process; the same as python -m megatron.sft train ...
    torchrun -m megatron.sft ...    several; torchrun pretrain_sft.py from a checkout

`megatron/sft/run.py` is the training run.
"""

from __future__ import annotations

import difflib
import importlib
import sys

from megatron.sft.commands import COMMANDS, OF_OTHERS
from megatron.sft.environment import fail, program, world_from_environment


def main() -> None:
    """Runs the subcommand. The exit status is 2, with one line, for an unknown name, and 130 after
    Ctrl-C.
    """
    name, *arguments = sys.argv[1:] or ["train"]
    name = "--help" if name == "help" else name
    typed = f"{program()} {name}"
    if name not in COMMANDS and name.startswith("-"):
        name, arguments, typed = "train", [name, *arguments], program()
    elif name not in COMMANDS:
        fail(f"unknown command {name}; {_way_out(name)}", world_from_environment()[0])
    elif not sys.argv[1:]:
        typed = program()
    try:
        importlib.import_module(COMMANDS[name].module).main(arguments, typed)
    except KeyboardInterrupt:
        # Steps are not interrupted by the first Ctrl-C (see `training.stop`).
        if world_from_environment()[0] == 0:
            print(f"{typed}: interrupted", file=sys.stderr, flush=True)
        raise SystemExit(130) from None


def _way_out(name: str) -> str:
    """Returns advice for an unknown name of a subcommand."""
    if name in OF_OTHERS:
        return f"the command of other trainers with this name is megatron-sft {OF_OTHERS[name]}"
    if name.endswith((".yaml", ".yml")):
        return f"for a file of options, pass --config {name}"
    close = difflib.get_close_matches(name, COMMANDS, n=1)
    return f"did you mean {close[0]}?" if close else f"it is one of {', '.join(COMMANDS)}"


if __name__ == "__main__":
    main()
