"""mcore. Packing settings of a run, read once from megatron-core's config and the layout, under
Megatron-LM's names.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from inspect import signature
from typing import Any

import torch.distributed as dist
from megatron.core.fp8_utils import get_fp8_align_size
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.enums import LayerType
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron.packing.batch.layout import Alignment, OverLengthPolicy
from megatron.packing.batch.tree_cuts import TreeRules
from megatron.packing.device import Device
from megatron.packing.layers import LayerKind
from megatron.packing.scheduling.cost import (
    FLOPS_PER_SECOND,
    PackCost,
    gpt_layers,
    launch_seconds,
    layers_pack_cost,
    part_shares,
)
from megatron.packing.scheduling.fitted_cost import FittedCost
from megatron.packing.scheduling.options import SchedulerOptions
from megatron.packing.scheduling.step_time import StepModel
from megatron.packing.stages import StageLayers
from megatron.packing.step.delay import DelayQueue
from megatron.packing.step.payload_store import PayloadStore
from megatron.packing.step.trees import why_paths_stay_apart

UNKNOWN_MODEL = PackCost(linear=1.0, quadratic=1 / 60_000)
"""For a config that describes no model: attention costs what all else does at 60,000 tokens, as
with 8B parameters.
"""


_NAMES_OF_LAYERS = tuple(signature(gpt_layers).parameters)


@dataclass(frozen=True, kw_only=True)
class PackingOptions:
    """Options of packing for which Megatron-LM's config has no field.

    `config.sequence_packing_options` holds one (see `of`).
    """

    over_length_policy: OverLengthPolicy = "error"
    """Treatment of a sample that no pack can hold."""
    scheduling: SchedulerOptions = field(default_factory=SchedulerOptions)
    cost: PackCost | None = None
    """Cost of packs; None takes FLOPs."""
    delay_queue: DelayQueue | None = None
    """Queue of outliers, whose state belongs in a script's checkpoints. None delays nothing."""
    payloads: PayloadStore | None = None
    """How payloads are made, moved and bounded. None takes samples of tokens alone."""
    seed: int = 0
    step: int = 0
    """Number of the step. A scheduler's random choices come from it and from `seed`, so that a
    resumed run repeats them. `wrap_dataloader` takes it as it is. The hook on megatron-core's
    schedules counts on from its value at the first training step.
    """
    prefetch_global_batches: int = 0
    """Global batches that the hook prepares before training asks for them (see `step.prefetch`)."""
    vocab_size: int = 0
    """Rows of the output layer, which the last pipeline stage has besides its layers; 0 leaves it
    out.
    """
    logits_of_masked_tokens: bool = False
    """Compute the output layer and the loss of masked tokens as well (see `model.head`)."""
    megatron_lm_calls: bool = False
    """Accept Megatron-LM's own calls (see `conventions`): an iterator is None on most
    tensor-parallel ranks, and the hook's result ends in two more entries, the global batch's sums
    of lengths and of their squares.
    """

    @classmethod
    def of(cls, config: TransformerConfig) -> PackingOptions:
        """Returns a config's options, the defaults if it has none."""
        return getattr(config, "sequence_packing_options", None) or cls()


@dataclass(frozen=True, kw_only=True)
class PackingSettings:
    """Settings by which a global batch is packed; equal on all ranks."""

    scheduler: str
    """A name in `registry.SCHEDULERS`, or module:function."""
    alignment: Alignment
    capacity: int
    """Tokens that a pack may hold, whole alignment units."""
    over_length_policy: OverLengthPolicy
    """Treatment of a sample that no pack can hold."""
    microbatch_multiple: int
    """The number of microbatches must be a multiple of it (interleaved pipelines)."""
    cost: PackCost
    model: StepModel
    """Step-time model: data-parallel ranks and pipeline stages wait for one another."""
    options: SchedulerOptions = field(default_factory=SchedulerOptions)
    """Options of scheduling that the user set."""
    seed: int = 0
    step: int = 0
    """See `PackingOptions`."""
    paths_apart: str = ""
    """Why each path of a tree becomes a sequence; "" where shared prefixes are computed once."""

    tree_keys_per_token: float = 32.0
    """See `TreeRules.keys_per_token`."""

    @property
    def trees(self) -> TreeRules:
        """Rules by which trees are shaped."""
        return TreeRules(
            alignment=self.alignment,
            capacity=self.capacity,
            linear=self.cost.linear,
            quadratic=self.cost.quadratic,
            keys_per_token=self.tree_keys_per_token,
            keeps_trees=not self.paths_apart,
        )

    @classmethod
    def of(
        cls,
        config: TransformerConfig,
        groups: ProcessGroupCollection,
        scheduler: str | None = None,
        step: int | None = None,
    ) -> PackingSettings:
        """Returns the settings of a run.

        Args:
            config: megatron-core's, or any object with the fields of packing. A field that
                megatron-core's dataclass does not have yet is read by name.
            scheduler, step: override those of `config`.

        Raises:
            ValueError: on every rank alike, if `max_seqlen_per_dp_cp_rank` is missing or too small
                for the layout.
        """
        alignment = _alignment_of(config, groups)
        options = PackingOptions.of(config)
        multiple = 1
        if config.virtual_pipeline_model_parallel_size is not None:
            multiple = config.microbatch_group_size_per_vp_stage or groups.pp.size()
        cost = options.cost
        if cost is None:
            cost = cost_of(config) if hasattr(config, "num_layers") else UNKNOWN_MODEL
        return cls(
            scheduler=scheduler or getattr(config, "sequence_packing_scheduler", None) or "default",
            alignment=alignment,
            capacity=_capacity_of(config, groups, alignment),
            over_length_policy=options.over_length_policy,
            microbatch_multiple=multiple,
            cost=cost,
            options=options.scheduling,
            seed=options.seed,
            step=options.step if step is None else step,
            paths_apart=why_paths_stay_apart(config),
            tree_keys_per_token=_tree_keys_per_token(config),
            model=StepModel(
                num_stages=groups.pp.size(),
                num_virtual_stages=config.virtual_pipeline_model_parallel_size or 1,
                stage_group=multiple,
                sync_every_microbatch=groups.dp.size() > 1 and _experts_span_ranks(config, groups),
                shares=_shares_of(config, groups.pp.size(), options.vocab_size),
            ),
        )


def _alignment_of(config: TransformerConfig, groups: ProcessGroupCollection) -> Alignment:
    is_fp8 = getattr(config, "fp8", None) is not None
    return Alignment.for_layout(
        context_parallel_size=groups.cp.size(),
        tensor_parallel_size=groups.tp.size(),
        sequence_parallel=getattr(config, "sequence_parallel", False),
        rank_multiple=get_fp8_align_size(config.fp8_recipe) if is_fp8 else 1,
    )


def _capacity_of(
    config: TransformerConfig, groups: ProcessGroupCollection, alignment: Alignment
) -> int:
    """Returns the tokens that a pack may hold, whole alignment units."""
    per_rank = config.max_seqlen_per_dp_cp_rank
    smallest = -(-alignment.pack // groups.cp.size())
    if per_rank is None or per_rank < smallest:
        raise ValueError(
            f"--max-seqlen-per-dp-cp-rank must be at least {smallest} in this layout, but is "
            f"{per_rank}; set it to the tokens of the longest sequence over the "
            "context-parallel size"
        )
    return per_rank * groups.cp.size() // alignment.pack * alignment.pack


def _tree_keys_per_token(config: TransformerConfig) -> float:
    """Returns how many keys and values take as much memory as what a layer keeps of a token for the
    backward pass: 34 bytes per channel (arXiv 2205.05198, equation 1 without attention), beside 4
    per channel of a group's key and value.

    Zigzag context parallel gathers a node's path for both of a rank's pieces of it, which are
    1 / cp of its tokens. At least 8, at which a chat of ten turns is not cut.
    """
    if not hasattr(config, "num_layers"):
        return 32.0
    shape = _shape_of(config)
    of_token = 34 * shape["hidden_size"]
    of_key = 4 * shape["num_query_groups"] * shape["kv_channels"]
    cp = config.context_parallel_size
    return max(8.0, of_token / of_key / (2 * cp if cp > 1 else 1))


def cost_of(config: TransformerConfig, vocab_size: int = 0) -> PackCost:
    """Returns the FLOPs of a pack through GPTModel.

    Context-parallel ranks share the work, but each moves all the weights: `fixed` counts once for
    each of them. All ranks that share a pack launch its kernels: `least` counts once for each,
    where there is a GPU to launch them on.

    Args:
        vocab_size: no config has it; without it the output layer is not counted.
    """
    cost = layers_pack_cost(
        _kinds_of(config),
        hidden_size=config.hidden_size,
        vocab_size=vocab_size,
        is_gated=config.gated_linear_unit,
        mtp_num_layers=config.mtp_num_layers or 0,
    )
    least = 0.0
    if Device.of(config).is_gpu:
        parts = config.pipeline_model_parallel_size * (
            config.virtual_pipeline_model_parallel_size or 1
        )
        seconds = launch_seconds(config.num_layers + (config.mtp_num_layers or 0), parts)
        ranks = config.tensor_model_parallel_size * config.context_parallel_size
        least = seconds * FLOPS_PER_SECOND * ranks
    return replace(cost, fixed=cost.fixed * config.context_parallel_size, least=least)


def _shares_of(config: TransformerConfig, num_stages: int, vocab_size: int) -> tuple[float, ...]:
    """Returns the shares of `StepModel`, of a config that describes a model; else ()."""
    if num_stages == 1 or not hasattr(config, "num_layers"):
        return ()
    return part_shares(
        _kinds_of(config),
        _layers_of_parts(config, num_stages),
        hidden_size=config.hidden_size,
        vocab_size=vocab_size,
        is_gated=config.gated_linear_unit,
        mtp_num_layers=config.mtp_num_layers or 0,
    )


def _layers_of_parts(config: TransformerConfig, num_stages: int) -> Sequence[int]:
    """Returns the layers of each chunk of each stage, in the order of the layers."""
    layout = getattr(config, "pipeline_model_parallel_layout", None)
    if layout is not None:  # layout[stage][chunk] lists the layers, embedding and loss among them
        return [
            chunk.count(LayerType.decoder) for chunks in zip(*layout.layout) for chunk in chunks
        ]
    return StageLayers(
        num_stages=num_stages,
        num_virtual_stages=config.virtual_pipeline_model_parallel_size or 1,
        first=getattr(config, "num_layers_in_first_pipeline_stage", None),
        last=getattr(config, "num_layers_in_last_pipeline_stage", None),
        counts_embedding=getattr(config, "account_for_embedding_in_pipeline_split", False),
        counts_loss=getattr(config, "account_for_loss_in_pipeline_split", False),
    ).of_parts(config.num_layers)


def reads_tokens(config: TransformerConfig, pp: dist.ProcessGroup) -> bool:
    """Returns whether this pipeline stage reads tokens.

    The first stage has the embedding, the last one the loss. Multi-token prediction is on the last
    one, too, unless the layout has it elsewhere. The other stages read only where sequences begin
    and end.
    """
    layout = getattr(config, "pipeline_model_parallel_layout", None)
    # Read on all stages: what is no layout fails on all of them alike.
    chunks = () if layout is None else layout.layout[pp.rank()]
    return pp.rank() in (0, pp.size() - 1) or any(LayerType.mtp in chunk for chunk in chunks)


def _kinds_of(config: TransformerConfig) -> Sequence[LayerKind]:
    """Returns a config's layers: our own field of it, or what megatron-core's fields say."""
    kinds: Sequence[LayerKind] | None = getattr(config, "layer_kinds", None)
    if kinds is not None:
        return kinds
    shape = _shape_of(config)
    return gpt_layers(**{name: shape[name] for name in _NAMES_OF_LAYERS if name in shape})


def model_of(config: TransformerConfig, vocab_size: int | None = None) -> dict[str, Any]:
    """Returns the properties of a model that decide a pack's time on a device, as plain values.

    `vocab_size` is among them if it is known.
    """
    modules = config.recompute_modules
    return {
        **_shape_of(config),
        **({} if vocab_size is None else {"vocab_size": vocab_size}),
        "mtp_num_layers": config.mtp_num_layers,
        "recompute_granularity": config.recompute_granularity,
        **({} if modules in (None, ["core_attn"]) else {"recompute_modules": modules}),
        "dtype": str(config.params_dtype).removeprefix("torch."),
    }


def measured_cost(
    fitted: FittedCost, config: TransformerConfig, vocab_size: int | None = None
) -> PackCost:
    """Returns the seconds of a pack on one rank of `config`'s layout.

    Raises ValueError if another model was measured.
    """
    fitted.check_model(model_of(config, vocab_size))
    # The output layer is in the measured linear term. Its share of it is taken from FLOPs.
    cost = fitted.of_rank(
        tensor_parallel_size=config.tensor_model_parallel_size,
        context_parallel_size=config.context_parallel_size,
    )
    flops = cost_of(config, vocab_size or 0)  # all tokens of the measured packs had a loss
    return replace(
        cost,
        head=cost.linear * flops.head / flops.linear,
        # What windows save is in the measured terms; their sums are kept for the FLOPs.
        windows=tuple((window, 0.0) for window, _ in flops.windows),
    )


def _shape_of(config: TransformerConfig) -> dict[str, Any]:
    has_experts = config.moe_layer_freq if isinstance(config.moe_layer_freq, list) else []
    num_dense_layers = len(has_experts) - sum(has_experts)
    return {
        "num_layers": config.num_layers,
        "hidden_size": config.hidden_size,
        "num_attention_heads": config.num_attention_heads,
        "num_query_groups": config.num_query_groups or config.num_attention_heads,
        "kv_channels": config.kv_channels or config.hidden_size // config.num_attention_heads,
        "ffn_hidden_size": config.ffn_hidden_size or 4 * config.hidden_size,
        "swiglu": config.gated_linear_unit,
        "num_experts": config.num_moe_experts,
        "moe_router_topk": config.moe_router_topk,
        "moe_ffn_hidden_size": config.moe_ffn_hidden_size,
        "moe_shared_expert_intermediate_size": config.moe_shared_expert_intermediate_size,
        **({"num_dense_layers": num_dense_layers} if num_dense_layers else {}),
        **({"mtp_num_layers": config.mtp_num_layers} if config.mtp_num_layers else {}),
        **({"window": config.window_size[0] + 1} if config.window_size else {}),
    }


def _experts_span_ranks(config: TransformerConfig, groups: ProcessGroupCollection) -> bool:
    """Returns whether data-parallel ranks exchange tokens in every layer, and so wait for the
    slowest at each microbatch.
    """
    if getattr(config, "num_moe_experts", None) is None:
        return False
    expert_ranks = config.expert_model_parallel_size * (config.expert_tensor_parallel_size or 1)
    # Expert parallel takes the ranks of tensor and of context parallel first.
    return expert_ranks > groups.tp.size() * groups.cp.size()
