"""pure. `megatron-sft prepare PATH`: writes index files of megatron.blending beside the data."""

from __future__ import annotations

from collections.abc import Sequence

from megatron.blending.__main__ import main as blending
from megatron.sft.environment import outlive_output


def main(arguments: Sequence[str], program: str) -> None:
    """Runs `python -m megatron.blending prepare` with the same options."""
    outlive_output()
    status = blending(["prepare", *arguments], program.removesuffix(" prepare"))
    if status:
        raise SystemExit(status)
