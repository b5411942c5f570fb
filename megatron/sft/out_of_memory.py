"""mcore. A GPU that is out of memory, in one line: where, the part that grew, and the ways out.

Parts and ways out are those of `megatron-sft fit`, whose traces run in a process of their own. That
takes seconds to a minute, while other ranks wait; after `LIMIT_SECONDS` the line has what is known
by then.
"""

from __future__ import annotations

import json
import pickle
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from types import MappingProxyType, TracebackType
from typing import Any, NamedTuple

import torch
from megatron.core import parallel_state

from megatron.sft.fit.estimate import Request
from megatron.sft.fit.report import gib
from megatron.sft.fit.step import part_of_module
from megatron.sft.fit.ways_out import WayOut
from megatron.sft.peers import Peers
from megatron.sft.train import Trainer

LIMIT_SECONDS = 120.0
_PHASES = {
    "_save": "a checkpoint",
    "_update": "the optimizer step",
    "_evaluate": "the evaluation",
    "_run": "the passes",
    "build_training": "building the model",
}
"""Functions of the trainer, and what they are in words; the first one on the stack counts."""
_GROWS = {"the optimizer step": "optimizer state", "building the model": "building the model"}
"""Part of the estimate that grows in a phase, where no activations do."""


class Place(NamedTuple):
    """Place at which memory was missing."""

    phase: str
    part: str | None
    """Part of the model, as `fit` names it; None where the stack does not show it."""
    step: int | None
    """None outside of steps."""


class Table(NamedTuple):
    """Estimate that `fit` makes of the run."""

    peak: int = 0
    """Bytes of tensors on the GPU that was out of memory."""
    states: Mapping[str, int] = MappingProxyType({})
    passes: Mapping[str, int] = MappingProxyType({})
    ways: tuple[WayOut, ...] = ()


def explained(failure: BaseException, request: Request, peers: Peers) -> ValueError:
    """Returns a failure of torch's allocator with the line for the user.

    One of the ranks that fail together asks for the ways out; the others wait for its words.
    """
    table = Table()
    if peers.leads("memory", LIMIT_SECONDS + 10):
        table = table_of(request, parallel_state.get_pipeline_model_parallel_rank())
    return ValueError(line_of(str(failure), place_of(failure), table))


def place_of(failure: BaseException) -> Place:
    """Returns where it was raised, by the functions and modules on its stack."""
    names, part, step = set(), None, None
    trace: TracebackType | None = failure.__traceback__
    while trace is not None:
        caller = trace.tb_frame.f_locals.get("self")
        names.add(trace.tb_frame.f_code.co_name)
        part = part_of_module(caller) or part
        if isinstance(caller, Trainer) and trace.tb_frame.f_code.co_name == "_step":
            step = caller.progress.iteration + 1
        trace = trace.tb_next
    phase = next((phase for name, phase in _PHASES.items() if name in names), "training")
    return Place(phase, part, step)


def line_of(message: str, place: Place, table: Table) -> str:
    """Returns the line. message: torch's, of several sentences."""
    asked = re.search(r"Tried to allocate ([0-9.]+ \w+)", message)
    where = f"{place.phase} of step {place.step}" if place.step is not None else place.phase
    inside = f", in {place.part}" if place.part is not None else ""
    there = ""
    if torch.cuda.is_initialized():
        there = f" beside {gib(torch.cuda.memory_allocated())} GiB"
    parts = [
        f"out of memory in {where}{inside}: {asked[1] if asked else 'more'} asked for{there}",
        *_grown(place, table),
        _ways(table),
    ]
    return "; ".join(parts)


def _grown(place: Place, table: Table) -> Iterator[str]:
    parts = {**table.states, **table.passes}
    grown = _GROWS.get(place.phase, place.part)
    if grown not in parts:
        grown = max(table.passes, key=lambda name: table.passes[name], default=None)
    if grown is not None:
        sizes = f"{gib(parts[grown])} of {gib(table.peak)} GiB"
        yield f"what grew is {grown}, {sizes} as megatron-sft fit estimates"


def _ways(table: Table) -> str:
    if not table.ways:
        return (
            "ways out: a lower --max-seqlen-per-dp-cp-rank, --recompute-granularity full, a larger "
            "--context-parallel-size, more GPUs; megatron-sft fit has figures"
        )
    ways = (f"{way.flags} ({gib(way.saved_bytes)} GiB less)" for way in table.ways)
    return f"cheapest ways out: {', '.join(ways)}"


def table_of(request: Request, stage: int) -> Table:
    """Returns what a process without a GPU finds within `LIMIT_SECONDS`; nothing where it fails."""
    command = [sys.executable, "-m", "megatron.sft.fit.ways_out"]
    options: dict[str, Any] = {"input": pickle.dumps(request), "capture_output": True}
    try:
        printed = subprocess.run(command, timeout=LIMIT_SECONDS, **options).stdout
    except subprocess.TimeoutExpired as late:
        printed = late.stdout or b""
    lines = [
        json.loads(line) for line in printed.split(b"\n")[:-1] if line.startswith((b"{", b"["))
    ]
    if not lines:
        return Table()
    return Table(**lines[0][stage], ways=tuple(WayOut(*line) for line in lines[1:]))
