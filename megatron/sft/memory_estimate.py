"""pure. The memory of a run, as `megatron-sft fit` estimates it in a process of its own.

A run that is out of memory asks for it, and so does `train --dry-run`. A process of its own, since
one with process groups or CUDA cannot be a fake world; and the trainer need not import `sft.fit`.

    megatron-sft fit --of-run    reads pickled arguments of `fit.estimate.Request` on its stdin
    {"stages": [...]}            first line that it prints: a `StageMemory` for each stage; or
    {"failed": "..."}            why there is no estimate
    ["--recompute-... full", 9]  then a `WayOut` a line, as they are found
"""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
from collections.abc import Mapping
from typing import NamedTuple

from megatron.sft.options.config import SFTConfig

OF_RUN = "--of-run"
GIB = 2**30
_NO_ANSWER = "the process that estimates it gave no answer"


class StageMemory(NamedTuple):
    """Estimate of a pipeline stage; sizes are bytes."""

    name: str
    peak: int
    """Bytes of tensors, at most."""
    margin: int
    """Bytes of the GPU that torch does not allocate for tensors."""
    states: Mapping[str, int]
    """Part -> what it takes from step to step; and "building the model"."""
    passes: Mapping[str, int]
    """Part -> what it takes in forward and backward passes."""


class WayOut(NamedTuple):
    """A change of options, and what the fullest GPU would have less."""

    flags: str
    saved_bytes: int


class MemoryEstimate(NamedTuple):
    """Answer of the process; without stages where there is a failure."""

    stages: tuple[StageMemory, ...] = ()
    ways_out: tuple[WayOut, ...] = ()
    failure: str | None = None


def estimate_memory(
    config: SFTConfig,
    vocab_size: int,
    world_size: int,
    *,
    loss_share: float = 1.0,
    ways_out: bool = False,
    seconds: float | None = None,
) -> MemoryEstimate:
    """Returns what is known when the process ends, or after `seconds`, when it is ended.

    ways_out: whether to look for changes that take less, at the price of an estimate for each.
    """
    assumed = {"vocab_size": vocab_size, "world_size": world_size, "loss_share": loss_share}
    command = [sys.executable, "-m", "megatron.sft", "fit", OF_RUN]
    request = pickle.dumps(({"config": config, **assumed}, ways_out))
    try:
        done = subprocess.run(command, input=request, capture_output=True, timeout=seconds)
        printed = done.stdout
    except subprocess.TimeoutExpired as late:
        printed = late.stdout or b""
    # A line that is not whole, or that is a library's, is not ours.
    lines = [
        json.loads(line) for line in printed.split(b"\n")[:-1] if line.startswith((b"{", b"["))
    ]
    if not lines or "stages" not in lines[0]:
        return MemoryEstimate(failure=lines[0]["failed"] if lines else _NO_ANSWER)
    return MemoryEstimate(
        tuple(StageMemory(**stage) for stage in lines[0]["stages"]),
        tuple(WayOut(*line) for line in lines[1:]),
    )


def gib(size: int) -> str:
    """Returns bytes as a number of GiB: `1610612736 -> 1.50`."""
    return f"{size / GIB:,.2f}"
