"""mcore. Adapters of gates: a router of experts, and the gate of a shared expert.

megatron-core has their weights as parameters of larger modules, and not as linear layers. They are
whole on each tensor-parallel rank, and so are A and B.

    router   logits [tokens, experts] + scale * B A x
    gate     logits [tokens, 1] + scale * B A x, before the sigmoid
"""

from __future__ import annotations

from types import MethodType
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.moe.shared_experts import SharedExpertMLP
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor
from torch.nn.functional import linear

from megatron.packing.model.layers.branches import ScaledRouter
from megatron.sft.model.lora.adapter import dropped, kaiming
from megatron.sft.options.lora import LINEARS, LoraConfig


class GateAdapter(torch.nn.Module):
    """Trained parameters beside the weight of a gate.

    lora_A: [rank, hidden].
    lora_B: [outputs, rank].
    """

    def __init__(self, weight: Any, module: str, lora: LoraConfig, seed: int) -> None:
        """Args:
        weight: [outputs, hidden].
        module: name of the gate in the whole model.
        """
        super().__init__()
        self.scale = lora.scale
        self._dropout = lora.lora_dropout
        # Under sequence parallel each rank sees a share of the tokens: megatron-core then sums the
        # gradients over ranks, as it does for the weight itself.
        self.sequence_parallel = getattr(weight, "sequence_parallel", False)
        outputs, hidden = weight.shape
        options: dict[str, Any] = {
            "dtype": torch.promote_types(weight.dtype, torch.float32),
            "device": weight.device,
        }
        initial = kaiming(module, lora.lora_rank, hidden, seed)
        self.lora_A = torch.nn.Parameter(initial.to(**options))
        self.lora_B = torch.nn.Parameter(torch.zeros(outputs, lora.lora_rank, **options))
        for parameter in (self.lora_A, self.lora_B):
            parameter.sequence_parallel = self.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        """Returns the addition to the logits, [.., outputs]."""
        x = dropped(x, self._dropout if self.training else 0.0, self.sequence_parallel)
        return linear(linear(x, self.lora_A.to(x.dtype)), self.lora_B.to(x.dtype)) * self.scale

    @torch.no_grad()
    def update(self) -> Tensor:
        """Returns scale * B A, which merging adds to the weight."""
        return self.lora_B @ self.lora_A * self.scale

    def sharded_state_dict(
        self,
        prefix: str = "",
        sharded_offsets: tuple[Any, ...] = (),
        metadata: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Returns the state for a checkpoint; see megatron-core."""
        state: dict[str, Any] = make_sharded_tensors_for_checkpoint(
            self.state_dict(keep_vars=True),
            prefix,
            {},
            sharded_offsets,
            tp_group=parallel_state.get_tensor_model_parallel_group(),
            dp_cp_group=parallel_state.get_data_parallel_group(with_context_parallel=True),
        )
        return state


def gate_of(module: torch.nn.Module) -> str | None:
    """Returns the kind of gate that a module holds, a key of `LINEARS`; None for no gate."""
    if isinstance(module, TopKRouter):
        return "router"
    is_gated = isinstance(module, SharedExpertMLP) and module.use_shared_expert_gate
    return "shared_gate" if is_gated else None


def weight_beside(module: Any) -> Tensor:
    """Returns the weight that the adapter of a linear layer or a gate is beside."""
    weight: Tensor = module.gate_weight if isinstance(module, SharedExpertMLP) else module.weight
    return weight


def add_gate_adapter(module: Any, name: str, lora: LoraConfig, seed: int) -> None:
    """Puts an adapter beside the gate that a module holds.

    name: of the module in the whole model.
    """
    gate = gate_of(module)
    assert gate is not None
    named = f"{name}.{LINEARS[gate][0]}"
    module.adapter = GateAdapter(weight_beside(module), named, lora, seed)
    if gate == "router":
        module.gating = MethodType(_gating, module)
    else:
        module.forward = MethodType(_gated, module)


def _gating(router: Any, input: Tensor) -> Tensor:
    """Replaces `TopKRouter.gating`."""
    logits: Tensor = type(router).gating(router, input)
    x = router.scaled(input) if isinstance(router, ScaledRouter) else input
    return logits + router.adapter(x.to(logits.dtype))


def _gated(experts: Any, hidden_states: Tensor) -> Tensor:
    """Replaces `SharedExpertMLP.forward`."""
    output, _ = MLP.forward(experts, hidden_states)
    logits = linear(hidden_states, experts.gate_weight)
    logits = logits + experts.adapter(hidden_states).to(logits.dtype)
    return output * logits.sigmoid()
