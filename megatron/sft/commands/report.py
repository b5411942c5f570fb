"""pure. `megatron-sft report RUN_DIR`: prints the results of a run as a table, and draws them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from megatron.packing.flag_help import Command
from megatron.packing.flags import FlagError, parse_flags
from megatron.sft.environment import exit_with_message, outlive_output
from megatron.sft.report.report import report


@dataclass(frozen=True, kw_only=True)
class ReportOptions:
    """Run."""

    run_dir: str | None = field(default=None, metadata={"positional": True})
    """Folder of a run, which holds metrics.jsonl: that of --run-dir or --save, else runs/TIME."""

    def __post_init__(self) -> None:
        if self.run_dir is None:
            raise ValueError("the folder of a run is needed, which holds metrics.jsonl; see --help")


def main(arguments: Sequence[str], program: str) -> None:
    """Prints the table and draws RUN_DIR/report.png; one line and status 2 if there is no run."""
    outlive_output()
    about = "Print what a run achieved, and draw RUN_DIR/report.png."
    try:
        (options,) = parse_flags(
            (ReportOptions,), arguments, Command(program=program, about=about, usage="RUN_DIR")
        )
        report(options.run_dir)
    except (FlagError, ValueError, OSError) as failure:
        exit_with_message(program, failure)
