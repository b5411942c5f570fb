"""mcore. Optimizer, learning-rate schedule and the end of a step's gradients, as megatron-core has
them.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, finalize_model_grads
from megatron.core.optimizer import (
    MegatronOptimizer,
    OptimizerConfig,
    get_megatron_optimizer,
    get_standard_config_overrides,
)
from megatron.core.optimizer.optimizer_config import ParamKey
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron.sft.images.model import IS_PROJECTOR, IS_TOWER
from megatron.sft.options.config import SFTConfig
from megatron.sft.options.optimizer import ADAM_STATE

_DTYPES = {
    "fp32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "fp8": torch.uint8,  # as Transformer Engine's Adam names it
}


def build_optimizer(config: SFTConfig, model: list[DistributedDataParallel]) -> MegatronOptimizer:
    """Builds megatron-core's Adam, sharded over data parallel when asked; biases and norms without
    weight decay.
    """
    training, state = config.training, config.optimizer
    optimizer_config = OptimizerConfig(
        optimizer="adam",
        lr=training.lr,
        min_lr=training.min_lr,
        weight_decay=training.weight_decay,
        adam_beta1=training.adam_beta1,
        adam_beta2=training.adam_beta2,
        adam_eps=training.adam_eps,
        clip_grad=training.clip_grad,
        bf16=training.bf16,
        params_dtype=next(model[0].parameters()).dtype,
        use_distributed_optimizer=config.shards_optimizer,
        overlap_param_gather=config.parallel.overlap_param_gather,
        use_precision_aware_optimizer=state.use_precision_aware_optimizer,
        # the lower half of each main parameter; the upper one is the weight itself
        store_param_remainders=state.main_params_dtype == "fp32",
        main_grads_dtype=_DTYPES[state.main_grads_dtype],
        main_params_dtype=_DTYPES[state.main_params_dtype],
        **{f"{name}_dtype": _DTYPES[getattr(state, f"{name}_dtype")] for name in ADAM_STATE},
        optimizer_cpu_offload=state.optimizer_cpu_offload,
        optimizer_offload_fraction=state.optimizer_offload_fraction,
        overlap_cpu_optimizer_d2h_h2d=state.overlap_cpu_optimizer_d2h_h2d,
    )
    overrides = get_standard_config_overrides(optimizer_config) | _rates_of_tower(config)
    return get_megatron_optimizer(optimizer_config, model, config_overrides=overrides)


def _rates_of_tower(config: SFTConfig) -> dict[ParamKey, Any]:
    """Returns the learning rates of a trained vision tower and its projector, which follow the
    schedule of the others in proportion.
    """
    found: dict[ParamKey, Any] = {}
    training, images = config.training, config.images
    rates = ((IS_TOWER, images.tower_lr), (IS_PROJECTOR, images.projector_lr))
    for number, (mark, rate) in enumerate(rates, 2):
        if rate is not None:
            min_lr = training.min_lr * rate / training.lr if training.lr else 0.0
            # Checkpoints tell groups apart by `lr_mult`, which nothing multiplies.
            found[ParamKey(attr=mark)] = {
                "max_lr": rate,
                "min_lr": min_lr,
                "lr_mult": float(number),
            }
    return found


def build_scheduler(config: SFTConfig, optimizer: MegatronOptimizer) -> OptimizerParamScheduler:
    """Builds megatron-core's schedule. Its steps are samples, as in Megatron-LM: a run may continue
    with another global batch size.
    """
    training, batch = config.training, config.training.global_batch_size
    wsd_steps = None if training.lr_wsd_decay_iters is None else training.lr_wsd_decay_iters * batch
    return OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=training.lr,
        min_lr=training.min_lr,
        lr_warmup_steps=training.warmup_samples,
        lr_decay_steps=training.decay_samples,
        lr_decay_style=training.lr_decay_style,
        wsd_decay_steps=wsd_steps,
        lr_wsd_decay_style=training.lr_wsd_decay_style,
        start_wd=training.weight_decay,
        end_wd=training.weight_decay,
        wd_incr_steps=training.train_iters * batch,
        wd_incr_style="constant",
        use_checkpoint_opt_param_scheduler=False,
        override_opt_param_scheduler=True,  # a resumed run follows its own options
    )


def finalize_gradients(
    model: list[torch.nn.Module], num_tokens: torch.Tensor | None = None, **options: object
) -> None:
    """Does what megatron-core's `finalize_model_grads` does, but leaves `num_tokens` on the device.

    megatron-core asks the device whether there are tokens to divide by, for which the host waits.
    Without tokens all gradients are zero, so dividing by one is as good.
    """
    finalize_model_grads(model, None, **options)
    if num_tokens is None:
        return
    # Only the last stage has losses, so only it has counted; then all replicas' tokens are summed.
    dist.broadcast(
        num_tokens,
        src=parallel_state.get_pipeline_model_parallel_last_rank(),
        group=parallel_state.get_pipeline_model_parallel_group(),
    )
    dist.all_reduce(
        num_tokens, group=parallel_state.get_data_parallel_group(with_context_parallel=True)
    )
    for chunk in model:
        chunk.scale_gradients(1.0 / num_tokens.clamp(min=1))  # type: ignore[operator]


def connect(
    transformer_config: TransformerConfig,
    model: list[DistributedDataParallel],
    optimizer: MegatronOptimizer,
    config: SFTConfig,
) -> None:
    """Tells megatron-core's schedules how gradients are finished, and when they may travel."""
    transformer_config.finalize_model_grads_func = finalize_gradients
    transformer_config.grad_scale_func = optimizer.scale_loss
    if config.parallel.overlap_grad_reduce:
        no_sync = [chunk.no_sync for chunk in model]
        transformer_config.no_sync_func = no_sync[0] if len(no_sync) == 1 else no_sync
