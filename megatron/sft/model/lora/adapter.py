"""mcore. The adapter of one linear layer: its parameters, shared over ranks, and its forward pass.

A layer of several HuggingFace modules (linear_qkv: q_proj, k_proj, v_proj) has one A and one B per
module. The A are stacked, and multiplied with the input at once. The rows of the B are in the order
of the layer's rows:

    rank 4, on all modules: A x is [tokens, 12], 4 numbers for each of q_proj, k_proj, v_proj
    blocks (0, 8) (1, 2) (2, 2) (0, 8) ...: 8 rows of q_proj, 2 of k_proj, 2 of v_proj, per group
"""

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
"""Function (rows [..., in], function from an adapter to a weight [out, in]) -> rows [..., out]."""


class Adapter(torch.nn.Module):
    """Trained parameters beside one linear layer.

    lora_A: [rank * number of modules, in], or this rank's columns of it.
    lora_B: [rows of these modules on this rank, rank].
    blocks: rows of the layer on this rank, in order, as (number of the module, number of rows). The
        module is None for rows without an adapter.
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
        """Args:
        name: name of the layer in the whole model.
        layers: HuggingFace modules of the layer that have an adapter.
        """
        super().__init__()
        self.is_row_parallel = isinstance(layer, RowParallelLinear)
        self.group = layer.tp_group
        # the layer's own: latent attention has whole sequences between its products
        self.sequence_parallel = layer.sequence_parallel and self.group.size() > 1
        self.scale = lora.scale_beside(weight.part)
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
        rank = lora.rank_beside(weight.part)
        wholes = [kaiming(module, rank, layer.input_size, seed) for module in modules]
        if self.is_row_parallel:
            wholes = [whole.chunk(self.group.size(), 1)[self.group.rank()] for whole in wholes]
        self.lora_A = torch.nn.Parameter(torch.cat(wholes).to(**options))
        self.lora_B = torch.nn.Parameter(torch.zeros(sum(self._sizes()), rank, **options))
        self._mark(layer)

    def _sizes(self) -> list[int]:
        """Returns the numbers of rows of the blocks with an adapter."""
        return [num_rows for module, num_rows in self.blocks if module is not None]

    def _mark(self, layer: Any) -> None:
        """Sets the attributes by which megatron-core knows how ranks share each parameter."""
        cut, whole = (
            (self.lora_A, self.lora_B) if self.is_row_parallel else (self.lora_B, self.lora_A)
        )
        set_tensor_model_parallel_attributes(cut, True, 1 if self.is_row_parallel else 0, 1)
        # An expert's tensors are whole on their rank, but differ between expert-parallel ranks: so
        # they count as split, or the gradient norm would count only one rank's.
        set_tensor_model_parallel_attributes(whole, layer.is_expert, 0, 1)
        for parameter in (cut, whole):
            parameter.allreduce = getattr(layer.weight, "allreduce", True)  # type: ignore[attr-defined]
        # Under sequence parallel each rank sees a share of the tokens: megatron-core then sums the
        # gradients over ranks, as it does for the weights of norms.
        whole.sequence_parallel = self.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor, product: Product | None = None) -> Tensor:
        """Returns the addition to the layer's output, [tokens, batch, out on this rank].

        product: for grouped experts, whose adapters are applied together: multiplies each row of
            `x` with the weight of its own expert's adapter. This adapter then stands for all.
        """
        product = product or self._product
        return self._expanded(self.reduced(x, product), product) * self.scale

    def reduced(self, x: Tensor, product: Product | None = None) -> Tensor:
        """Returns A x, [..., rank * modules], which B is applied to."""
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
        return reduced

    def of_rows(self, reduced: Tensor, rows: slice) -> Tensor:
        """Returns the addition to some rows of the output on this rank; for layers that are one
        module of which each row has an adapter.
        """
        assert {module for module, _ in self.blocks} == {0}
        return linear(reduced, self.lora_B[rows].to(reduced.dtype)) * self.scale

    def _product(self, x: Tensor, weight_of: Callable[[Adapter], Tensor]) -> Tensor:
        return linear(x, weight_of(self))

    def _dropped(self, x: Tensor) -> Tensor:
        is_own = self.group.size() > 1 and (self.is_row_parallel or self.sequence_parallel)
        return dropped(x, self._dropout if self.training else 0.0, is_own)

    def _expanded(self, reduced: Tensor, product: Product) -> Tensor:
        """Returns [..., out on this rank] from A x, [..., rank * modules]: each module's B times
        its part of A x, block by block, with zeros in blocks without an adapter.
        """
        if self.num_modules == 1 and all(module == 0 for module, _ in self.blocks):
            return product(reduced, lambda adapter: adapter.lora_B.to(reduced.dtype))
        outputs = []
        for number, x in enumerate(reduced.chunk(self.num_modules, -1)):
            sizes = [size for module, size in self.blocks if module == number]
            if sizes:  # empty if other ranks have all rows of this module
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
        """Returns a module's rows of B, [out of the module on this rank, rank]."""
        blocks = zip((m for m, _ in self.blocks if m is not None), self.lora_B.split(self._sizes()))
        return torch.cat([rows for number, rows in blocks if number == module]).to(dtype)

    @torch.no_grad()
    def update(self) -> Tensor:
        """Returns scale * B A, which merging adds to the layer's weight on this rank, in the type
        of the adapter.
        """
        if self.is_row_parallel:
            return self.lora_B @ self.lora_A * self.scale
        # B A applied to the unit vectors, which gives the product column by column.
        return self._expanded(self.lora_A.T, self._product).T * self.scale


def kaiming(module: str, rank: int, num_inputs: int, seed: int) -> Tensor:
    """Returns the initial A, [rank, inputs], as PEFT has it: uniform within 1 / sqrt(inputs).

    It is a function of the seed and of the module's name in the whole model, so that it does not
    depend on the parallel layout.
    """
    generator = torch.Generator().manual_seed(zlib.crc32(f"{seed} {module}".encode()))
    bound = 1 / math.sqrt(num_inputs)
    return (
        torch.rand(rank, num_inputs, generator=generator, dtype=torch.float64) * 2 * bound - bound
    )


def dropped(x: Tensor, probability: float, is_own: bool) -> Tensor:
    """Applies dropout to the input of A.

    is_own: True if tensor-parallel ranks have different inputs, and so must use different random
        states. Ranks with the same input use the same one.
    """
    if not probability:
        return x
    if is_own:
        with tensor_parallel.get_cuda_rng_tracker().fork():
            return dropout(x, probability)
    return dropout(x, probability)
