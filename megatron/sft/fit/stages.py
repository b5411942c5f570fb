"""pure. The ranks of a parallel layout whose memory differs, and smaller runs from which the memory
of larger ones follows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from itertools import accumulate
from typing import Any, NamedTuple

from megatron.packing.layers import options_at_depth, options_by_layer
from megatron.sft.images.vision import read_vision
from megatron.sft.options.config import SFTConfig
from megatron.sft.options.training import TrainingConfig


class Stage(NamedTuple):
    """A pipeline stage. Its tensor, context, data and expert-parallel ranks hold alike."""

    number: int
    num_stages: int
    rank: int
    """One of its ranks."""
    in_flight: int
    """Microbatches whose activations it holds at most (of each virtual stage alike)."""

    @property
    def name(self) -> str:
        """The stage in words."""
        if self.num_stages == 1:
            return "every rank"
        part = {0: ", with embedding", self.num_stages - 1: ", with head"}.get(self.number, "")
        return f"stage {self.number}{part}"


def stages_of(config: SFTConfig, world_size: int) -> list[Stage]:
    """Returns the stages of a layout.

    With 1F1B stage s of p has at most p - s microbatches in flight, or as many as there are.
    """
    parallel = config.parallel
    num_stages = parallel.pipeline_model_parallel_size
    replicas = parallel.data_parallel_size(world_size)
    num_microbatches = max(config.training.global_batch_size // replicas, 1)
    if not config.packing.sequence_packing:
        num_microbatches = max(num_microbatches // config.training.micro_batch_size, 1)
    step = world_size // num_stages
    if parallel.use_tp_pp_dp_mapping:
        step = parallel.tensor_model_parallel_size * parallel.context_parallel_size
    return [
        Stage(number, num_stages, number * step, min(num_stages - number, num_microbatches))
        for number in range(num_stages)
    ]


def layers_of(config: SFTConfig, stage: Stage) -> tuple[range, ...]:
    """Returns the layers of each virtual stage of a stage."""
    counts = config.layers_of_parts
    ends = list(accumulate(counts))
    parts = [range(end - count, end) for end, count in zip(ends, counts)]
    return tuple(parts[stage.number :: stage.num_stages])


def kinds_of(config: SFTConfig, stage: Stage) -> tuple[tuple[Any, ...], ...]:
    """Returns what options say of each layer of each virtual stage: stages of equal ones hold
    alike.
    """
    kinds = options_by_layer(config.model)
    return tuple(tuple(kinds[layer] for layer in part) for part in layers_of(config, stage))


def fullest_of(config: SFTConfig, stages: Sequence[Stage]) -> list[Stage]:
    """Returns the stages of which one is the fullest. A stage before the last one holds no more
    than an earlier one with layers alike, which has as many microbatches in flight, or more.

        5 stages of 7 7 7 7 4 layers    ->    0 4
        4 stages of 6 7 7 6 layers      ->    0 1 3
    """
    found = {kinds_of(config, stage): stage for stage in reversed(stages[:-1])}
    return [*reversed(found.values()), stages[-1]]


def depths_of(config: SFTConfig, stage: Stage) -> tuple[int, ...]:
    """Returns four depths of a virtual stage from which the stage's own follows; () where it has no
    more layers than the last of them, or where its layers do not repeat.

    Layers that are recomputed in runs, or of several kinds in turn, make depths multiples of these.
    The first ones of other kinds (dense ones before experts) are in each depth.
    """
    parts, (first, unit) = layers_of(config, stage), _repeated(config)
    if len({len(part) for part in parts}) > 1 or any(part.start % unit for part in parts):
        return ()
    model, depth = config.model, len(parts[0])
    if model.recompute_granularity == "full" and model.recompute_method != "block":
        unit *= model.recompute_num_layers or 1
        first = -(-first // unit) * unit
    elif model.recompute_granularity == "full" and (model.recompute_num_layers or 1) < depth:
        first = max(first, model.recompute_num_layers or 1)
    if config.images.images:  # the first layers also add features of the tower
        folder = str(config.output.pretrained_checkpoint)
        vision = read_vision(folder, config.images.image_max_pixels)
        first += -(-vision.num_deepstack // unit) * unit
    # Below frozen embeddings the first layer's input has no gradient: alone it is no layer like the
    # others.
    numbers = (2, 3, 4, 5) if config.lora.lora else (1, 2, 3, 4)
    depths = tuple(first + unit * number for number in numbers)
    return depths if depth % unit == 0 and depths[-1] < depth else ()


def at_depth(config: SFTConfig, depth: int) -> SFTConfig:
    """Returns the same run with so many layers in each virtual stage of every stage."""
    parallel, model = config.parallel, config.model
    chunks = config.num_virtual_stages or 1
    num_layers = depth * chunks * parallel.pipeline_model_parallel_size
    changes = options_at_depth(model, num_layers, *_repeated(config))
    if model.recompute_method == "block":
        changes["recompute_num_layers"] = min(model.recompute_num_layers or 1, depth)
    cp_comm_types = (parallel.cp_comm_type * num_layers)[:num_layers]
    return replace(
        config,
        model=replace(model, **changes),
        parallel=replace(
            parallel,
            cp_comm_type=cp_comm_types if len(set(cp_comm_types)) > 1 else cp_comm_types[:1],
            num_layers_per_virtual_pipeline_stage=None
            if parallel.num_layers_per_virtual_pipeline_stage is None
            else depth,
            decoder_first_pipeline_num_layers=None,
            decoder_last_pipeline_num_layers=None,
            account_for_embedding_in_pipeline_split=False,
            account_for_loss_in_pipeline_split=False,
        ),
    )


def one_step(config: SFTConfig) -> SFTConfig:
    """Returns the same run for one step, with a plain schedule: no memory depends on either, and
    how many steps --train-epochs makes is known only with the data.
    """
    training = config.training
    once = TrainingConfig(
        **{
            field.name: getattr(training, field.name)
            for field in fields(training)
            if not field.name.startswith(("train_", "lr_"))
        },
        train_iters=1,
    )
    return replace(config, training=once)


def _repeated(config: SFTConfig) -> tuple[int, int]:
    """Returns from which layer kinds of layers repeat, and after how many: (0, 3) for 0 0 1 0 0 1,
    (1, 1) for 0 1 1 1 1. Only layers that are all alike may have others before them: of stages
    that begin anywhere in a longer period no depth would have the kinds.
    """
    kinds = options_by_layer(config.model)
    first = next(number for number in range(len(kinds)) if len(set(kinds[number:])) == 1)
    for period in range(1, len(kinds)):
        if all(kind == kinds[number % period] for number, kind in enumerate(kinds)):
            return 0, period
    return first, 1
