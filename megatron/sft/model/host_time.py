"""mcore. Python that megatron-core's linear layers run in each microbatch for nothing.

On a GPU the host launches each operation; where a pack has few tokens the device waits for it. Left
out is automatic mixed precision around both passes of each product, which nothing turns on here.
Losses and gradients stay equal to the bit.
"""

from __future__ import annotations

from megatron.core.tensor_parallel import layers

_PRODUCTS = ("LinearWithFrozenWeight", "LinearWithGradAccumulationAndAsyncCommunication")


def install() -> None:
    """Leaves it out in this process. Idempotent."""
    for name in _PRODUCTS:
        product = getattr(layers, name)
        for method in ("forward", "backward"):
            # As it is before torch.amp wraps it.
            plain = getattr(getattr(product, method), "__wrapped__", None)
            if plain is not None:
                setattr(product, method, staticmethod(plain))
