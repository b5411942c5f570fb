"""pure. The options of a run, made small: its kinds of layers and its layout, other sizes.

What decides about packing is kept: kinds of layers, windows, position embeddings, experts, parallel
layout, scheduler, recomputation, adapters, form of the loss. Widths, depth, vocabulary and data are
not.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from megatron.packing.flags import FlagError
from megatron.packing.layers import options_of_each_layer
from megatron.sft.options.config import SFTConfig
from megatron.sft.options.data import DataConfig
from megatron.sft.options.kernels import KernelConfig
from megatron.sft.options.model import ModelConfig
from megatron.sft.options.optimizer import OptimizerStateConfig
from megatron.sft.options.output import OutputConfig
from megatron.sft.options.parallel import ParallelConfig

SEQ_LENGTH = 128
WINDOW = 6
"""Tokens that a windowed layer sees; less than any of the doctor's sequences has."""
_MAX_LAYERS = 6
_HIDDEN, _FFN, _HEAD, _EXPERT = 32, 48, 16, 16


def small_run(config: SFTConfig, *, world_size: int = 1, on_gpu: bool = False) -> SFTConfig:
    """Returns the options of a small run.

    Args:
        config: options of the run.
        world_size: processes that there are; a single one examines without the parallel layout.
        on_gpu: whether kernels and precision are those of the run, too.

    Raises:
        FlagError: for a run without packing.
    """
    if not config.packing.sequence_packing:
        raise FlagError(
            "the doctor examines packs, and this run has none: each row is one sequence; pass "
            "--sequence-packing"
        )
    parallel = config.parallel if world_size > 1 else ParallelConfig()
    replicas = parallel.data_parallel_size(world_size)
    model = _small_model(config.model, parallel, keeps_depth=world_size > 1)
    tensor = parallel.tensor_model_parallel_size
    training = replace(
        config.training,
        train_iters=1,
        train_epochs=None,
        train_samples=None,
        global_batch_size=8 * replicas,
        micro_batch_size=1,
        bf16=config.training.bf16 and on_gpu,
        eval_iters=0,
        sample_prompts=None,
        early_stopping=None,
        lr_decay_style="constant",
        lr_decay_iters=None,
        lr_decay_samples=None,
        lr_warmup_iters=0,
        lr_warmup_samples=None,
        lr_warmup_fraction=None,
        lr_wsd_decay_iters=None,
        min_lr=0.0,
    )
    return replace(
        config,
        model=model,
        parallel=parallel,
        packing=replace(config.packing, max_seqlen_per_dp_cp_rank=4 * SEQ_LENGTH, pack_cost=None),
        scheduling=replace(config.scheduling, outlier_delay_steps=0),
        data=DataConfig(mock_data=True, vocab_size=96 if 96 % (8 * tensor) == 0 else 16 * tensor),
        training=training,
        optimizer=config.optimizer if training.bf16 else OptimizerStateConfig(),
        kernels=config.kernels if on_gpu else KernelConfig(),
        output=OutputConfig(),
    )


def _small_model(model: ModelConfig, parallel: ParallelConfig, *, keeps_depth: bool) -> ModelConfig:
    tensor = parallel.tensor_model_parallel_size
    layers = list(range(model.num_layers)) if keeps_depth else _kept_layers(model)
    groups = model.num_query_groups or model.num_attention_heads
    per_group = model.num_attention_heads // groups
    if groups % tensor == 0:
        groups = tensor * min(groups // tensor, 2)
        per_group = min(per_group, 2)
    changes: dict[str, Any] = {
        "num_layers": len(layers),
        "hidden_size": _HIDDEN,
        "num_attention_heads": groups * per_group,
        "num_query_groups": groups if model.group_query_attention else None,
        "kv_channels": _HEAD,
        "ffn_hidden_size": _multiple(_FFN, tensor),
        "make_vocab_size_divisible_by": 8,
        "seq_length": SEQ_LENGTH,
        "max_position_embeddings": None,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        **{
            name: tuple(getattr(model, name)[layer] for layer in layers)
            for name in options_of_each_layer(model)
            if getattr(model, name)
        },
    }
    if model.window_size:
        changes["window_size"] = (min(model.window_size[0], WINDOW - 1), 0)
    if model.num_experts is not None:
        changes |= _small_experts(model, parallel)
    if model.linear_attention_freq:
        changes |= _small_delta_net(model, tensor * parallel.context_parallel_size)
    if model.global_kv_channels is not None:
        changes |= {
            "global_kv_channels": 2 * _HEAD,
            "global_num_query_groups": groups if groups % tensor else tensor,
        }
    if model.recompute_num_layers is not None and not keeps_depth:
        changes["recompute_num_layers"] = 1
    return replace(model, **changes)


def _kept_layers(model: ModelConfig) -> list[int]:
    """Returns the first two layers, the first of each kind, and the last."""
    options = [getattr(model, name) for name in options_of_each_layer(model)]
    kinds = [tuple(flags[layer] for flags in options if flags) for layer in range(model.num_layers)]
    firsts = [kinds.index(kind) for kind in dict.fromkeys(kinds)]
    last = model.num_layers - 1
    kept = sorted({0, min(1, last), *firsts[: _MAX_LAYERS - 1]})
    return kept if last in kept else [*kept, last]


def _small_experts(model: ModelConfig, parallel: ParallelConfig) -> dict[str, Any]:
    tensor, ranks = parallel.tensor_model_parallel_size, parallel.expert_model_parallel_size
    assert model.num_experts is not None
    topk = min(model.moe_router_topk, 2)
    count = model.num_experts
    unit = ranks * (model.moe_router_num_groups or 1)
    if count > 2 * unit and count % unit == 0:
        count = unit * max(2, -(-4 // unit))
    shared = model.moe_shared_expert_intermediate_size
    return {
        "num_experts": count,
        "moe_router_topk": min(topk, count),
        "moe_ffn_hidden_size": _multiple(_EXPERT, tensor),
        "moe_shared_expert_intermediate_size": None
        if shared is None
        else _multiple(_EXPERT, tensor),
    }


def _small_delta_net(model: ModelConfig, ranks: int) -> dict[str, Any]:
    keys, values = model.linear_num_key_heads, model.linear_num_value_heads
    assert keys is not None
    assert values is not None
    few = ranks * min(keys // ranks, 2) if keys % ranks == 0 else keys
    return {
        "linear_num_key_heads": few,
        "linear_num_value_heads": few * min(values // keys, 2),
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
    }


def _multiple(size: int, unit: int) -> int:
    return -(-size // unit) * unit


def declared_windows(model: ModelConfig) -> list[int]:
    """Returns the tokens that each layer sees, itself included; 0 for all."""
    return [kind.window or 0 for kind in model.layer_kinds()]
