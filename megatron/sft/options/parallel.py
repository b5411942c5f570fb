"""pure. Options of the parallel layout, and the data-parallel size that is left for it."""

from __future__ import annotations

import math
from dataclasses import dataclass

from megatron.packing.flags import check_range


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """Parallel layout."""

    tensor_model_parallel_size: int = 1
    """Ranks that share each layer's weights."""
    pipeline_model_parallel_size: int = 1
    """Pipeline stages (ranks that share the layers)."""
    num_layers_per_virtual_pipeline_stage: int | None = None
    """Layers per virtual stage of an interleaved pipeline."""
    context_parallel_size: int = 1
    """Ranks that share each sequence."""
    cp_comm_type: tuple[str, ...] = ("p2p",)
    """Exchange of keys and values over context parallel in Transformer Engine's attention: p2p,
    all_gather, a2a or a2a+p2p, one for all layers or one for each. Attention without
    Transformer Engine gathers them.
    """
    expert_model_parallel_size: int = 1
    """Ranks that share the experts."""
    sequence_parallel: bool = False
    """Split norms and dropout along the sequence over tensor-parallel ranks."""
    use_tp_pp_dp_mapping: bool = False
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
        unknown = set(self.cp_comm_type) - {"p2p", "all_gather", "allgather", "a2a", "a2a+p2p"}
        if unknown:
            raise ValueError(
                "--cp-comm-type must be p2p, all_gather, a2a or a2a+p2p, but is "
                f"{sorted(unknown)[0]}"
            )
        check_range(self, 0.01, None, "distributed_timeout_minutes")
        if (
            self.num_layers_per_virtual_pipeline_stage is not None
            and self.pipeline_model_parallel_size == 1
        ):
            raise ValueError(
                "--num-layers-per-virtual-pipeline-stage needs --pipeline-model-parallel-size of "
                "at least 2"
            )
        if self.overlap_param_gather and not (
            self.use_distributed_optimizer and self.overlap_grad_reduce
        ):
            raise ValueError(
                "--overlap-param-gather needs --use-distributed-optimizer and --overlap-grad-reduce"
            )

    @property
    def least_world_size(self) -> int:
        """Fewest processes that the layout takes."""
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
                f"start torchrun with --nproc-per-node {model}, or change them"
            )
        experts = self.expert_model_parallel_size * self.pipeline_model_parallel_size
        if world_size % experts:
            raise ValueError(
                f"the number of processes, {world_size}, must be a multiple of "
                "--expert-model-parallel-size times "
                f"--pipeline-model-parallel-size, {experts}; lower them or start more processes"
            )
        return world_size // model
