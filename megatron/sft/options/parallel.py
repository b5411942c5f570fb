"""pure. Options of the parallel layout, and the data-parallel size that is left for it."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from megatron.packing.flags import check_range, flag_of
from megatron.packing.model.shape import Split
from megatron.packing.rules import Layout
from megatron.packing.stages import StageLayers


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

    def __post_init__(self) -> None:
        check_range(
            self,
            1,
            None,
            "tensor_model_parallel_size",
            "pipeline_model_parallel_size",
            "context_parallel_size",
        )
        check_range(
            self, 1, None, "expert_model_parallel_size", "num_layers_per_virtual_pipeline_stage"
        )
        check_range(
            self,
            1,
            None,
            "decoder_first_pipeline_num_layers",
            "decoder_last_pipeline_num_layers",
        )
        check_range(self, 2, None, "num_virtual_stages_per_pipeline_rank")
        unknown = set(self.cp_comm_type) - {"p2p", "all_gather", "allgather", "a2a", "a2a+p2p"}
        if unknown:
            raise ValueError(
                "--cp-comm-type must be p2p, all_gather, a2a or a2a+p2p, but is "
                f"{sorted(unknown)[0]}"
            )
        check_range(self, 0.01, None, "distributed_timeout_minutes")
        self._check_pipeline()
        if self.overlap_param_gather and not (
            self.use_distributed_optimizer and self.overlap_grad_reduce
        ):
            raise ValueError(
                "--overlap-param-gather needs --use-distributed-optimizer and --overlap-grad-reduce"
            )

    def _check_pipeline(self) -> None:
        has_ends = bool(
            self.decoder_first_pipeline_num_layers or self.decoder_last_pipeline_num_layers
        )
        for name in (
            "num_layers_per_virtual_pipeline_stage",
            "num_virtual_stages_per_pipeline_rank",
            "decoder_first_pipeline_num_layers",
            "decoder_last_pipeline_num_layers",
        ):
            if getattr(self, name) is not None and self.pipeline_model_parallel_size == 1:
                raise ValueError(
                    f"{flag_of(name)} needs --pipeline-model-parallel-size of at least 2"
                )
        if self.num_layers_per_virtual_pipeline_stage is None:
            return
        if self.num_virtual_stages_per_pipeline_rank is not None:
            raise ValueError(
                "--num-layers-per-virtual-pipeline-stage and "
                "--num-virtual-stages-per-pipeline-rank say the same; drop one"
            )
        if has_ends:
            raise ValueError(
                "--num-layers-per-virtual-pipeline-stage needs stages of equally many layers; with "
                "--decoder-first-pipeline-num-layers or --decoder-last-pipeline-num-layers pass "
                "--num-virtual-stages-per-pipeline-rank"
            )

    @property
    def virtual_split(self) -> Split:
        """The flag that makes virtual stages, of those that may."""
        if self.num_virtual_stages_per_pipeline_rank is not None:
            return Split(
                "--num-virtual-stages-per-pipeline-rank", self.num_virtual_stages_per_pipeline_rank
            )
        return Split(
            "--num-layers-per-virtual-pipeline-stage",
            self.num_layers_per_virtual_pipeline_stage or 1,
        )

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

    @property
    def layout(self) -> Layout:
        """Sizes of the layout, for rules."""
        return Layout.of(self)

    @property
    def least_world_size(self) -> int:
        """Smallest number of processes for the parallel layout."""
        context, tensor = self.context_parallel_size, self.tensor_model_parallel_size
        return self.pipeline_model_parallel_size * math.lcm(
            tensor * context, self.expert_model_parallel_size
        )

    def data_parallel_size(self, world_size: int) -> int:
        """Returns the number of replicas of the model; ValueError where the world does not
        divide."""
        model = (
            self.tensor_model_parallel_size
            * self.pipeline_model_parallel_size
            * self.context_parallel_size
        )
        if world_size % model:
            raise ValueError(
                f"the number of processes, {world_size}, must be a multiple of tensor x pipeline x "
                f"context parallel size, {self.tensor_model_parallel_size} x "
                f"{self.pipeline_model_parallel_size} x {self.context_parallel_size} = {model}; "
                f"start {model} of them (--nproc-per-node {model}; for fit and plan --world-size "
                f"{model}), or change them"
            )
        experts = self.expert_model_parallel_size * self.pipeline_model_parallel_size
        if world_size % experts:
            raise ValueError(
                f"the number of processes, {world_size}, must be a multiple of "
                "--expert-model-parallel-size times "
                f"--pipeline-model-parallel-size, {experts}; lower them or start more processes"
            )
        return world_size // model
