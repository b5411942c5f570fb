"""pure. What packs need of megatron-core's config, as rules (see `packing.rules`):

    PLUGIN_RULES        of a config that a script brings
    PASS_RULES          of any config that packs run under, the trainer's among them
    TRAINING_RULES      of one that is trained, not only evaluated

Their facts are `config`, megatron-core's or any object with its fields, `options`, its
`PackingOptions`, and `device` and `transformer_engine`, whether the package computes attention.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megatron.packing.rules import Rule


def demand(when: Callable[..., object], needed: str, way_out: str = "") -> Rule:
    """Returns the rule of a config that lacks what is `needed`: `fp4=None: why`."""
    return Rule(when, f"sequence packing needs TransformerConfig {needed}", way_out)


def _demand_of_experts(is_wrong: Callable[[Any], object], needed: str) -> Rule:
    return demand(lambda config: config.num_moe_experts is not None and is_wrong(config), needed)


def _captures_graphs(config: Any) -> bool:
    return bool(
        config.cuda_graph_impl != "none" or config.enable_cuda_graph or config.external_cuda_graph
    )


def _yarn_scales_attention(config: Any) -> bool:
    from megatron.core.models.common.embeddings.yarn_rotary_pos_embedding import (
        _yarn_get_concentration_factor_from_config,
    )

    return _yarn_get_concentration_factor_from_config(config) != 1.0


def _balances_otherwise(config: Any) -> bool:
    types = config.moe_router_load_balancing_type
    return not ({types} if isinstance(types, str) else set(types)) <= {"aux_loss", "none"}


def _leaves_whole_experts_unsummed(config: Any) -> bool:
    sizes = None, config.tensor_model_parallel_size
    return (
        config.expert_model_parallel_size == 1 and config.expert_tensor_parallel_size not in sizes
    )


def _is_interleaved(config: Any) -> bool:
    is_pipeline = config.pipeline_model_parallel_size > 1
    return is_pipeline and config.virtual_pipeline_model_parallel_size is not None


PLUGIN_RULES = (
    Rule(
        when=lambda config, options: (
            options.delay_queue is not None and config.sequence_packing_scheduler == "empty"
        ),
        why="--outlier-delay-steps needs a scheduler that mixes what was loaded",
        way_out="pass --sequence-packing-scheduler default",
    ),
    Rule(
        when=lambda config: getattr(config, "max_seqlen_per_dp_cp_rank", None) is None,
        why="sequence packing needs the tokens that one rank may hold of a pack",
        way_out="pass --max-seqlen-per-dp-cp-rank N",
    ),
    demand(
        lambda config: config.fp4 is not None,
        "fp4=None: it was not checked with packs",
    ),
    demand(
        _captures_graphs,
        'cuda_graph_impl="none": packs differ in length from step to step',
    ),
    demand(
        lambda config: config.overlap_moe_expert_parallel_comm,
        "overlap_moe_expert_parallel_comm=False: its schedule was not checked with packs",
    ),
    demand(
        lambda config: config.apply_rope_fusion and _yarn_scales_attention(config),
        "apply_rope_fusion=False with YaRN: the fused kernel for packs leaves out its scale of "
        "attention scores",
    ),
    demand(
        lambda config: config.apply_rope_fusion and config.mrope_section is not None,
        "apply_rope_fusion=False with mrope_section: the fused kernel for packs gives each "
        "sequence the positions of the pack's first one",
    ),
    demand(
        lambda config, transformer_engine: (
            config.fp8 is not None and (not transformer_engine or config.fp8_dot_product_attention)
        ),
        "fp8=None without Transformer Engine, which alone computes in it, and "
        "fp8_dot_product_attention=False: it takes no packs",
    ),
    _demand_of_experts(
        lambda config: config.moe_token_dispatcher_type != "alltoall",
        'moe_token_dispatcher_type="alltoall": ranks hold packs of different lengths, which '
        '"allgather" cannot take, and "flex" was not checked with',
    ),
    _demand_of_experts(
        lambda config: config.moe_expert_capacity_factor is not None,
        "moe_expert_capacity_factor=None: which tokens an expert drops would depend on who shares "
        "their pack",
    ),
    _demand_of_experts(
        _balances_otherwise,
        'moe_router_load_balancing_type="aux_loss" or "none": others balance a pack as if it were '
        "one sequence, or count tokens of earlier packs",
    ),
    _demand_of_experts(
        _leaves_whole_experts_unsummed,
        "expert_tensor_parallel_size equal to tensor_model_parallel_size, or "
        "expert_model_parallel_size above 1: megatron-core would not sum the gradients of whole "
        "experts over tensor-parallel ranks",
    ),
)

PASS_RULES = (
    demand(
        lambda config: not config.calculate_per_token_loss,
        "calculate_per_token_loss=True: tokens would be weighted by their pack",
    ),
    demand(
        lambda config: getattr(config, "hybrid_context_parallel", False),
        "hybrid_context_parallel=False: it schedules the same batch a second time and can zero "
        "gradients",
    ),
    demand(
        lambda config: config.pipeline_model_parallel_size > 1 and not config.variable_seq_lengths,
        "variable_seq_lengths=True: packs differ in length",
    ),
    demand(
        lambda config: (
            _is_interleaved(config) and (not config.overlap_p2p_comm or config.batch_p2p_comm)
        ),
        "overlap_p2p_comm=True and batch_p2p_comm=False: otherwise interleaved stages mix up "
        "tensors or hang",
    ),
    demand(
        lambda config, device: (
            _is_interleaved(config) and config.deallocate_pipeline_outputs and not device.is_gpu
        ),
        "deallocate_pipeline_outputs=False on CPU: gloo would send memory that is freed meanwhile",
    ),
    demand(
        lambda config: (
            config.mtp_num_layers is not None
            and config.recompute_method == "uniform"
            and config.recompute_num_layers != 1
        ),
        'recompute_num_layers=1 with mtp_num_layers and recompute_method="uniform": megatron-core '
        "recomputes layers of multi-token prediction one by one",
    ),
)

TRAINING_RULES = (
    demand(
        lambda config: config.finalize_model_grads_func is None,
        "finalize_model_grads_func, or gradients stay sums of this rank",
        "set it to megatron.core.distributed.finalize_model_grads",
    ),
)
