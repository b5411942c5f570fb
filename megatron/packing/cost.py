"""pure: FLOPs of a sequence, which schedulers balance and from which reports compute model FLOPs utilisation.

A sequence of L tokens costs `linear * L + quadratic * L^2`: matrix products over tokens, and causal attention over
pairs of tokens. Packing changes neither term, so two sums over a batch, of L and of L^2, give its FLOPs exactly.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

# A matrix product of n multiply-adds is 2n FLOPs forward; its backward is two products of that size.
_FLOPS_PER_MULTIPLY_ADD = 3 * 2


@dataclass(frozen=True)
class SequenceCost:
    """FLOPs of forward plus backward of one sequence as a polynomial of its length: `linear * L + quadratic * L^2`.

    Never falls as sequences grow: `linear` must be above 0, `quadratic` at least 0. Schedulers use only the ratio of
    the two.
    """

    linear: float
    quadratic: float

    def __post_init__(self) -> None:
        if not (0 < self.linear < math.inf and 0 <= self.quadratic < math.inf):
            raise ValueError(f"a sequence cost needs linear > 0 and quadratic >= 0, both finite, but is {self}")

    def __call__(self, lengths: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
        """FLOPs of each of `lengths` (tokens, int64, any shape), float64 of the same shape."""
        tokens = lengths.astype(np.float64)
        return tokens * (self.linear + self.quadratic * tokens)

    def of_batch(self, num_tokens: int, square_sum: int) -> float:
        """FLOPs of a batch from the sums of its sequences' lengths and of their squares (exact integers)."""
        return self.linear * num_tokens + self.quadratic * square_sum


def gpt_sequence_cost(
    *,
    num_layers: int,
    hidden_size: int,
    num_attention_heads: int,
    num_query_groups: int,
    kv_channels: int,
    ffn_hidden_size: int,
    vocab_size: int,
    swiglu: bool,
    num_experts: int | None = None,
    moe_router_topk: int = 2,
    moe_ffn_hidden_size: int | None = None,
    moe_shared_expert_intermediate_size: int | None = None,
) -> SequenceCost:
    """FLOPs of one sequence through a GPT, named as megatron-core's TransformerConfig names its fields.

    Counts the matrix products that the model needs, forward and backward: attention projections, MLP or the experts
    that a token is routed to, router, output layer, and causal attention as the L^2/2 pairs it may see. Not counted:
    embedding look-up, norms, activations, and what activation recomputation repeats. With `num_experts`, every layer
    is a mixture of experts, whose `moe_ffn_hidden_size` is `ffn_hidden_size` unless given.
    """
    query_size = num_attention_heads * kv_channels
    key_value_size = 2 * num_query_groups * kv_channels
    attention = hidden_size * (query_size + key_value_size) + query_size * hidden_size

    matrices_per_mlp = 3 if swiglu else 2
    if num_experts is None:
        mlp = matrices_per_mlp * hidden_size * ffn_hidden_size
    else:
        routed = moe_router_topk * (moe_ffn_hidden_size or ffn_hidden_size)
        shared = moe_shared_expert_intermediate_size or 0
        mlp = matrices_per_mlp * hidden_size * (routed + shared) + hidden_size * num_experts

    multiply_adds_per_token = num_layers * (attention + mlp) + hidden_size * vocab_size
    # Scores and their product with the values: two products over half of the L^2 pairs.
    multiply_adds_per_square = num_layers * 2 * query_size / 2
    return SequenceCost(
        linear=float(_FLOPS_PER_MULTIPLY_ADD * multiply_adds_per_token),
        quadratic=float(_FLOPS_PER_MULTIPLY_ADD * multiply_adds_per_square),
    )
