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

import json
import os
import pickle
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import fields, replace
from typing import TYPE_CHECKING

from megatron.packing.flags import flag_of
from megatron.sft.environment import quick_imports, silence_warnings
from megatron.sft.fit.report import Column, with_margin
from megatron.sft.memory_estimate import StageMemory, WayOut
from megatron.sft.options.config import SFTConfig

if TYPE_CHECKING:
    from megatron.sft.fit.estimate import Request, StageEstimate

MAX_WAYS = 3
"""Ways out that are said, beside one that is enough."""
NUM_CHUNKS = 16
"""Chunks of tiled layers: what they leave is then little beside what a layer keeps."""


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


def flags_between(before: SFTConfig, after: SFTConfig) -> str:
    """Returns the flags that turn the options `before` into those of `after`."""
    found = []
    for group in fields(before):
        old, new = getattr(before, group.name), getattr(after, group.name)
        for field in fields(new):
            value = getattr(new, field.name)
            if value != getattr(old, field.name):
                flag = flag_of(field.name)
                without = f"without {flag}" if value is False else f"{flag} {value}"
                found.append(flag if value is True else without)
    return " ".join(found)


def _tried(config: SFTConfig) -> Iterator[SFTConfig]:
    model, parallel, training = config.model, config.parallel, config.training
    if training.keep_logits:
        yield replace(config, training=replace(training, keep_logits=False))
    smaller = _with_smaller_packs(config)
    if smaller != config:
        yield smaller
    if not config.packing.sequence_packing and training.micro_batch_size > 1:
        rows = training.micro_batch_size // 2
        yield replace(config, training=replace(training, micro_batch_size=rows))
    if not config.shards_optimizer:
        yield replace(config, parallel=replace(parallel, use_distributed_optimizer=True))
    if model.recompute_granularity != "full":
        yield replace(config, model=replace(model, recompute_granularity="full"))
    if config != (smallest := _with_all_that_spares(config)):
        yield smallest
    context = replace(parallel, context_parallel_size=2 * parallel.context_parallel_size)
    yield _with_smaller_packs(replace(config, parallel=context))
    tensor = 2 * parallel.tensor_model_parallel_size
    wider = replace(parallel, tensor_model_parallel_size=tensor, sequence_parallel=True)
    yield replace(config, parallel=wider)
    stages = 2 * parallel.pipeline_model_parallel_size
    yield replace(config, parallel=replace(parallel, pipeline_model_parallel_size=stages))
    optimizer = replace(
        config.optimizer, use_precision_aware_optimizer=True, optimizer_cpu_offload=True
    )
    sharded = replace(parallel, use_distributed_optimizer=True)
    if config.training.bf16 and not config.lora.lora and optimizer != config.optimizer:
        yield replace(config, parallel=sharded, optimizer=optimizer)


def _with_all_that_spares(config: SFTConfig) -> SFTConfig:
    """Returns the options with all that takes activations away and leaves losses as they are."""
    model, parallel = config.model, config.parallel
    # Soft caps have no kernel that is called for a few groups.
    groups = parallel.query_groups_per_gather or (None if model.attn_logit_softcapping else 1)
    activations = config.activations
    chunks = max(activations.mlp_chunks_for_training, NUM_CHUNKS)
    activations = replace(activations, mlp_chunks_for_training=chunks)
    if parallel.sequence_parallel and parallel.tensor_model_parallel_size > 1:
        chunks = max(activations.attention_chunks_for_training, NUM_CHUNKS)
        activations = replace(activations, attention_chunks_for_training=chunks)
    if model.recompute_method != "block":
        activations = replace(activations, fine_grained_activation_offloading=True)
    return replace(
        config,
        activations=activations,
        model=replace(model, recompute_granularity="full"),
        parallel=replace(parallel, query_groups_per_gather=groups),
    )


def _with_smaller_packs(config: SFTConfig) -> SFTConfig:
    """Returns the options with half as many tokens on each rank, or as few as hold a sequence;
    without --max-seqlen-per-dp-cp-rank it is the latter already.
    """
    given = config.packing.max_seqlen_per_dp_cp_rank
    if given is None:
        return config
    capacity = max(given // 2, config.smallest_capacity_per_rank)
    return replace(config, packing=replace(config.packing, max_seqlen_per_dp_cp_rank=capacity))


def main() -> None:
    """Answers a request on stdin; see `megatron.sft.memory_estimate`."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # before torch
    silence_warnings(0)
    assumed, wants_ways_out = pickle.load(sys.stdin.buffer)
    with quick_imports():
        from megatron.sft.fit.estimate import Request, estimates
    request = Request(**assumed)
    try:
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
