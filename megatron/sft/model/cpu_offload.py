"""mcore. Checkpoints of megatron-core's optimizer whose state is in the host's memory
(HybridDeviceOptimizer), mended from outside.

Its parameter groups hold classes, which no checkpoint may; it has no state to load into before its
first step; and where the Adam on the GPU is torch's, too, its state is loaded to the host.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch import Tensor

from megatron.sft.options.optimizer import ADAM_STATE

_OF_THIS_RUN = {
    "bias_correction",
    "cpu_optimizer_cls",
    "fused",
    "gpu_optimizer_cls",
    "offload_fraction",
    "overlap_cpu_optimizer_d2h_h2d",
    "param_update_in_fp32",
    "pin_cpu_grads",
    "pin_cpu_params",
}
"""Entries of parameter groups that say how this run computes, not what it has learned."""


def install() -> None:
    """Mends saving and loading. Idempotent."""
    if hasattr(HybridDeviceOptimizer, "is_mended"):
        return
    state_dict, load_state_dict = (
        DistributedOptimizer.state_dict,
        DistributedOptimizer.load_state_dict,
    )

    def state_of(self: Any) -> Any:
        state = state_dict(self)
        if isinstance(self.optimizer, HybridDeviceOptimizer):
            groups = state["optimizer"]["param_groups"]
            state["optimizer"]["param_groups"] = [_without(group) for group in groups]
        return state

    def load(self: Any, state: dict[str, Any]) -> None:
        groups = [
            {name: value for name, value in group.items() if name in _OF_THIS_RUN}
            for group in getattr(self.optimizer, "param_groups", [])
        ]
        load_state_dict(self, state)
        if isinstance(self.optimizer, HybridDeviceOptimizer):
            for group, options in zip(self.optimizer.param_groups, groups):
                group.update(options)

    DistributedOptimizer.state_dict = state_of  # type: ignore[method-assign]
    DistributedOptimizer.load_state_dict = load  # type: ignore[method-assign]
    HybridDeviceOptimizer._move_new_state_to_right_device = _move_to_parameters  # type: ignore[method-assign, assignment]
    HybridDeviceOptimizer.is_mended = True  # type: ignore[attr-defined]


def _without(group: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in group.items() if name not in _OF_THIS_RUN}


def _move_to_parameters(self: Any) -> None:
    for optimizer in self.sub_optimizers:
        for parameter, state in optimizer.state.items():
            moved = {
                name: value.to(parameter.device) if isinstance(value, Tensor) else value
                for name, value in state.items()
            }
            state.update(moved)
            self.state[self.inner_param_to_orig_param[parameter]].update(moved)


def make_adam_state(optimizer: torch.optim.Optimizer) -> None:
    """Gives torch's Adam, on the host or not, what it makes in its first step, to load into;
    megatron-core's own way leaves out `step`. A state that is there stays, and others are left
    alone.
    """
    for adam in getattr(optimizer, "sub_optimizers", [optimizer]):
        if not isinstance(adam, torch.optim.Adam):
            continue
        for parameter in (p for group in adam.param_groups for p in group["params"]):
            if not adam.state[parameter]:
                adam.state[parameter] = {
                    "step": torch.tensor(0.0),
                    **{name: torch.empty_like(parameter) for name in ADAM_STATE},
                }
    if isinstance(optimizer, HybridDeviceOptimizer):
        optimizer._sync_sub_optimizers_state_to_hdo()
