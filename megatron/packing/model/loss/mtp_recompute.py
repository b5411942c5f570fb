"""mcore. Multi-token prediction recomputes its layers on packs.

megatron-core before 0.18 hands all arguments of such a layer to `save_for_backward`, which takes
tensors alone: `PackedSeqParams` among them raises TypeError in the first forward pass.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import update_wrapper
from types import MethodType
from typing import Any

from torch import Tensor


class PredictionRecompute:
    """`MultiTokenPredictionLayer._checkpointed_forward`, which saves the tensors among its
    arguments and keeps the others as they are.
    """

    def __init__(self, plain: Callable[..., Any]) -> None:
        update_wrapper(self, plain)
        self.plain = plain

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        return self if instance is None else MethodType(self, instance)

    def __call__(
        self, layer: Any, forward_func: Callable[..., Any] | None = None, **arguments: Any
    ) -> Any:
        """See megatron-core. Later releases pass no `forward_func` and keep the others apart."""
        if forward_func is None:
            return self.plain(layer, **arguments)
        tensors = {name: each for name, each in arguments.items() if isinstance(each, Tensor)}
        others = {name: each for name, each in arguments.items() if name not in tensors}

        def forward(*values: Tensor, **named: Tensor) -> Any:
            # By position where they were saved, by name where nothing is recomputed.
            return forward_func(**dict(zip(tensors, values)), **named, **others)

        return self.plain(layer, forward, **tensors)
