"""mcore. Options with which a run fits into a GPU's memory: changes that leave losses as they are,
one after another, cheapest in time first, until it does.

    logits       computed again in the backward pass, where --keep-logits keeps them
    rows         half as many at a time, without packing
    sharding     the optimizer's state over data-parallel ranks
    recompute    activations of layers computed again in the backward pass
    chunks       keys by query groups, MLPs and products in chunks
    host         inputs of layers on the host
    capacity     packs of half as many tokens, as far as the longest sequence lets them
    optimizer    its state on the host

`train --fit-to-memory` asks for them, and `fit` where no change is enough alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, replace
from typing import TYPE_CHECKING, NamedTuple

from megatron.packing.flags import flag_of
from megatron.sft.fit.report import with_margin
from megatron.sft.options.config import SFTConfig

if TYPE_CHECKING:
    from megatron.sft.fit.estimate import Request

NUM_CHUNKS = 16
"""Chunks of tiled layers: what they leave is then little beside what a layer keeps."""


class Fitting(NamedTuple):
    """Options, and what a run with them takes of the fullest GPU."""

    config: SFTConfig
    flags: str
    """Those that were changed; "" for none."""
    needed: int
    """Bytes of the fullest GPU, margin included."""
    given: int
    """The same without changes."""


def fitting(request: Request, memory: int, host_memory: int | None = None) -> Fitting:
    """Returns the first options of `ladder` with which a GPU of so many bytes holds the run, the
    last of them where none does.

    host_memory: bytes of the host for each rank; options that keep more there are skipped. None: it
    is not known. Price: an estimate for each step.
    """
    from megatron.sft.fit.estimate import estimates

    given, found = 0, None
    for config in ladder(request.config, request.world_size):
        stages = estimates(replace(request, config=config))
        needed = with_margin(max(stage.peak for stage in stages))
        given = given or needed
        on_host = max(stage.host_bytes for stage in stages)
        if found is not None and host_memory is not None and on_host > host_memory:
            continue
        if found is None or needed < found.needed:
            flags = flags_between(request.config, config)
            found = Fitting(config, flags, needed, given)
        if needed <= memory:
            break
    assert found is not None  # the options as they are
    return found


def ladder(config: SFTConfig, world_size: int) -> Iterator[SFTConfig]:
    """Yields the options, then those with more and more changes that the trainer accepts."""
    yield config
    parallel = config.parallel
    num_ranks = parallel.tensor_model_parallel_size * parallel.pipeline_model_parallel_size
    for change in _CHANGES:
        if change is with_sharded_optimizer and world_size == num_ranks:
            continue  # nobody to share it with
        while (changed := change(config)) != config:
            try:
                changed.check(world_size)
            except ValueError:
                break
            config = changed
            yield config


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


def without_logits(config: SFTConfig) -> SFTConfig:
    """Returns the options with logits that are not kept."""
    return replace(config, training=replace(config.training, keep_logits=False))


def with_fewer_rows(config: SFTConfig) -> SFTConfig:
    """Returns the options with half as many rows at a time, where they are not packed."""
    rows = config.training.micro_batch_size
    if config.packing.sequence_packing or rows == 1:
        return config
    return replace(config, training=replace(config.training, micro_batch_size=rows // 2))


def with_sharded_optimizer(config: SFTConfig) -> SFTConfig:
    """Returns the options with the optimizer's state shared by replicas."""
    if config.shards_optimizer:
        return config
    return replace(config, parallel=replace(config.parallel, use_distributed_optimizer=True))


def with_recomputation(config: SFTConfig) -> SFTConfig:
    """Returns the options with layers computed again in the backward pass."""
    if config.model.recompute_granularity == "full":
        return config
    return replace(config, model=replace(config.model, recompute_granularity="full"))


def with_chunks(config: SFTConfig) -> SFTConfig:
    """Returns the options with all that takes activations away on the GPU."""
    parallel, activations = config.parallel, config.activations
    # Soft caps have no kernel that is called for a few groups.
    has_kernel = not config.model.attn_logit_softcapping
    groups = parallel.query_groups_per_gather or (1 if has_kernel else None)
    chunks = max(activations.mlp_chunks_for_training, NUM_CHUNKS)
    activations = replace(activations, mlp_chunks_for_training=chunks)
    if parallel.sequence_parallel and parallel.tensor_model_parallel_size > 1:
        chunks = max(activations.attention_chunks_for_training, NUM_CHUNKS)
        activations = replace(activations, attention_chunks_for_training=chunks)
    parallel = replace(parallel, query_groups_per_gather=groups)
    return with_recomputation(replace(config, activations=activations, parallel=parallel))


def with_inputs_on_host(config: SFTConfig) -> SFTConfig:
    """Returns the options with inputs of recomputed layers on the host."""
    if config.model.recompute_method == "block":
        return config
    offloading = replace(config.activations, fine_grained_activation_offloading=True)
    return replace(config, activations=offloading)


def with_smaller_packs(config: SFTConfig) -> SFTConfig:
    """Returns the options with half as many tokens on each rank, or as few as hold a sequence;
    without --max-seqlen-per-dp-cp-rank it is the latter already.
    """
    given = config.packing.max_seqlen_per_dp_cp_rank
    if given is None:
        return config
    capacity = max(given // 2, config.smallest_capacity_per_rank)
    return replace(config, packing=replace(config.packing, max_seqlen_per_dp_cp_rank=capacity))


def with_optimizer_on_host(config: SFTConfig) -> SFTConfig:
    """Returns the options with the optimizer's state on the host, where there is much of it."""
    if config.lora.lora or not config.training.bf16:
        return config
    optimizer = replace(
        config.optimizer, use_precision_aware_optimizer=True, optimizer_cpu_offload=True
    )
    sharded = replace(config.parallel, use_distributed_optimizer=True)
    return replace(config, parallel=sharded, optimizer=optimizer)


_CHANGES = (
    *(without_logits, with_fewer_rows, with_sharded_optimizer, with_recomputation, with_chunks),
    *(with_inputs_on_host, with_smaller_packs, with_optimizer_on_host),
)
