"""mcore. Checks of the plug-in: settings and modules under which packs would be weighted wrongly,
mixed up, or read beyond a sequence's end raise ValueError.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.models.common.vision_module.vision_module import VisionModule
from megatron.core.transformer.attention import Attention
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.moe.moe_layer import BaseMoELayer
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from megatron.core.utils import unwrap_model

from megatron.packing.device import Device
from megatron.packing.model.parts import check_parts
from megatron.packing.plugin_rules import PASS_RULES, PLUGIN_RULES, TRAINING_RULES
from megatron.packing.rules import Layout, check_rules
from megatron.packing.scheduling.registry import get_scheduler

# Modules of `model` and `step` are imported when they are needed, as in `plugin`: older
# megatron-cores lack names that they import.


def check_config(config: Any) -> None:
    """Raises ValueError for a config that packs cannot be trained under."""
    from megatron.packing.model.get_batch import transformer_engine_installed
    from megatron.packing.step.settings import PackingOptions

    get_scheduler(config.sequence_packing_scheduler)  # no rule: it may import the user's module
    check_rules(
        PLUGIN_RULES,
        config=config,
        options=PackingOptions.of(config),
        transformer_engine=transformer_engine_installed(),
    )
    check_parts(config, layout=Layout.of(config))
    check_rules(PASS_RULES, config=config, device=Device.of(config))


def check_training(config: Any) -> None:
    """Raises ValueError for a config without the function that sums gradients over ranks and
    divides them by the number of tokens.
    """
    check_rules(TRAINING_RULES, config=config)


@contextmanager
def checking_packs(chunks: Sequence[torch.nn.Module]) -> Iterator[None]:
    """Raises ValueError, inside the `with`, for a forward step that leaves out an argument of the
    model without which packs would be trained otherwise than their sequences.
    """
    checks: list[tuple[torch.nn.Module, Callable[..., None]]] = []
    for chunk in chunks:
        modules = list(_outside_towers(chunk))
        checks += [(m, _check_layout) for m in modules if isinstance(m, Attention)][:1]
        checks += [(m, _check_mask) for m in modules if _has_counted_tokens(m)]
        checks += [(m, _check_further) for m in modules if getattr(m, "mtp_process", False)]
    hooks = [m.register_forward_pre_hook(check, with_kwargs=True) for m, check in checks]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _check_layout(module: object, arguments: object, options: dict[str, Any]) -> None:
    if options.get("packed_seq_params") is None:
        raise ValueError(
            "the model was called without packed_seq_params, and sequences of a pack would "
            "attend to one another; pass packed_seq_params=batch.packed_seq_params in the "
            "forward step"
        )


def _has_counted_tokens(module: torch.nn.Module) -> bool:
    """Returns whether `module` is a layer of experts whose number of tokens changes what is
    trained.
    """
    if not isinstance(module, BaseMoELayer):
        return False
    config: Any = module.config
    return bool(
        config.moe_router_enable_expert_bias or config.moe_aux_loss_coeff or config.moe_z_loss_coeff
    )


def _check_mask(module: object, arguments: Sequence[object], options: dict[str, Any]) -> None:
    if options.get("padding_mask", arguments[2] if len(arguments) > 2 else None) is None:
        raise ValueError(
            "a layer of experts was not told which tokens are padding, and would count them; pass "
            "the packed_seq_params of get_batch_on_this_rank_for_sequence_packing, and build the "
            "model of megatron-core's TransformerLayer, which hands them on"
        )


def _check_further(module: object, arguments: Sequence[object], options: dict[str, Any]) -> None:
    if options.get("input_ids", arguments[0] if arguments else None) is None:
        raise ValueError(
            "multi-token prediction needs the tokens on this pipeline stage, too; pass "
            "mtp_on_this_rank=True to get_batch_on_this_rank_for_sequence_packing, and its tokens "
            "and position_ids to the model"
        )
    if options.get("labels") is not None and options.get("loss_mask") is None:
        raise ValueError(
            "multi-token prediction would be trained on masked tokens and padding; pass "
            "loss_mask=batch.loss_mask in the forward step"
        )


def check_modules(chunk: torch.nn.Module) -> None:
    """Raises ValueError for a model whose attention takes no packs, whose gradients would be
    divided twice or summed twice, or whose reduction would wait for ever.
    """
    from megatron.packing.model.layers.experts import needs_mending
    from megatron.packing.model.loss.head import has_unused_output_weight

    if any(
        getattr(module.forward, "__func__", None) is DotProductAttention.forward
        for module in _outside_towers(chunk)
    ):
        raise ValueError(
            "the model was built with megatron-core's DotProductAttention, which refuses packs; "
            "build it with transformer_layer_spec=packed_block_spec(config) of "
            "megatron.packing.model.layer_spec, or with Transformer Engine"
        )
    if any(
        isinstance(module, MLASelfAttention) and module.config.context_parallel_size != 1
        for module in _outside_towers(chunk)
    ):
        raise ValueError(
            "megatron-core's MLASelfAttention was not checked with packs and context parallel; "
            "build the model with transformer_layer_spec=packed_block_spec(config) of "
            "megatron.packing.model.layer_spec, or pass --context-parallel-size 1"
        )
    if isinstance(chunk, DistributedDataParallel) and any(
        buffer.gradient_scaling_factor != 1.0
        for buffer in chunk.buffers + chunk.expert_parallel_buffers
    ):
        raise ValueError(
            "DistributedDataParallel was built without calculate_per_token_loss and would divide "
            "gradients a second time; set it in the config before the model is wrapped"
        )
    if any(map(needs_mending, unwrap_model(chunk).modules())):
        raise ValueError(
            "experts with biases were built as megatron-core has them: gradients of the biases are "
            "summed over tensor parallel twice, or refused; call mend_expert_biases(gpt) of "
            "megatron.packing.model.layers.experts before the model is wrapped"
        )
    if (
        isinstance(chunk, DistributedDataParallel)
        and chunk.ddp_config.overlap_grad_reduce
        and any(has_unused_output_weight(module) for module in chunk.modules())
    ):
        raise ValueError(
            "overlap_grad_reduce would wait for ever for the output layer's weight, of which this "
            "stage uses the embedding's copy alone; call drop_unused_output_weight(gpt) of "
            "megatron.packing.model.loss.head before the model is wrapped"
        )


def _outside_towers(module: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """Yields a module and those in it, without megatron-core's vision towers: they see images, no
    packs.
    """
    yield module
    for child in module.children():
        if not isinstance(child, VisionModule):
            yield from _outside_towers(child)


def check_groups(pg_collection: object) -> None:
    """Raises ValueError for a collection given that lacks a group that packing needs."""
    from megatron.packing.step.global_batch import GROUPS

    missing = [
        name
        for name in GROUPS
        if pg_collection is not None and getattr(pg_collection, name, None) is None
    ]
    if missing:
        raise ValueError(
            f"sequence packing needs a pg_collection with {', '.join(GROUPS)}, but "
            f"{', '.join(missing)} is missing; set it, or leave pg_collection out"
        )


def checking_loss(forward_step_func: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps `forward_step_func` to raise ValueError where its loss function returns a mean: a mean
    per microbatch cannot be undone.
    """

    @wraps(forward_step_func)
    def forward_step(*arguments: object, **options: object) -> tuple[Any, Any]:
        output, loss_func = forward_step_func(*arguments, **options)

        def loss_of(output_tensor: object, **loss_options: object) -> Any:
            loss = loss_func(output_tensor, **loss_options)
            if len(loss) != 3 and not loss_options.get("non_loss_data"):
                raise ValueError(
                    "sequence packing needs a loss function that returns (sum of losses, integer "
                    f"number of tokens, dict), but it returned {len(loss)} values; a mean would "
                    "weight tokens by their pack"
                )
            return loss

        return output, None if loss_func is None else loss_of

    return forward_step
