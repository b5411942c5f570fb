"""mcore. Changes of options that take less memory, cheapest in time first, by traces.

    logits       computed again in the backward pass, where --keep-logits keeps them
    capacity     packs of half as many tokens, as far as the longest sequence lets them
    sharding     the optimizer's state over data-parallel ranks, in small buckets
    recompute    activations of layers computed again in the backward pass: a third more arithmetic
    all of it    with keys gathered by query groups, MLPs and products in chunks, and inputs of
                 layers on the host: one more all-gather per layer, and copies
    CP, TP, PP   ranks share sequences, weights or layers: communication, and fewer replicas
    host         the optimizer's state on the host: its step, at the speed of processors

`main` answers a run that is out of memory, and `train --dry-run` (see `sft.memory_estimate`).
"""

from __future__ import annotations

import base64
import json
import os
import pickle
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

from megatron.sft.environment import quick_imports, silence_warnings
from megatron.sft.fit.fewer_bytes import (
    fitting,
    flags_between,
    with_chunks,
    with_fewer_rows,
    with_inputs_on_host,
    with_optimizer_on_host,
    with_recomputation,
    with_sharded_optimizer,
    with_smaller_packs,
    without_logits,
)
from megatron.sft.fit.report import Column, with_margin
from megatron.sft.memory_estimate import StageMemory, WayOut
from megatron.sft.options.config import SFTConfig

if TYPE_CHECKING:
    from megatron.sft.fit.estimate import Request, StageEstimate

MAX_WAYS = 3
"""Ways out that are said, beside one that is enough."""


def ways_out(request: Request, peak: int, memory: int | None = None) -> Iterator[WayOut]:
    """Yields up to `MAX_WAYS` changes with which the fullest GPU holds less than `peak` bytes, and
    the next that is enough for `memory`, if none of them is.

    memory: bytes of a GPU; None: nothing more is looked for. Price: an estimate for each.
    """
    from megatron.sft.fit.estimate import estimates

    found, is_enough = 0, memory is None or with_margin(0) > memory
    for config, world_size in changes(request.config, request.world_size):
        other = replace(request, config=config, world_size=world_size)
        changed = max(stage.peak for stage in estimates(other))
        saved, fits = peak - changed, memory is not None and with_margin(changed) <= memory
        if saved > 0 and (found < MAX_WAYS or fits):
            found += 1
            is_enough |= fits
            more = f" on {world_size} GPUs" * (world_size != request.world_size)
            flags = flags_between(request.config, config) or "the same options"
            yield WayOut(flags + more, saved)
        if found >= MAX_WAYS and is_enough:
            return


def changes(config: SFTConfig, world_size: int) -> Iterator[tuple[SFTConfig, int]]:
    """Yields options and numbers of GPUs that the trainer would accept, cheapest in time first.

    Where replicas are too few to be halved, twice as many GPUs take part.
    """
    for changed in _tried(config):
        for size in (world_size, 2 * world_size):
            with suppress(ValueError):
                changed.check(size)
                yield changed, size
                break
    if config.shards_optimizer:  # over twice as many replicas
        with suppress(ValueError):
            config.check(2 * world_size)
            yield config, 2 * world_size


def _tried(config: SFTConfig) -> Iterator[SFTConfig]:
    parallel = config.parallel
    alone = (without_logits, with_smaller_packs, with_fewer_rows, with_sharded_optimizer)
    for change in (*alone, with_recomputation, _with_all_that_spares):
        if (changed := change(config)) != config:
            yield changed
    context = replace(parallel, context_parallel_size=2 * parallel.context_parallel_size)
    yield with_smaller_packs(replace(config, parallel=context))
    tensor = 2 * parallel.tensor_model_parallel_size
    wider = replace(parallel, tensor_model_parallel_size=tensor, sequence_parallel=True)
    yield replace(config, parallel=wider)
    stages = 2 * parallel.pipeline_model_parallel_size
    yield replace(config, parallel=replace(parallel, pipeline_model_parallel_size=stages))
    if (changed := with_optimizer_on_host(config)) != config:
        yield changed


def _with_all_that_spares(config: SFTConfig) -> SFTConfig:
    """Returns the options with all that takes activations away and leaves losses as they are."""
    return with_inputs_on_host(with_chunks(config))


def main() -> None:
    """Answers a request on stdin; see `megatron.sft.memory_estimate`."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # before torch
    silence_warnings(0)
    assumed, wants_ways_out, memory = pickle.load(sys.stdin.buffer)
    with quick_imports():
        from megatron.sft.fit.estimate import Request, estimates
    request = Request(**assumed)
    try:
        if memory is not None:
            found = fitting(request, *memory)
            config = base64.b64encode(pickle.dumps(found.config)).decode()
            print(json.dumps({"fitting": found._replace(config=config)}), flush=True)  # type: ignore[arg-type]
            return
        stages = estimates(request)
    except Exception as failure:  # a trace takes ways that a run may not
        print(json.dumps({"failed": f"{type(failure).__name__}: {failure}"}))
        return
    print(json.dumps({"stages": [_memory_of(stage)._asdict() for stage in stages]}), flush=True)
    if wants_ways_out:
        for way in ways_out(request, max(stage.peak for stage in stages)):
            print(json.dumps(way), flush=True)


def _memory_of(stage: StageEstimate) -> StageMemory:
    column = Column(stage.stage.name, {}, stage.peak)
    return StageMemory(
        name=column.name,
        peak=column.peak,
        margin=column.margin,
        states={part.name: part.num_bytes for part in (*stage.states, stage.build)},
        passes={part.name: part.num_bytes for part in stage.passes},
    )
