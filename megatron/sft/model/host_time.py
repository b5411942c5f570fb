"""mcore. Python that megatron-core's linear layers run in each microbatch for nothing.

On a GPU the host launches each operation; where a pack has few tokens the device waits for it. Two
things are left out: autograd functions of collectives over a tensor-parallel group of one rank, and
automatic mixed precision around both passes of each product, which nothing turns on here. Losses
and gradients stay equal to the bit.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megatron.core.tensor_parallel import layers
from torch import Tensor

_COLLECTIVES = (
    "copy_to_tensor_model_parallel_region",
    "reduce_from_tensor_model_parallel_region",
)
_PRODUCTS = ("LinearWithFrozenWeight", "LinearWithGradAccumulationAndAsyncCommunication")


def install() -> None:
    """Leaves them out in this process. Idempotent."""
    for name in _COLLECTIVES:
        plain = getattr(layers, name)
        if not hasattr(plain, "is_skipped_alone"):
            setattr(layers, name, _skipped_alone(plain))
    for name in _PRODUCTS:
        product = getattr(layers, name)
        for method in ("forward", "backward"):
            # As it is before torch.amp wraps it.
            plain = getattr(getattr(product, method), "__wrapped__", None)
            if plain is not None:
                setattr(product, method, staticmethod(plain))


def _skipped_alone(plain: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def skipped(input_: Tensor, group: Any = None) -> Tensor:
        is_alone = group is not None and group.size() == 1
        return input_ if is_alone else plain(input_, group)

    skipped.is_skipped_alone = True  # type: ignore[attr-defined]
    return skipped
