"""mcore. Builds the error of a GPU that is out of memory, in one line: the phase, the part of the
model that was too large, and the ways out.

Parts and ways out come from `megatron-sft fit`, which runs in a process of its own. It takes
seconds to a minute, while the other ranks wait. After `LIMIT_SECONDS` the line has only what is
known by then.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from types import TracebackType
from typing import NamedTuple

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch.distributed.distributed_c10d import _get_default_store

from megatron.sft.memory_estimate import (
    MemoryEstimate,
    StageMemory,
    WayOut,
    estimate_memory,
    gib,
)
from megatron.sft.model.module_parts import part_of_module
from megatron.sft.options.config import SFTConfig
from megatron.sft.training.train import Trainer

LIMIT_SECONDS = 120.0
_PHASES = {
    "_save": "a checkpoint",
    "update_weights": "the optimizer step",
    "_evaluate": "the evaluation",
    "_evaluate_if_due": "the evaluation",  # answers to prompts
    "forward_backward": "the passes",
    "build_training": "building the model",
}
"""Function of the trainer -> phase of the run. The first one on the stack counts."""
_GROWS = {"the optimizer step": "optimizer state", "building the model": "building the model"}
"""Phase without activations -> part of the estimate that grows in it."""


class Place(NamedTuple):
    """Place at which memory ran out."""

    phase: str
    part: str | None
    """Part of the model, as `fit` names it; None if the stack does not show it."""
    step: int | None
    """None outside of steps."""


def explained(
    failure: BaseException, config: SFTConfig, vocab_size: int, world_size: int
) -> ValueError:
    """Returns the error for the user, for a failure of torch's allocator.

    If several ranks fail together, one of them estimates memory, and the others wait for its
    message.
    """
    estimate = MemoryEstimate()
    if _is_first():
        estimate = estimate_memory(
            config, vocab_size, world_size, ways_out=True, seconds=LIMIT_SECONDS
        )
    else:
        time.sleep(LIMIT_SECONDS + 10)  # the first one ends this process before
    stage = parallel_state.get_pipeline_model_parallel_rank()
    return ValueError(line_of(str(failure), place_of(failure), estimate, stage))


def _is_first() -> bool:
    """Returns whether this rank is the first that calls this."""
    rank = str(dist.get_rank())
    with suppress(RuntimeError):  # the store is lost
        return _get_default_store().compare_set("out of memory", "", rank).decode() == rank
    return True


def place_of(failure: BaseException) -> Place:
    """Returns the place of a failure, by the functions and modules on its stack."""
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


def line_of(message: str, place: Place, estimate: MemoryEstimate, stage: int) -> str:
    """Returns the line.

    message: torch's, of several sentences.
    stage: of the pipeline, whose rank is out of memory.
    """
    asked = re.search(r"Tried to allocate ([0-9.]+ \w+)", message)
    where = f"{place.phase} of step {place.step}" if place.step is not None else place.phase
    inside = f", in {place.part}" if place.part is not None else ""
    there = ""
    if torch.cuda.is_initialized():
        there = f" beside {gib(torch.cuda.memory_allocated())} GiB"
    parts = [
        f"out of memory in {where}{inside}: {asked[1] if asked else 'more'} asked for{there}",
        *(_grown(place, estimate.stages[stage]) if estimate.stages else ()),
        _ways(estimate.ways_out),
    ]
    return "; ".join(parts)


def _grown(place: Place, memory: StageMemory) -> Iterator[str]:
    parts = {**memory.states, **memory.passes}
    grown = _GROWS.get(place.phase, place.part)
    if grown not in parts:
        grown = max(memory.passes, key=lambda name: memory.passes[name], default=None)
    if grown is not None:
        sizes = f"{gib(parts[grown])} of {gib(memory.peak)} GiB"
        yield f"what grew is {grown}, {sizes} as megatron-sft fit estimates"


def _ways(found: Sequence[WayOut]) -> str:
    if not found:
        return (
            "ways out: a lower --max-seqlen-per-dp-cp-rank, --recompute-granularity full, a larger "
            "--context-parallel-size, more GPUs; megatron-sft fit has figures"
        )
    ways = (f"{way.flags} ({gib(way.saved_bytes)} GiB less)" for way in found)
    return f"cheapest ways out: {', '.join(ways)}"
