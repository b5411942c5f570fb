"""mcore. Puts low-rank adapters beside megatron-core's parallel linear layers, exact in any
parallel layout.

A layer that computes W x then returns W x + scale * B A x. W is frozen. A [rank, in] starts random,
B [out, rank] zero. megatron-core joins several HuggingFace modules in one layer (q, k, v; gate,
up). Each of these modules has an A and a B of its own, as in PEFT (see `layers` and `adapter`).

Tensor-parallel ranks share A and B as they share the layer. Only tensors with the small rank as
their width are exchanged:

    layer                    A                     B                      exchanged
    linear_qkv, linear_fc1   whole on each rank    split like the rows    A x, gathered under
                                                   of W                   sequence parallel
    linear_proj, linear_fc2  split like the        whole on each rank     A x, summed (or reduced
                             columns of W                                 and scattered)
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

from megatron.packing.layers import Sharding
from megatron.packing.model.names import linear_of, logical_name
from megatron.packing.model.parts import fewest_groups, parts_in
from megatron.packing.model.sections import by_section
from megatron.sft.model.huggingface.read import global_name
from megatron.sft.model.huggingface.tensors import Part, Tensors, Weight
from megatron.sft.model.lora.adapter import Adapter
from megatron.sft.model.lora.gates import add_gate_adapter, gate_of
from megatron.sft.model.lora.layers import Adapted, adapted_layers
from megatron.sft.options.lora import LINEARS, LoraConfig


def add_adapters(
    gpt: GPTModel, lora: LoraConfig, seed: int = 1234, tensors: Tensors | None = None
) -> None:
    """Freezes a model except for `lora_modules_to_save`, and puts an adapter beside each target
    layer.

    Call it after Float16Module, so that adapters stay float32, and before DistributedDataParallel
    and the optimizer are made. Initial values depend on `seed` and on the layer's name in the whole
    model, and not on the parallel layout.

    Raises ValueError for a model that cannot have exact adapters.

    Args:
        tensors: table of the HuggingFace tensors of each layer, as `adapted_tensors` gives it; None
            for a Llama.
    """
    config = gpt.config
    lora.check_layout(config.tensor_model_parallel_size, fewest_groups(config))
    if config.mtp_num_layers:
        raise ValueError(
            "--lora must not be used with --mtp-num-layers, whose layers have no adapters; drop one"
        )
    for parameter in gpt.parameters():
        parameter.requires_grad_(False)
    _thaw(gpt, lora)
    targeted = list(_targeted(gpt, lora, tensors))
    gates = list(_targeted_gates(gpt, lora))
    if not targeted and not gates:
        raise ValueError(
            f"--lora-target-modules {' '.join(lora.targets)} are in none of this stage's layers; "
            "add others"
        )
    for name, layer, weight, layers in targeted:
        layer.adapter = Adapter(layer, name, weight, layers, config, lora, seed)
        layer.register_forward_hook(_add_update)
        layer.sharded_state_dict = MethodType(_sharded_state_dict, layer)
    for name, module in gates:
        add_gate_adapter(module, name, lora, seed)
    if config.recompute_granularity is not None and gpt.pre_process:
        # With a frozen embedding the first layer's input needs no gradient, nor does that of its
        # MLP if no adapter comes before. What is recomputed would then get no gradients at all.
        gpt.embedding.register_forward_hook(_require_grad)


def _thaw(gpt: GPTModel, lora: LoraConfig) -> None:
    """Makes the embeddings, or the score, of `lora_modules_to_save` trainable. Tied embeddings are
    one weight with two names, and the last stage has a copy of it, so that either name makes both
    trainable.
    """
    names = set(lora.lora_modules_to_save)
    is_tied = gpt.share_embeddings_and_output_weights
    if gpt.pre_process and ("embed_tokens" in names or (is_tied and names)):
        gpt.embedding.word_embeddings.weight.requires_grad_(True)
    if (
        gpt.post_process
        and gpt.output_layer.weight is not None
        and (names & {"lm_head", "score"} or (is_tied and names))
    ):
        gpt.output_layer.weight.requires_grad_(True)


class _Targeted(NamedTuple):
    """A linear layer that gets an adapter."""

    name: str
    """Name in the whole model."""
    layer: Any
    weight: Weight
    layers: tuple[Adapted, ...]
    """Its HuggingFace modules that have an adapter: q_proj and v_proj of linear_qkv, for example.
    """


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


def _targeted_gates(gpt: GPTModel, lora: LoraConfig) -> Iterator[tuple[str, Any]]:
    """Yields (name in the whole model, module) of the modules with a gate that gets an adapter."""
    for local_name, module in gpt.named_modules():
        gate = gate_of(module)
        if gate is not None and lora.targets_in(gate):
            yield global_name(local_name, gpt), module


def _weight_of(linear_name: str, output_size: int, config: TransformerConfig) -> Weight:
    """Returns the weight of a layer for a model without a table of tensors. Its parts have numbers
    of rows only.
    """
    modules = LINEARS[linear_name]
    sizes: tuple[int, ...] = (output_size,)
    sharding: Sharding = "whole"
    groups = 1
    if linear_name == "qkv":
        head, groups = config.kv_channels, config.num_query_groups
        sizes = (config.num_attention_heads * head, groups * head, groups * head)
        if config.attention_output_gate:  # queries and gates are one layer
            sizes = (sizes[0], *sizes)
        sharding = "heads"
    elif linear_name == "fc1":
        sizes = (output_size // 2,) * 2 if config.gated_linear_unit else (0, output_size)
        sharding = "sections"
    for part in parts_in(config):
        for parameter in part.parameters:
            is_meant = parameter.takes_adapter and parameter.linear == linear_name
            if is_meant and parameter.sharding != "columns":  # of which each rank has all rows
                described = part.of(config)
                named = {**described.sizes(), "hidden": config.hidden_size}
                groups = described.num_groups or 1
                sizes = tuple(named[size] for size in parameter.shape[0].split(","))
                sharding = parameter.sharding
    # Of a layer with more sections than modules, the first module has those beyond one for each.
    modules = (modules[0],) * (len(sizes) - len(modules)) + modules
    parts = tuple(Part(module, (size,)) for module, size in zip(modules, sizes, strict=True))
    return Weight(sharding, parts, num_groups=groups)


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
    """Returns the layer's own sharded state with that of its adapter added. It replaces the
    layer's method of this name.
    """
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
