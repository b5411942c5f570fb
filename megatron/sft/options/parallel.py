"""pure. Options of the parallel layout, and the data-parallel size that is left for it."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, ClassVar

from megatron.packing.flags import flag_of
from megatron.packing.rules import MEGATRON_FLAGS, Layout, Rule, at_least, check_rules
from megatron.packing.stages import StageLayers

_ENDS = ("decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers")
_CP_COMM_TYPES = {"p2p", "all_gather", "allgather", "a2a", "a2a+p2p"}


def _unknown_exchange(options: Any) -> dict[str, str]:
    unknown = sorted(set(options.cp_comm_type) - _CP_COMM_TYPES)
    return {"unknown": unknown[0]} if unknown else {}


def _ranks_of_model(layout: Layout) -> int:
    return layout.tensor * layout.pipeline * layout.context


WORLD_RULES = (
    Rule(
        when=lambda layout, world_size: (
            {"ranks": _ranks_of_model(layout)} if world_size % _ranks_of_model(layout) else {}
        ),
        why="the number of processes, {world_size}, must be a multiple of tensor x pipeline x "
        "context parallel size, {tensor.value} x {pipeline.value} x {context.value} = {ranks}",
        way_out="start {ranks} of them (--nproc-per-node {ranks}; for fit and plan --world-size "
        "{ranks}), or change them",
    ),
    Rule(
        when=lambda layout, world_size: (
            {"ranks": layout.experts * layout.pipeline}
            if world_size % (layout.experts * layout.pipeline)
            else {}
        ),
        why="the number of processes, {world_size}, must be a multiple of {experts.flag} times "
        "{pipeline.flag}, {ranks}",
        way_out="lower them or start more processes",
    ),
)
"""Rules of the number of processes."""


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """Parallel layout."""

    tensor_model_parallel_size: int = 1
    """Ranks that share each layer's weights."""
    pipeline_model_parallel_size: int = 1
    """Pipeline stages (ranks that share the layers)."""
    num_layers_per_virtual_pipeline_stage: int | None = None
    """Layers per virtual stage of an interleaved pipeline."""
    num_virtual_stages_per_pipeline_rank: int | None = None
    """Virtual stages of each rank of an interleaved pipeline, in place of
    --num-layers-per-virtual-pipeline-stage.
    """
    decoder_first_pipeline_num_layers: int | None = None
    """Layers of the first pipeline stage (default: as many as the others)."""
    decoder_last_pipeline_num_layers: int | None = None
    """Layers of the last pipeline stage (default: as many as the others)."""
    account_for_embedding_in_pipeline_split: bool = field(
        default=False, metadata={"idle_without": "pipeline_model_parallel_size>=2"}
    )
    """Count the embedding as a layer of the first pipeline stage, which gets one fewer."""
    account_for_loss_in_pipeline_split: bool = field(
        default=False, metadata={"idle_without": "pipeline_model_parallel_size>=2"}
    )
    """Count output layer and loss as a layer of the last pipeline stage, which gets one fewer.
    """
    context_parallel_size: int = 1
    """Ranks that share each sequence."""
    cp_comm_type: tuple[str, ...] = field(
        default=("p2p",),
        metadata={"idle_without": "context_parallel_size>=2", "default_holds": True},
    )
    """Exchange of keys and values over context parallel in Transformer Engine's attention: p2p,
    all_gather, a2a or a2a+p2p, one for all layers or one for each. Attention without
    Transformer Engine gathers them.
    """
    query_groups_per_gather: int | None = None
    """Query groups whose keys and values are gathered at a time over context parallel, and for the
    nodes of trees; and gathered again in the backward pass instead of kept, at one more all-gather
    per layer. Of one group on a rank they are those of one rank at a time, of latent attention
    those of so many heads. Layers are those without Transformer Engine (default: all, kept).
    """
    expert_model_parallel_size: int = 1
    """Ranks that share the experts."""
    sequence_parallel: bool = field(
        default=False, metadata={"idle_without": "tensor_model_parallel_size>=2"}
    )
    """Split norms and dropout along the sequence over tensor-parallel ranks."""
    use_tp_pp_dp_mapping: bool = field(
        default=False, metadata={"idle_without": "pipeline_model_parallel_size>=2"}
    )
    """Order ranks tp-cp-ep-pp-dp instead of tp-cp-ep-dp-pp."""
    use_distributed_optimizer: bool = False
    """Shard the optimizer's state over data-parallel ranks."""
    overlap_grad_reduce: bool = False
    """Reduce gradients during the backward pass."""
    overlap_param_gather: bool = False
    """Gather parameters during the forward pass; needs --use-distributed-optimizer and
    --overlap-grad-reduce.
    """
    distributed_timeout_minutes: float = 10.0
    """Timeout of collectives, in minutes."""

    rules: ClassVar[tuple[Rule, ...]] = (
        *at_least(1, "tensor_model_parallel_size", "pipeline_model_parallel_size"),
        *at_least(1, "context_parallel_size", "expert_model_parallel_size"),
        *at_least(1, "query_groups_per_gather"),
        *at_least(1, "num_layers_per_virtual_pipeline_stage", *_ENDS),
        *at_least(2, "num_virtual_stages_per_pipeline_rank"),
        Rule(
            when=_unknown_exchange,
            why="{cp_comm_type.flag} must be p2p, all_gather, a2a or a2a+p2p, but is {unknown}",
        ),
        *at_least(0.01, "distributed_timeout_minutes"),
        *(
            Rule(
                when=lambda options, name=name: (
                    getattr(options, name) is not None and options.pipeline_model_parallel_size == 1
                ),
                why=f"{{{name}.flag}} needs {{pipeline_model_parallel_size.flag}} of at least 2",
            )
            for name in (
                "num_layers_per_virtual_pipeline_stage",
                "num_virtual_stages_per_pipeline_rank",
                *_ENDS,
            )
        ),
        Rule(
            when=lambda options: (
                options.num_layers_per_virtual_pipeline_stage is not None
                and options.num_virtual_stages_per_pipeline_rank is not None
            ),
            why="{num_layers_per_virtual_pipeline_stage.flag} and "
            "{num_virtual_stages_per_pipeline_rank.flag} say the same",
            way_out="drop one",
        ),
        Rule(
            when=lambda options: (
                options.num_layers_per_virtual_pipeline_stage is not None
                and any(getattr(options, name) is not None for name in _ENDS)
            ),
            why="{num_layers_per_virtual_pipeline_stage.flag} needs stages of equally many layers",
            way_out="with {decoder_first_pipeline_num_layers.flag} or "
            "{decoder_last_pipeline_num_layers.flag} pass "
            "{num_virtual_stages_per_pipeline_rank.flag}",
        ),
        Rule(
            when=lambda options: (
                options.overlap_param_gather
                and not (options.use_distributed_optimizer and options.overlap_grad_reduce)
            ),
            why="{overlap_param_gather.flag} needs {use_distributed_optimizer.flag} and "
            "{overlap_grad_reduce.flag}",
        ),
    )

    def __post_init__(self) -> None:
        check_rules(self.rules, options=self)

    def stage_layers(self, num_virtual_stages: int) -> StageLayers:
        """Returns how layers are shared out over pipeline stages."""
        return StageLayers(
            num_stages=self.pipeline_model_parallel_size,
            num_virtual_stages=num_virtual_stages,
            first=self.decoder_first_pipeline_num_layers,
            last=self.decoder_last_pipeline_num_layers,
            counts_embedding=self.account_for_embedding_in_pipeline_split,
            counts_loss=self.account_for_loss_in_pipeline_split,
        )

    def layout(self, num_virtual_stages: int) -> Layout:
        """Returns the sizes of the layout, for rules."""
        virtual = "num_virtual_stages_per_pipeline_rank"
        if self.num_layers_per_virtual_pipeline_stage is not None:
            virtual = "num_layers_per_virtual_pipeline_stage"
        return Layout(
            tensor=self.tensor_model_parallel_size,
            pipeline=self.pipeline_model_parallel_size,
            virtual=getattr(self, virtual) or 1,
            context=self.context_parallel_size,
            experts=self.expert_model_parallel_size,
            sequence_parallel=self.sequence_parallel,
            stages=self.stage_layers(num_virtual_stages),
            flags={**MEGATRON_FLAGS, "virtual": flag_of(virtual)},
        )

    @property
    def model_parallel_size(self) -> int:
        """Processes of a replica of the model."""
        return _ranks_of_model(self.layout(1))

    @property
    def least_world_size(self) -> int:
        """Smallest number of processes for the parallel layout."""
        stages, experts = self.pipeline_model_parallel_size, self.expert_model_parallel_size
        return math.lcm(self.model_parallel_size, stages * experts)

    def data_parallel_size(self, world_size: int) -> int:
        """Returns the number of replicas of the model; ValueError where the world does not
        divide."""
        check_rules(WORLD_RULES, layout=self.layout(1), world_size=world_size)
        return world_size // self.model_parallel_size
