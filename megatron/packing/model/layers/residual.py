"""mcore. Adds what attention or MLP computed to the residual stream, after a norm or a factor.

megatron-core's layers call `self_attn_bda` and `mlp_bda` for that. A `ResidualAdd` in their place
gives the models that have norms behind their branches (Gemma 2 and 3, GLM-4, OLMo 2, EXAONE 4) and
those that multiply what branches add (Granite), or all that leaves a layer (Gemma 4):

    ModuleSpec(ResidualAdd, params={"config": config, "has_norm": True})
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megatron.packing.model.layers.norms import TorchNorm

Added = Callable[[tuple[Tensor, Tensor | None], Tensor, float], Tensor]


class ResidualAdd(torch.nn.Module):
    """scalar * (residual + factor * dropout(norm(branch + bias))).

    The scalar is a buffer, which checkpoints hold and no optimizer moves. The norm is of the
    config's kind, and its gradients are summed under sequence parallel as those of the norms before
    the branch are.
    """

    def __init__(
        self,
        config: TransformerConfig,
        has_norm: bool = False,
        factor: float = 1.0,
        has_scalar: bool = False,
    ) -> None:
        super().__init__()
        self.scalar: Tensor | None
        self.register_buffer(
            "scalar", torch.ones(1, dtype=config.params_dtype) if has_scalar else None
        )
        self.factor = factor
        self.norm: torch.nn.Module | None = None
        if has_norm:
            self.norm = TorchNorm(config, config.hidden_size, config.layernorm_epsilon)  # type: ignore[assignment]

    def forward(self, is_training: bool, is_fused: bool) -> Added:
        """Returns the function of (branch and bias, residual, dropout) that megatron-core calls."""
        del is_fused  # nothing here is compiled

        def added(
            branch_and_bias: tuple[Tensor, Tensor | None], residual: Tensor, dropout: float
        ) -> Tensor:
            branch, bias = branch_and_bias
            if bias is not None:
                branch = branch + bias
            if self.norm is not None:
                branch = self.norm(branch)
            if dropout and is_training:
                branch = torch.nn.functional.dropout(branch, dropout)
            out = torch.add(residual.to(branch.dtype), branch, alpha=self.factor)
            return out if self.scalar is None else out * self.scalar

        return added
