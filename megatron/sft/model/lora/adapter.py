"""mcore. The adapter of one linear layer: parameters as ranks share them, and the forward pass."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from megatron.core import tensor_parallel
from megatron.core.tensor_parallel import RowParallelLinear
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.nn.functional import dropout, linear

from megatron.sft.model.huggingface.tensors import Weight, copies
from megatron.sft.model.lora.layers import Adapted
from megatron.sft.options.lora import LoraConfig

Product = Callable[[Tensor, Callable[["Adapter"], Tensor]], Tensor]
"""Multiplies rows [..., in] with the transpose of what a function gives of an adapter [out, in]."""


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
