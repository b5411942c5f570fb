"""mcore. Routed experts beside a dense MLP, each a branch with norms before and behind (Gemma 4).

    residual -> norm -> dense MLP -> norm -> +         the MLP is megatron-core's shared expert
             -> norm -> experts   -> norm -> +
             -> norm without weights * scale -> router -> shares * factor of each expert

megatron-core's layer gives its MLP the output of one norm. Here it gives the residual stream
itself, and `BranchedExperts` does the rest in the steps of megatron-core's own layer of experts.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.spec_utils import ModuleSpec
from torch import Tensor

from megatron.packing.model.layers.norms import TorchNorm, plain_rms_norm


class ScaledRouter(TopKRouter):
    """megatron-core's router, of a norm of the residual stream.

    Parameters: `scale` [hidden] multiplies the norm, with hidden^-0.5; `expert_scale` [experts] the
    shares of chosen experts.
    """

    def __init__(self, config: Any, *arguments: Any, **options: Any) -> None:
        super().__init__(config, *arguments, **options)
        sizes = {"scale": config.hidden_size, "expert_scale": config.num_moe_experts}
        for name, size in sizes.items():
            values = torch.ones(size, dtype=config.params_dtype, device=self.weight.device)
            parameter: Any = torch.nn.Parameter(values)
            # As of the router's weight: each tensor-parallel rank sees its share of the tokens.
            parameter.sequence_parallel = config.sequence_parallel
            setattr(self, name, parameter)

    def gating(self, input: Tensor) -> Tensor:
        """Returns logits [.., experts] of the residual stream [.., hidden]."""
        logits: Tensor = super().gating(self.scaled(input))
        return logits

    def scaled(self, input: Tensor) -> Tensor:
        """Returns what the router's weight is multiplied with, [.., hidden]."""
        normed = plain_rms_norm(input, self.config.layernorm_epsilon)
        return normed * self.scale * self.config.hidden_size**-0.5

    def routing(self, *arguments: Any, **options: Any) -> tuple[Tensor, Tensor]:
        """Returns shares and choice of experts, each [tokens, experts]."""
        shares, routing_map = super().routing(*arguments, **options)
        return shares * self.expert_scale.to(shares.dtype), routing_map


class BranchedExperts(MoELayer):
    """Takes the residual stream in place of its norm."""

    def __init__(self, config: Any, **options: Any) -> None:
        super().__init__(config=config, **options)
        for name in ("shared_norm", "shared_norm_behind", "experts_norm", "experts_norm_behind"):
            norm = TorchNorm(config, config.hidden_size, config.layernorm_epsilon)
            setattr(self, name, norm)

    def shared_experts_compute(self, hidden_states: Tensor, *others: Any) -> Any:
        """Returns the dense branch."""
        normed = self.shared_norm(hidden_states)
        return self.shared_norm_behind(super().shared_experts_compute(normed, *others))

    def preprocess(self, hidden_states: Tensor, *others: Any) -> Any:
        """Returns the rows of the routed branch, and their shares."""
        return super().preprocess(self.experts_norm(hidden_states), *others)

    def postprocess(self, output: Tensor, shared_expert_output: Tensor | None) -> Tensor:
        """Returns the sum of both branches."""
        routed = self.experts_norm_behind(super().postprocess(output, None))
        return routed if shared_expert_output is None else routed + shared_expert_output


def branched_experts(mlp: Any) -> type[BranchedExperts]:
    """Returns what takes the place of `mlp` of a layer's submodules: megatron-core's experts, which
    0.16.1 describes by a spec, and 0.19 by a partial.

    A class, as both call it with all that they tell a layer of experts.
    """
    of_core = mlp.submodules if isinstance(mlp, ModuleSpec) else mlp.keywords["submodules"]
    submodules = replace(of_core, router=ScaledRouter)

    class Built(BranchedExperts):
        """With these submodules."""

        def __init__(self, config: Any, **options: Any) -> None:
            super().__init__(config, submodules=submodules, **options)

    return Built
