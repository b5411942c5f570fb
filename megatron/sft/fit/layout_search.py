"""mcore. Memory and validity of layouts for `megatron.planner.layouts`, by the trainer's checks and
traces.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from megatron.packing.flags import FlagError
from megatron.planner.layouts import Candidate
from megatron.sft.fit.estimate import Request, Shared, StageEstimate, estimates
from megatron.sft.fit.report import FRAGMENTATION_PERCENT, LIBRARIES_BYTES
from megatron.sft.options.config import SFTConfig


def config_of(base: SFTConfig, candidate: Candidate) -> SFTConfig:
    """Returns the options of `base` in that layout; ValueError where they contradict it."""
    granularity = None if candidate.recompute == "none" else candidate.recompute
    per_stage = candidate.layers_per_chunk(base.model.num_layers)
    return replace(
        base,
        model=replace(base.model, recompute_granularity=granularity),
        parallel=replace(
            base.parallel,
            tensor_model_parallel_size=candidate.tp,
            sequence_parallel=candidate.tp > 1,
            pipeline_model_parallel_size=candidate.pp,
            num_layers_per_virtual_pipeline_stage=per_stage if candidate.vpp > 1 else None,
            num_virtual_stages_per_pipeline_rank=None,
            decoder_first_pipeline_num_layers=None,
            decoder_last_pipeline_num_layers=None,
            account_for_embedding_in_pipeline_split=candidate.counts_embedding,
            account_for_loss_in_pipeline_split=candidate.counts_loss,
            context_parallel_size=candidate.cp,
            expert_model_parallel_size=candidate.ep,
            use_distributed_optimizer=candidate.shards_optimizer,
        ),
        packing=replace(
            base.packing, sequence_packing=True, max_seqlen_per_dp_cp_rank=candidate.capacity
        ),
    )


def is_valid(base: SFTConfig, candidate: Candidate) -> bool:
    """Returns whether the trainer would accept the layout."""
    try:
        config_of(base, candidate).check(candidate.world_size)
    except (FlagError, ValueError):
        return False
    return True


@dataclass(kw_only=True)
class Memory:
    """Bytes of layouts of one model, whose traces are shared between them."""

    base: SFTConfig
    vocab_size: int
    loss_share: float = 1.0
    found: dict[Candidate, list[StageEstimate]] = field(default_factory=dict)
    _shared: Shared = field(default_factory=dict)

    def num_bytes(self, candidate: Candidate) -> int:
        """Returns those of the fullest GPU, margin included."""
        request = Request(
            config=config_of(self.base, candidate),
            vocab_size=self.vocab_size,
            world_size=candidate.world_size,
            loss_share=self.loss_share,
        )
        self.found[candidate] = stages = estimates(request, self._shared)
        peak = max(stage.peak for stage in stages)
        return peak + peak * FRAGMENTATION_PERCENT // 100 + LIBRARIES_BYTES
