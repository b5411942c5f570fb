"""pure. Estimates the memory of a run, by `megatron-sft fit` in a process of its own.

A run that is out of memory calls it, and so does `train --dry-run`. The estimate needs a process
without process groups and CUDA, and the trainer need not import `sft.fit`.

    megatron-sft fit --of-run    reads pickled arguments of `fit.estimate.Request` on its stdin
    {"stages": [...]}            first line that it prints: a `StageMemory` for each stage; or
    {"failed": "..."}            why there is no estimate; or
    {"fitting": [...]}           `Fitted`, where it is asked for options that fit
    ["--recompute-... full", 9]  then a `WayOut` a line, as they are found
"""

from __future__ import annotations

import base64
import json
import os
import pickle
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any, NamedTuple

from megatron.packing.memory_size import GIB
from megatron.sft.launch import child_environment
from megatron.sft.options.config import SFTConfig

OF_RUN = "--of-run"
_NO_ANSWER = "the process that estimates it gave no answer"
_NO_PROCESS = "the process that estimates it did not start"


class StageMemory(NamedTuple):
    """Estimate of a pipeline stage; sizes are bytes."""

    name: str
    peak: int
    """Maximum bytes of tensors."""
    margin: int
    """Bytes on the GPU other than torch's tensors."""
    states: Mapping[str, int]
    """Part -> its bytes between steps; also "building the model"."""
    passes: Mapping[str, int]
    """Part -> its bytes in forward and backward passes."""


class WayOut(NamedTuple):
    """A change of options, and the bytes that it saves on the fullest GPU."""

    flags: str
    saved_bytes: int


class MemoryEstimate(NamedTuple):
    """Result of an estimate; without stages if it failed."""

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
    """Returns the estimate when the process ends; after `seconds` it is killed, and the result has
    what is known by then.

    ways_out: True to search for changes that save memory, with an estimate for each.
    """
    assumed = {"vocab_size": vocab_size, "world_size": world_size, "loss_share": loss_share}
    try:
        printed, errors = _answer_of(({"config": config, **assumed}, ways_out, None), seconds)
    except OSError as failure:  # such as no memory for another process
        return MemoryEstimate(failure=f"{_NO_PROCESS}: {failure}")
    answer: dict[str, Any] | None = None
    ways: list[WayOut] = []
    for value in _values_of(printed):
        match value:
            case {"stages": _} | {"failed": _}:
                answer = answer or value
            case [str(flags), int(saved)]:
                ways.append(WayOut(flags, saved))
    if answer is None:
        return MemoryEstimate(failure=_no_answer(errors))
    if "failed" in answer:
        return MemoryEstimate(failure=answer["failed"])
    return MemoryEstimate(tuple(StageMemory(**stage) for stage in answer["stages"]), tuple(ways))


class Fitted(NamedTuple):
    """Options that fit into a GPU's memory; without a config there is no estimate."""

    config: SFTConfig | None = None
    flags: str = ""
    """Those that were changed; "" for none."""
    needed: int = 0
    """Bytes of the fullest GPU, margin included."""
    given: int = 0
    """The same without changes."""
    failure: str | None = None


def fitted_options(
    config: SFTConfig,
    vocab_size: int,
    world_size: int,
    memory: int,
    host_memory: int | None = None,
    *,
    seconds: float | None = None,
) -> Fitted:
    """Returns the options of `fit.fewer_bytes` that fit into `memory` bytes of each GPU, or the
    last of them; after `seconds` none.

    host_memory: bytes of the host for each rank; None: not known.
    """
    assumed = {"config": config, "vocab_size": vocab_size, "world_size": world_size}
    try:
        printed, errors = _answer_of((assumed, False, (memory, host_memory)), seconds)
    except OSError as failure:
        return Fitted(failure=f"{_NO_PROCESS}: {failure}")
    for value in _values_of(printed):
        match value:
            case {"fitting": [str(encoded), *rest]}:
                return Fitted(pickle.loads(base64.b64decode(encoded)), *rest)
            case {"failed": str(reason)}:
                return Fitted(failure=reason)
    return Fitted(failure=_no_answer(errors))


def _no_answer(errors: bytes) -> str:
    last = errors.decode(errors="replace").strip().rpartition("\n")[2]
    return f"{_NO_ANSWER}: {last}" if last else _NO_ANSWER


def _answer_of(request: tuple[Any, ...], seconds: float | None) -> tuple[bytes, bytes]:
    """Returns the stdout and stderr of the process, up to its end or until it was killed."""
    command = [sys.executable, "-m", "megatron.sft", "fit", OF_RUN]
    try:
        done = subprocess.run(
            command,
            input=pickle.dumps(request),
            capture_output=True,
            timeout=seconds,
            env=child_environment(os.environ),
        )
    except subprocess.TimeoutExpired as late:
        return late.stdout or b"", late.stderr or b""
    return done.stdout, done.stderr


def _values_of(printed: bytes) -> Iterator[Any]:
    """Yields the JSON objects and lists among complete lines. Other lines come from libraries."""
    for line in printed.split(b"\n")[:-1]:
        with suppress(ValueError):
            if line.startswith((b"{", b"[")):
                yield json.loads(line)


def gib(size: int) -> str:
    """Returns a number of bytes in GiB: `1610612736 -> 1.50`."""
    return f"{size / GIB:,.2f}"
