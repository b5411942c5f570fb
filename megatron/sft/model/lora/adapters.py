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

import math
import zlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from types import MethodType
from typing import Any, NamedTuple

import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.transformer.mlp import apply_swiglu_sharded_factory
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor
from torch.nn.functional import dropout, linear

from megatron.packing.model.attention.delta_net import by_section
from megatron.packing.model.names import linear_of, logical_name
from megatron.sft.model.huggingface.read import global_name
from megatron.sft.model.huggingface.tensors import Part, Sharding, Tensors, Weight, copies
from megatron.sft.model.lora.layers import Adapted, adapted_layers
from megatron.sft.options.lora import LINEARS, LoraConfig

Product = Callable[[Tensor, Callable[["Adapter"], Tensor]], Tensor]
"""Multiplies rows [..., in] with the transpose of what a function gives of an adapter [out, in]."""


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


class Adapter(torch.nn.Module):
    """Parameters that are learned beside one linear layer.

    lora_A: [rank * number of modules, in] (or this rank's columns); lora_B: [rows of these modules
    on this rank, rank].
    blocks: the layer's rows on this rank, in order: (number of the module, or None for one without
    adapter; rows).
    """

    def __init__(
        self,
        layer: Any,
        name: str,
        weight: Weight,
        layers: Sequence[Adapted],
        config: TransformerConfig,
        lora: LoraConfig,
        seed: int,
    ) -> None:
        """`name`: the layer's, in the whole model; `layers` of the HuggingFace model: those with an
        adapter.
        """
        super().__init__()
        self.is_row_parallel = isinstance(layer, RowParallelLinear)
        self.group = layer.tp_group
        self.sequence_parallel = config.sequence_parallel and self.group.size() > 1
        self.scale = lora.scale
        self._dropout = lora.lora_dropout
        module_of = {part: n for n, adapted in enumerate(layers) for part in adapted.parts}
        self.num_modules = len(layers)
        self.is_gated = weight.sharding == "sections" and len(weight.parts) == len(module_of) == 2
        num_rows = layer.output_size if self.is_row_parallel else layer.output_size_per_partition
        found = [
            (copy.part, copy.rows)
            for copy in copies(weight, self.group.rank(), self.group.size(), num_rows)
        ]
        self.blocks = [(module_of.get(part), rows.stop - rows.start) for part, rows in found]
        self.sections = {
            str(part): rows.stop - rows.start
            for part, rows in found
            if weight.sharding == "sections" and part in module_of
        }
        dtype = torch.promote_types(layer.weight.dtype, torch.float32)
        options: dict[str, Any] = {"dtype": dtype, "device": layer.weight.device}
        modules = [f"{name}.{adapted.module}" for adapted in layers]
        wholes = [_kaiming(module, lora.lora_rank, layer.input_size, seed) for module in modules]
        if self.is_row_parallel:
            wholes = [whole.chunk(self.group.size(), 1)[self.group.rank()] for whole in wholes]
        self.lora_A = torch.nn.Parameter(torch.cat(wholes).to(**options))
        self.lora_B = torch.nn.Parameter(torch.zeros(sum(self._sizes()), lora.lora_rank, **options))
        self._mark(layer)

    def _sizes(self) -> list[int]:
        """Rows of each block that has an adapter."""
        return [num_rows for module, num_rows in self.blocks if module is not None]

    def _mark(self, layer: Any) -> None:
        """Tells megatron-core who shares what, as the layer's own weight does."""
        cut, whole = (
            (self.lora_A, self.lora_B) if self.is_row_parallel else (self.lora_B, self.lora_A)
        )
        set_tensor_model_parallel_attributes(cut, True, 1 if self.is_row_parallel else 0, 1)
        # The tensors of experts are whole, but no two ranks' are the same ones.
        set_tensor_model_parallel_attributes(whole, layer.is_expert, 0, 1)
        for parameter in (cut, whole):
            parameter.allreduce = getattr(layer.weight, "allreduce", True)  # type: ignore[attr-defined]
        # Each rank sees its share of the tokens only, so megatron-core sums the gradients as it
        # does a norm's.
        whole.sequence_parallel = self.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor, product: Product | None = None) -> Tensor:
        """Returns what the layer's output [tokens, batch, out on this rank] gains from its input.

        product: multiplies rows with a weight of their own expert's adapter, where `x` has those of
        several experts; this adapter then stands for all of them.
        """
        product = product or self._product
        reduced = product(self._dropped(x), lambda adapter: adapter.lora_A.to(x.dtype))
        is_shared = self.group.size() > 1
        if self.is_row_parallel:
            if self.sequence_parallel:
                reduced = tensor_parallel.reduce_scatter_to_sequence_parallel_region(
                    reduced, group=self.group
                )
            elif is_shared:
                reduced = tensor_parallel.reduce_from_tensor_model_parallel_region(
                    reduced, group=self.group
                )
        elif self.sequence_parallel:
            reduced = tensor_parallel.gather_from_sequence_parallel_region(
                reduced, group=self.group
            )
        elif is_shared:
            reduced = tensor_parallel.copy_to_tensor_model_parallel_region(
                reduced, group=self.group
            )
        return self._expanded(reduced, product) * self.scale

    def _product(self, x: Tensor, weight_of: Callable[[Adapter], Tensor]) -> Tensor:
        return linear(x, weight_of(self))

    def _dropped(self, x: Tensor) -> Tensor:
        """Drops inputs of A. Tensor-parallel ranks that see different numbers must drop different
        ones, and others the same.
        """
        if not self._dropout or not self.training:
            return x
        if self.group.size() > 1 and (self.is_row_parallel or self.sequence_parallel):
            with tensor_parallel.get_cuda_rng_tracker().fork():
                return dropout(x, self._dropout)
        return dropout(x, self._dropout)

    def _expanded(self, reduced: Tensor, product: Product) -> Tensor:
        """[..., rank * modules] -> [..., out on this rank]: B of each module times its part of
        A x."""
        if self.num_modules == 1 and all(module == 0 for module, _ in self.blocks):
            return product(reduced, lambda adapter: adapter.lora_B.to(reduced.dtype))
        outputs = []
        for number, x in enumerate(reduced.chunk(self.num_modules, -1)):
            sizes = [size for module, size in self.blocks if module == number]
            if sizes:  # or all rows of this module are another rank's
                rows = product(x, partial(Adapter._rows_of, module=number, dtype=x.dtype))
                outputs.append(iter(rows.split(sizes, -1)))
            else:
                outputs.append(iter(()))
        pieces = [
            reduced.new_zeros(*reduced.shape[:-1], size)
            if module is None
            else next(outputs[module])
            for module, size in self.blocks
        ]
        return torch.cat(pieces, -1)

    def _rows_of(self, module: int, dtype: torch.dtype) -> Tensor:
        """Returns [out of this module on this rank, rank]: its rows of B."""
        blocks = zip((m for m, _ in self.blocks if m is not None), self.lora_B.split(self._sizes()))
        return torch.cat([rows for number, rows in blocks if number == module]).to(dtype)

    @torch.no_grad()
    def update(self) -> Tensor:
        """Returns what the layer's weight on this rank gains by merging, in the adapter's type."""
        if self.is_row_parallel:
            return self.lora_B @ self.lora_A * self.scale
        # Each unit vector as a token gives a column of the product.
        return self._expanded(self.lora_A.T, self._product).T * self.scale


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


def _kaiming(module: str, rank: int, num_inputs: int, seed: int) -> Tensor:
    """Returns A as PEFT begins with it: uniform within 1 / sqrt(inputs); a function of the module's
    name and the seed.
    """
    # Seeds of a Generator have 64 bits; crc32 gives 32 that depend on all of the name.
    generator = torch.Generator().manual_seed(zlib.crc32(f"{seed} {module}".encode()))
    bound = 1 / math.sqrt(num_inputs)
    return (
        torch.rand(rank, num_inputs, generator=generator, dtype=torch.float64) * 2 * bound - bound
    )


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
