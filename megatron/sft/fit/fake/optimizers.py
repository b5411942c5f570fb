"""mcore. Optimizers that cannot run in a fake world, described by the tensors that they allocate:
Transformer Engine's FusedAdam, of --use-precision-aware-optimizer, and megatron-core's
HybridDeviceOptimizer, of --optimizer-cpu-offload, whose state is on the host.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from megatron.core import optimizer as optimizers
from megatron.core.optimizer import distrib_optimizer, optimizer_config
from torch import Tensor

from megatron.packing.device import host_memory
from megatron.sft.options.optimizer import ADAM_STATE, OptimizerStateConfig

FUSED_ADAM = "transformer_engine.pytorch.optimizers"
"""Module of FusedAdam."""
MAIN_PARAMETER = "master_param"
"""Name of the main parameter among the states of both."""
_SCALED = (torch.float16, torch.uint8)
"""Types of states that a step widens: float32 copies of all of them live together in it."""


class FusedAdam(torch.optim.Optimizer):
    """Allocates as Transformer Engine's does."""

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        *,
        use_decoupled_grad: bool = False,
        master_weight_dtype: torch.dtype = torch.float32,
        exp_avg_dtype: torch.dtype = torch.float32,
        exp_avg_sq_dtype: torch.dtype = torch.float32,
        store_param_remainders: bool = False,
        **others: Any,
    ) -> None:
        super().__init__(params, {"lr": lr, **others})
        self._main_dtype, self._keeps_remainders = master_weight_dtype, store_param_remainders
        self._dtypes = dict(zip(ADAM_STATE, (exp_avg_dtype, exp_avg_sq_dtype)))

    def initialize_state(self, parameter: Tensor, *_: Any) -> None:
        """Makes the states of a weight."""
        dtypes = dict(self._dtypes)
        if self._keeps_remainders and parameter.dtype is torch.bfloat16:
            dtypes[MAIN_PARAMETER] = torch.int16  # the lower half of a float32
        elif parameter.dtype is not torch.float32:
            dtypes[MAIN_PARAMETER] = self._main_dtype
        for name, dtype in dtypes.items():
            self.state[parameter][name] = torch.zeros_like(parameter, dtype=dtype)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Makes what the first step does, and what each has meanwhile."""
        widened = []
        for group in self.param_groups:
            for parameter in group["params"]:
                if not self.state[parameter]:
                    self.initialize_state(parameter)
                states = self.state[parameter].values()
                widened += [value.float() for value in states if value.dtype in _SCALED]


class HybridDeviceOptimizer(torch.optim.Optimizer):
    """Allocates as megatron-core's does: float32 main parameters, states and gradients, of some
    weights on the host.
    """

    def __init__(self, params: Any, offload_fraction: float = 0.5, **options: Any) -> None:
        super().__init__(params, {"offload_fraction": offload_fraction, **options})
        parameters = [one for group in self.param_groups for one in group["params"]]
        limit = offload_fraction * sum(one.numel() for one in parameters)
        num_offloaded = 0
        self._on_host = set[Tensor]()
        for parameter in parameters:
            if num_offloaded < limit:
                self._on_host.add(parameter)
                num_offloaded += parameter.numel()
            with self._place(parameter):
                main = parameter.detach()
                is_copied = parameter in self._on_host or parameter.dtype is not torch.float32
                self.state[parameter][MAIN_PARAMETER] = (
                    main.to(torch.float32, copy=True) if is_copied else main
                )

    def _place(self, parameter: Tensor) -> AbstractContextManager[Any]:
        return host_memory() if parameter in self._on_host else nullcontext()

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """See `FusedAdam`."""
        on_device = []
        for parameter, state in self.state.items():
            with self._place(parameter):
                for name in (*ADAM_STATE, *(["grad"] * (parameter in self._on_host))):
                    if name not in state:
                        state[name] = torch.zeros_like(state[MAIN_PARAMETER])
            if parameter not in self._on_host and parameter.dtype is not torch.float32:
                on_device.append(torch.empty_like(state[MAIN_PARAMETER]))  # its gradient, widened


def replaced(config: OptimizerStateConfig) -> Iterator[tuple[Any, str, Any]]:
    """Yields (owner, name, replacement) of what builds the optimizer."""
    if not config.use_precision_aware_optimizer:
        return
    check = optimizer_config.OptimizerConfig.__post_init__

    def check_with_engine(self: Any) -> None:
        stand_ins = {name: SimpleNamespace() for name in _parents(FUSED_ADAM)}
        stand_ins[FUSED_ADAM] = SimpleNamespace(FusedAdam=FusedAdam)
        with mock.patch.dict(sys.modules, stand_ins):  # type: ignore[arg-type]
            check(self)

    yield optimizer_config.OptimizerConfig, "__post_init__", check_with_engine
    for module in (optimizers, optimizer_config):
        yield module, "is_te_min_version", lambda *_, **__: True
    yield optimizers, "USING_PYTORCH_OPTIMIZER", False
    for module in (optimizers, distrib_optimizer):
        yield module, "Adam", FusedAdam
        yield module, "HybridDeviceOptimizer", HybridDeviceOptimizer


def _parents(module: str) -> list[str]:
    """a.b.c -> a, a.b."""
    words = module.split(".")
    return [".".join(words[:count]) for count in range(1, len(words))]
