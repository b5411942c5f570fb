"""mcore. Low-rank adapters beside megatron-core's parallel linear layers, exact in any layout.

A layer that computes W x then gives W x + scale * B A x. W is frozen; A [rank, in] starts random, B
[out, rank] zero. Where megatron-core joins several layers in one (queries, keys and values; gate
and up), each layer of the HuggingFace model has an A and a B of its own (see `layers`): the A are
stacked, and the rows of the B stand in the order of the layer's own.

Tensor parallel ranks share A and B as they share the layer. Only tensors that are as wide as the
rank travel:

    layer                    A                     B                      what travels
    linear_qkv, linear_fc1   whole on each rank    cut like the rows of   A x, gathered under
                                                   W                      sequence parallel
    linear_proj, linear_fc2  cut like the columns  whole on each rank     A x, summed (or reduced
                             of W                                         and scattered)
    layers of an expert      whole                 whole                  nothing
"""

from __future__ import annotations

from collections.abc import Iterator
from types import MethodType
from typing import Any, NamedTuple

from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.mlp import apply_swiglu_sharded_factory
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor

from megatron.packing.model.attention.delta_net import by_section
from megatron.packing.model.names import linear_of, logical_name
from megatron.sft.model.huggingface.read import global_name
from megatron.sft.model.huggingface.tensors import Part, Sharding, Tensors, Weight
from megatron.sft.model.lora.adapter import Adapter
from megatron.sft.model.lora.layers import Adapted, adapted_layers
from megatron.sft.options.lora import LINEARS, LoraConfig


def add_adapters(
    gpt: GPTModel, lora: LoraConfig, seed: int = 1234, tensors: Tensors | None = None
) -> None:
    """Freezes a model but for `lora_modules_to_save`, and puts an adapter beside each layer that is
    asked for.

    Before DistributedDataParallel and the optimizer are made, after Float16Module: adapters are
    float32 at least. What they start from is a function of `seed`, the layer and its place in the
    model, whatever the layout.

    Args:
        tensors: of the folder that the model is from, which say what layers ours are made of; None:
            of Llama's kind.

    Raises ValueError for a model that adapters cannot stand in exactly.
    """
    config = gpt.config
    lora.check_layout(config.tensor_model_parallel_size, config.num_query_groups)
    if config.mtp_num_layers:
        raise ValueError(
            "--lora must not be used with --mtp-num-layers, whose layers have no adapters; drop one"
        )
    for parameter in gpt.parameters():
        parameter.requires_grad_(False)
    _thaw(gpt, lora)
    targeted = list(_targeted(gpt, lora, tensors))
    if not targeted:
        raise ValueError(
            f"--lora-target-modules {' '.join(lora.targets)} are in none of this stage's layers; "
            "add others"
        )
    for name, layer, weight, layers in targeted:
        layer.adapter = Adapter(layer, name, weight, layers, config, lora, seed)
        layer.register_forward_hook(_add_update)
        layer.sharded_state_dict = MethodType(_sharded_state_dict, layer)
    if config.recompute_granularity == "full" and gpt.pre_process:
        # Without it no input of the first layer has a gradient, and recomputation gives none.
        gpt.embedding.register_forward_hook(_require_grad)


def _thaw(gpt: GPTModel, lora: LoraConfig) -> None:
    """Lets the embeddings of `lora_modules_to_save` have gradients: tied ones are one weight by two
    names, of which the last stage has a copy.
    """
    names = set(lora.lora_modules_to_save)
    is_tied = gpt.share_embeddings_and_output_weights
    if gpt.pre_process and ("embed_tokens" in names or (is_tied and names)):
        gpt.embedding.word_embeddings.weight.requires_grad_(True)
    if (
        gpt.post_process
        and gpt.output_layer.weight is not None
        and ("lm_head" in names or (is_tied and names))
    ):
        gpt.output_layer.weight.requires_grad_(True)


class _Targeted(NamedTuple):
    """A linear layer of ours that gets an adapter."""

    name: str
    """Name in the whole model, not in this rank's part of it."""
    layer: Any
    weight: Weight
    layers: tuple[Adapted, ...]
    """Layers of the HuggingFace model that it is made of: q_proj, k_proj, v_proj of linear_qkv."""


def _targeted(gpt: GPTModel, lora: LoraConfig, tensors: Tensors | None) -> Iterator[_Targeted]:
    for local_name, module in gpt.named_modules():
        linear_name = linear_of(local_name)
        if linear_name is None or not lora.targets_in(linear_name):
            continue
        if not lora.covers(logical_name(f"{local_name}.weight").part):
            continue
        if not isinstance(module, (ColumnParallelLinear, RowParallelLinear)):
            raise ValueError(
                f"--lora needs megatron-core's own linear layers, but {local_name} is a "
                f"{type(module).__name__}, as Transformer Engine's are; uninstall "
                "transformer_engine to train adapters"
            )
        name = global_name(local_name, gpt)
        weight = (
            _weight_of(linear_name, module.output_size, gpt.config)
            if tensors is None
            else tensors.of_parameter(f"{name}.weight")
        )
        layers = adapted_layers(linear_name, weight, lora)
        if layers:
            yield _Targeted(name, module, weight, layers)


def _weight_of(linear_name: str, output_size: int, config: TransformerConfig) -> Weight:
    """Returns the rows of a layer as `huggingface.tensors` describes them, of a model without a
    table of its own; a row-parallel rank has them all.
    """
    modules = LINEARS[linear_name]
    sizes: tuple[int, ...] = (output_size,)
    groups = 1
    if linear_name == "qkv":
        head, groups = config.kv_channels, config.num_query_groups
        sizes = (config.num_attention_heads * head, groups * head, groups * head)
        if config.attention_output_gate:  # queries and gates are one layer
            modules, sizes = (modules[0], *modules), (sizes[0], *sizes)
    elif linear_name == "fc1":
        is_gated = config.gated_linear_unit
        sizes = (output_size // 2,) * 2 if is_gated else (0, output_size)
    elif linear_name == "in_proj":
        heads = config.linear_num_value_heads
        keys = config.linear_num_key_heads * config.linear_key_head_dim
        values = heads * config.linear_value_head_dim
        modules = (*(modules[0],) * 3, *modules[1:])
        sizes = (keys, keys, values, values, heads, heads)
    sharding: dict[str, Sharding] = {"qkv": "heads", "fc1": "sections", "in_proj": "sections"}
    parts = tuple(Part(module, (size,)) for module, size in zip(modules, sizes, strict=True))
    return Weight(sharding.get(linear_name, "whole"), parts, num_groups=groups)


def _add_update(
    layer: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor | None]
) -> tuple[Any, Any]:
    result, bias = output
    return (result + layer.adapter(inputs[0])).to(result.dtype), bias


def _require_grad(module: object, inputs: object, output: Tensor) -> Tensor:
    return output if output.requires_grad else output.requires_grad_()


def _sharded_state_dict(
    layer: Any,
    prefix: str = "",
    sharded_offsets: tuple[Any, ...] = (),
    metadata: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Returns megatron-core's own of the layer, with its adapter as ranks share it."""
    adapter = layer.adapter
    own = type(layer).sharded_state_dict(layer, prefix, sharded_offsets, metadata)
    name = "lora_A" if adapter.is_row_parallel else "lora_B"
    of_adapter = make_sharded_tensors_for_checkpoint(
        adapter.state_dict(keep_vars=True),
        f"{prefix}adapter.",
        {name: 1 if adapter.is_row_parallel else 0},
        sharded_offsets,
        tp_group=layer.tp_group,
        dp_cp_group=parallel_state.get_data_parallel_group(with_context_parallel=True),
    )
    key = f"{prefix}adapter.lora_B"
    if adapter.is_gated:
        of_adapter[key] = apply_swiglu_sharded_factory(of_adapter[key], sharded_offsets)
    elif len(adapter.sections) > 1:
        place = (adapter.group.rank(), adapter.group.size())
        of_adapter[key] = by_section(of_adapter[key], adapter.sections, place, sharded_offsets)
    return own | of_adapter
