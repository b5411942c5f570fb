"""mcore. Work that megatron-core's linear layers do in each microbatch for nothing.

On a GPU the host launches each operation; where a pack has few tokens the device waits for it. Left
out are

- autograd functions of collectives over a tensor-parallel group of one rank;
- the autograd function of a product around which nothing is communicated or accumulated, in whose
  place torch multiplies;
- automatic mixed precision around both passes of every other product, which nothing turns on here.

And tokens meet a frozen weight as one matrix, not one by one (`_as_one_matrix`). Apart from those
products, losses and gradients stay equal to the bit. A trainable bias of a frozen weight has a
gradient, which megatron-core leaves out; LoRA freezes both.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megatron.core.tensor_parallel import layers
from torch import Tensor
from torch.nn.functional import linear

_COLLECTIVES = (
    "copy_to_tensor_model_parallel_region",
    "reduce_from_tensor_model_parallel_region",
)
_LAYERS = ("ColumnParallelLinear", "RowParallelLinear")
_PRODUCT_ALONE = {
    "gradient_accumulation_fusion": False,
    "allreduce_dgrad": False,
    "sequence_parallel": False,
    "grad_output_buffer": None,
    "wgrad_deferral_limit": None,
    "gtp_remat_size": 1,
}
"""Options of a layer's product under which nothing is communicated, put off or added up in it."""
_PRODUCTS = ("LinearWithFrozenWeight", "LinearWithGradAccumulationAndAsyncCommunication")


def install() -> None:
    """Leaves it out in this process. Idempotent."""
    for name in _COLLECTIVES:
        plain = getattr(layers, name)
        if not hasattr(plain, "is_skipped_alone"):
            setattr(layers, name, _skipped_alone(plain))
    for name in _LAYERS:
        layer = getattr(layers, name)
        if not hasattr(layer._forward_impl, "is_torch_alone"):
            layer._forward_impl = _torch_alone(layer._forward_impl)
    for name in _PRODUCTS:
        product = getattr(layers, name)
        for method in ("forward", "backward"):
            # As it is before torch.amp wraps it.
            plain = getattr(getattr(product, method), "__wrapped__", None)
            if plain is not None:
                setattr(product, method, staticmethod(plain))


def _skipped_alone(plain: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Returns a collective that over one rank gives its input itself, not a view of it."""

    def skipped(input_: Tensor, group: Any = None) -> Tensor:
        is_alone = group is not None and group.size() == 1
        return input_ if is_alone else plain(input_, group)

    skipped.is_skipped_alone = True  # type: ignore[attr-defined]
    return skipped


def _as_one_matrix(x: Tensor) -> Tensor:
    """Returns x [tokens, batch, width] with strides by which torch multiplies it in one product.

    Transposed from [batch, tokens, width], as embeddings and delta nets give it, its strides are
    (width, tokens * width, 1). Torch then takes a frozen weight along for each token by itself
    (`bmm`): 3.5 times as slow on CPU, and rounded in another way. Nothing is copied with a batch of
    one sequence or pack.
    """
    if x.dim() != 3 or x.stride(0) == x.stride(1) * x.size(1):
        return x
    return x.contiguous().view(x.shape)


def _torch_alone(plain: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Returns a layer's product that is torch's own where nothing else is done in it."""

    def product(
        layer: Any,
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        tp_group: Any,
        **options: Any,
    ) -> Tensor:
        if not weight.requires_grad:  # torch itself takes tokens as one matrix to others
            input = _as_one_matrix(input)
        # An option of a later release that is not known here is not a product alone.
        if not options.items() <= _PRODUCT_ALONE.items():
            return plain(layer, input=input, weight=weight, bias=bias, tp_group=tp_group, **options)
        output = linear(input, weight)
        return output if bias is None else output + bias

    product.is_torch_alone = True  # type: ignore[attr-defined]
    return product
