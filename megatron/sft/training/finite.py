"""mcore. Ends the run if a loss or gradient norm is NaN or infinite, before the optimizer changes
anything.

All ranks have both numbers on the host in any case. So all of them raise the same error, and a good
step needs no further collective or wait. Only after a failure do ranks exchange where it happened.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from megatron.core.optimizer import MegatronOptimizer

from megatron.sft.agreement import AgreedError, gathered
from megatron.sft.training.step_account import Reduced

_WAY_OUT = (
    "nothing was saved of it; continue from the last checkpoint with a lower --lr or other data, "
    "or leave out a few such steps by --skip-nan-steps"
)


class NonFiniteError(AgreedError):
    """A loss or gradient norm is NaN or infinite. `what` has the step, and the rank."""

    def __init__(self, what: str) -> None:
        super().__init__(f"{what}; {_WAY_OUT}")
        self.what = what


def check_loss(reduced: Reduced, losses: Sequence[Any], names: Sequence[str], where: str) -> None:
    """Raises NonFiniteError unless the loss of a global batch is finite. Collective only if it is
    not.

    Args:
        losses: losses of this rank, by microbatch.
        names: names of the sources.
        where: beginning of the message, "step 3".
    """
    if math.isfinite(reduced.loss_sum):
        return
    is_bad_here = any(not math.isfinite(loss["lm loss"][0].item()) for loss in losses)
    ranks = [str(rank) for rank, found in enumerate(gathered(is_bad_here)) if found]
    sources = [
        name
        for name, loss in zip(names, reduced.source_losses[0].tolist())
        if not math.isfinite(loss)
    ]
    origin = f", source {', '.join(sources)}" if sources else ""
    raise NonFiniteError(
        f"{where}: the loss is {reduced.loss_sum} on rank {', '.join(ranks)}{origin}"
    )


def guard_step(
    optimizer: MegatronOptimizer,
    model: Sequence[torch.nn.Module],
    where: Callable[[], str],
    check: Callable[[], None] = lambda: None,
) -> None:
    """Makes `optimizer.step` raise NonFiniteError, with the weights unchanged, if the gradient norm
    is not finite.

    megatron-core calls `get_grad_norm` of the whole (chained) optimizer in each step, with clipping
    or without, and waits for the device there. This function wraps that method.

    Args:
        where: returns the beginning of the message.
        check: called after the norm is known; may raise to prevent the update.
    """
    norm_of = optimizer.get_grad_norm

    def finite_norm() -> float:
        norm = norm_of()
        # The host has waited for the norm, so that the loss is known as well.
        check()
        if not math.isfinite(norm):
            found = enumerate(gathered(_first_bad_gradient(model)))
            origin = next(
                (f", first in {name} of rank {rank}" for rank, name in found if name is not None),
                "",
            )
            raise NonFiniteError(f"{where()}: the gradient norm is {norm}{origin}")
        return norm

    optimizer.get_grad_norm = finite_norm  # type: ignore[method-assign]


def _first_bad_gradient(model: Sequence[torch.nn.Module]) -> str | None:
    for chunk in model:
        for name, parameter in chunk.named_parameters():
            gradient = getattr(parameter, "main_grad", None)
            if gradient is not None and not gradient.isfinite().all():
                return name.removeprefix("module.").removeprefix("module.")
    return None
