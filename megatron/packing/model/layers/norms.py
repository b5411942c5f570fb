"""mcore. Norms that allow sequence parallel, and norms of queries and keys over all heads."""

from __future__ import annotations

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel.mappings import reduce_from_tensor_model_parallel_region
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megatron.packing.model.layers.shared_inputs import shared_by_ranks


class TorchNorm:
    """torch's LayerNorm or RMSNorm, as `config.normalization` says, also under sequence parallel.

    There each tensor-parallel rank sees only its share of the tokens, so the weights are marked for
    megatron-core to sum their gradients.
    """

    def __new__(  # type: ignore[misc]
        cls, config: TransformerConfig, hidden_size: int, eps: float = 1e-5
    ) -> torch.nn.Module:
        kinds = {"LayerNorm": torch.nn.LayerNorm, "RMSNorm": torch.nn.RMSNorm}
        if config.layernorm_zero_centered_gamma:
            kinds = {"RMSNorm": ZeroCenteredRMSNorm}
        if config.normalization not in kinds:
            raise ValueError(
                f"--normalization must be {' or '.join(kinds)} without Transformer "
                f"Engine{' and with --apply-layernorm-1p' * config.layernorm_zero_centered_gamma}, "
                f"but is {config.normalization}"
            )
        norm = kinds[config.normalization](hidden_size, eps=eps, dtype=config.params_dtype)
        for weight in norm.parameters():
            weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        return norm


def plain_rms_norm(x: Tensor, epsilon: float) -> Tensor:
    """Returns `x` over the root mean square of its last dimension: a norm without weights."""
    return torch.nn.functional.rms_norm(x, (x.shape[-1],), eps=epsilon)


class ZeroCenteredRMSNorm(torch.nn.RMSNorm):
    """An RMSNorm that multiplies by one plus its weight, at least in float32, and rounds once."""

    def reset_parameters(self) -> None:
        torch.nn.init.zeros_(self.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = torch.promote_types(x.dtype, torch.float32)
        normed = torch.nn.functional.rms_norm(x.to(wide), self.normalized_shape, eps=self.eps)
        return (normed * (1 + self.weight.to(wide))).to(x.dtype)


class WholeWidthNorm(torch.nn.Module):
    """An RMSNorm over the channels of all heads together, as `q_layernorm` or `k_layernorm`.

    Give `ModuleSpec(WholeWidthNorm, params={"num_heads": ...})`, all heads of the layer. Takes and
    returns [s, b, heads of this rank, d]. Each rank holds the whole weight [heads * d] and uses its
    heads' part: megatron-core sums gradients of norms of queries and keys over tensor parallel, and
    they would be wrong for a weight that is cut. Communication: one all-reduce of a number per
    token, forward and backward.
    """

    def __init__(
        self,
        config: TransformerConfig,
        hidden_size: int,
        eps: float,
        num_heads: int,
        tp_group: dist.ProcessGroup | None = None,
    ) -> None:
        """hidden_size: channels of a head."""
        super().__init__()
        self.tp_group = tp_group or parallel_state.get_tensor_model_parallel_group()
        if num_heads % self.tp_group.size():
            raise ValueError(
                f"norms over all of {num_heads} heads need a tensor-parallel size that divides "
                f"them, but it is {self.tp_group.size()}; lower --tensor-model-parallel-size"
            )
        self.eps, self.num_heads = eps, num_heads
        self.is_zero_centered = config.layernorm_zero_centered_gamma
        start = torch.zeros if self.is_zero_centered else torch.ones
        self.weight = torch.nn.Parameter(start(num_heads * hidden_size, dtype=config.params_dtype))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        size, rank = self.tp_group.size(), self.tp_group.rank()
        square_sum = wide.square().sum((-2, -1), keepdim=True)
        if size > 1:  # the sum goes to all ranks, and so do gradients of their uses of it
            square_sum = reduce_from_tensor_model_parallel_region(
                square_sum.contiguous(), self.tp_group
            )
            square_sum = shared_by_ranks(square_sum, self.tp_group)
        factor = torch.rsqrt(square_sum / len(self.weight) + self.eps)
        weight = self.weight.view(self.num_heads, -1).chunk(size)[rank].to(wide.dtype)
        return (wide * factor * (1 + weight if self.is_zero_centered else weight)).to(x.dtype)
