"""pure: cost of a pack, which schedulers balance, and from which reports compute model FLOPs
utilisation.

A sequence of L tokens costs `linear * L + quadratic * L^2` FLOPs: matrix products over tokens, and
causal attention over pairs of tokens; less `head` for each masked token, which needs no output
layer. Layers that attend to a window of W tokens cost a factor times `window_squares`, which are
L^2 up to L = W and 2 L W - W^2 beyond. Packing changes none of the terms, so sums over a batch, of
L, of L^2, of the squares within each window and of loss tokens, give its FLOPs exactly. A
microbatch costs `fixed` besides, whatever it holds, and at least `least`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import numpy as np
import numpy.typing as npt

from megatron.packing.layers import ExpertsShape, LayerKind

NUM_PASSES = 3
"""Forward passes that a forward and a backward pass cost: the backward of a matrix product is two
products of its size.
"""
# A matrix product of n multiply-adds is 2n FLOPs forward.
_FLOPS_PER_MULTIPLY_ADD = NUM_PASSES * 2
# A microbatch moves each weight through memory whatever it holds: read in bfloat16 forward and
# backward (2 + 2 bytes), its gradient added to in float32 (4 + 4 bytes). Meanwhile an accelerator
# could have done so many FLOPs per byte (A100 156, H200 206, H100 295, B200 281). `calibrate`
# measures it on the user's device.
_BYTES_PER_WEIGHT = 2 + 2 + 4 + 4
_FLOPS_PER_BYTE = 256
# Kernels of a layer's forward and backward pass without fusions; of a chunk of a pipeline stage its
# messages, two in and two out with the shape before each, and what surrounds the layers.
_LAUNCHES_PER_LAYER = 150
_LAUNCHES_PER_PART = 40
LAUNCH_SECONDS = 5e-6
"""In which a host launches a kernel from Python."""
FLOPS_PER_SECOND = 400e12
"""What an accelerator reaches meanwhile, for costs in FLOPs."""


@dataclass(frozen=True)
class PackCost:
    """Cost of a pack, forward plus backward: `sum(linear * L + quadratic * L^2 + windows - head *
    masked tokens) + fixed` over its sequences, of length L; or `least`, if that is more.

    In FLOPs, or any other unit: schedulers use only the ratios. `linear` must be above `head`, the
    others at least 0.
    """

    linear: float
    quadratic: float
    fixed: float = 0.0
    head: float = 0.0
    """Share of `linear` that only tokens cost which count for the loss: the output layer."""
    windows: tuple[tuple[int, float], ...] = ()
    """(W, factor of `window_squares`) of each width of windowed layers."""
    least: float = 0.0
    """Least cost of a pack, however little it holds: its kernels must be launched, and pipeline
    stages send messages. Launching goes on beside the work of larger packs.
    """

    def __post_init__(self) -> None:
        terms = [self.quadratic, self.fixed, self.head, self.least]
        terms += [factor for _, factor in self.windows]
        if not (self.head < self.linear < math.inf and all(0 <= term < math.inf for term in terms)):
            raise ValueError(
                "a pack cost needs linear > head >= 0, quadratic >= 0 and fixed >= 0, all finite, "
                f"but is {self}"
            )
        if any(window < 1 for window, _ in self.windows):
            raise ValueError(f"a pack cost needs windows of at least 1 token, but is {self}")

    def of_sequences(
        self,
        lengths: npt.NDArray[np.int64],
        loss_tokens: npt.NDArray[np.int64] | None = None,
        squares: npt.NDArray[np.int64] | None = None,
    ) -> npt.NDArray[np.float64]:
        """Returns the cost of each sequence of `lengths` tokens: float64 of the same shape.

        loss_tokens: of each; None: all of them. squares: twice the pairs of tokens that attend;
        None: L^2, as in sequences that are no trees.
        """
        tokens = lengths.astype(np.float64)
        if squares is None:
            costs = tokens * (self.linear + self.quadratic * tokens)
        else:
            costs = self.linear * tokens + self.quadratic * squares.astype(np.float64)
        for window, factor in self.windows:
            within = window_squares(lengths, window)
            # Of a tree, at most: its nodes would have a little less each.
            costs += factor * (within if squares is None else np.minimum(within, squares))
        return (
            costs
            if loss_tokens is None or not self.head
            else costs - self.head * (lengths - loss_tokens)
        )

    def of_batch(
        self,
        num_tokens: int,
        square_sum: int,
        num_loss_tokens: int | None = None,
        window_square_sums: Sequence[int] = (),
    ) -> float:
        """Returns the FLOPs that the model needs for a batch.

        From the sums of its sequences' lengths, of their squares and of their loss tokens (exact
        integers; None: all). `fixed`, which is time but not work, is left out.

        window_square_sums: sums of `window_squares`, one for each of `windows`; empty: the most
        that the other sums allow.
        """
        num_masked = 0 if num_loss_tokens is None else num_tokens - num_loss_tokens
        sums = window_square_sums or [
            min(square_sum, 2 * window * num_tokens) for window, _ in self.windows
        ]
        windowed = sum(factor * squares for (_, factor), squares in zip(self.windows, sums))
        flops = self.linear * num_tokens + self.quadratic * square_sum - self.head * num_masked
        return flops + windowed

    def at_loss_share(self, share: float) -> PackCost:
        """Returns the cost if that part of each sequence's tokens counts for the loss, as a cost of
        lengths alone.
        """
        return replace(self, linear=self.linear - self.head * (1 - share), head=0.0)

    def with_forward_passes(self, count: int) -> PackCost:
        """Returns the cost of a pack with `count` forward passes more, each a third of forward and
        backward, as of a reference model. Megatron-core's pipelines of forward passes wait in the
        same proportion.
        """
        factor = 1 + count / NUM_PASSES
        return PackCost(
            linear=self.linear * factor,
            quadratic=self.quadratic * factor,
            fixed=self.fixed * factor,
            head=self.head * factor,
            windows=tuple((window, each * factor) for window, each in self.windows),
            least=self.least * factor,
        )

    def shared_by(self, ranks: int, fixed_ranks: int = 1) -> PackCost:
        """Returns the cost for each of `ranks` that share the work on every sequence; `fixed_ranks`
        share the weights. All tokens are taken to have a loss.
        """
        return PackCost(
            linear=self.linear / ranks,
            quadratic=self.quadratic / ranks,
            fixed=self.fixed / fixed_ranks,
            windows=tuple((window, factor / ranks) for window, factor in self.windows),
            least=self.least,
        )


def launch_seconds(num_layers: int, num_parts: int) -> float:
    """Returns the seconds in which hosts launch all of a microbatch, one stage after the other: the
    smallest pack takes at least as long.

        32 layers in 8 stages    ->    0.0256

    Args:
        num_parts: chunks of all pipeline stages.
    """
    return LAUNCH_SECONDS * (_LAUNCHES_PER_LAYER * num_layers + _LAUNCHES_PER_PART * num_parts)


def window_squares(lengths: npt.NDArray[np.int64], window: int) -> npt.NDArray[np.int64]:
    """Returns about twice the pairs that causal attention looks at within a window: int64 of the
    shape of `lengths`.

        window 4: lengths 3 4 6    ->    9 16 32
    """
    return np.where(lengths <= window, lengths * lengths, (2 * lengths - window) * window)


def gpt_pack_cost(
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
    num_dense_layers: int = 0,
    mtp_num_layers: int | None = None,
) -> PackCost:
    """Returns the FLOPs of a pack through a GPT. Arguments are named as fields of megatron-core's
    TransformerConfig.

    `linear` and `quadratic` count the matrix products that the model needs, forward and backward:
    attention projections, MLP or the experts that a token is routed to, router, output layer, and
    causal attention as the L^2/2 pairs it may see. Not counted: embedding look-up, norms,
    activations, and what activation recomputation repeats. `fixed` is what an accelerator could do
    while it moves the weights through its memory. With `num_experts`, every layer but
    `num_dense_layers` is a mixture of experts, whose `moe_ffn_hidden_size` is `ffn_hidden_size`
    unless given. Each of `mtp_num_layers` (multi-token prediction) is one more such layer, joins
    two hidden states by a projection, and has an output layer of its own for all tokens, masked
    ones too.
    """
    layers = gpt_layers(
        num_layers=num_layers,
        num_attention_heads=num_attention_heads,
        num_query_groups=num_query_groups,
        kv_channels=kv_channels,
        ffn_hidden_size=ffn_hidden_size,
        num_experts=num_experts,
        moe_router_topk=moe_router_topk,
        moe_ffn_hidden_size=moe_ffn_hidden_size,
        moe_shared_expert_intermediate_size=moe_shared_expert_intermediate_size,
        num_dense_layers=num_dense_layers,
    )
    return layers_pack_cost(
        layers,
        hidden_size=hidden_size,
        vocab_size=vocab_size,
        is_gated=swiglu,
        mtp_num_layers=mtp_num_layers or 0,
    )


def gpt_layers(
    *,
    num_layers: int,
    num_attention_heads: int,
    num_query_groups: int,
    kv_channels: int,
    ffn_hidden_size: int,
    num_experts: int | None = None,
    moe_router_topk: int = 2,
    moe_ffn_hidden_size: int | None = None,
    moe_shared_expert_intermediate_size: int | None = None,
    num_dense_layers: int = 0,
) -> list[LayerKind]:
    """The layers of such a GPT; see `gpt_pack_cost`."""
    dense = LayerKind(
        num_attention_heads=num_attention_heads,
        num_query_groups=num_query_groups,
        kv_channels=kv_channels,
        ffn_hidden_size=ffn_hidden_size,
    )
    if num_experts is None:
        return [dense] * num_layers
    experts = ExpertsShape(
        num_experts=num_experts,
        topk=moe_router_topk,
        width=moe_ffn_hidden_size or ffn_hidden_size,
        shared_width=moe_shared_expert_intermediate_size or 0,
    )
    mixture = replace(dense, experts=experts)
    return [dense] * num_dense_layers + [mixture] * (num_layers - num_dense_layers)


def layers_pack_cost(
    layers: Sequence[LayerKind],
    *,
    hidden_size: int,
    vocab_size: int,
    is_gated: bool,
    mtp_num_layers: int = 0,
) -> PackCost:
    """Returns the FLOPs of a pack through a model of `layers`; see `gpt_pack_cost`.

    Each of `mtp_num_layers` is one more layer like the last.
    """
    further = [layers[-1]] * mtp_num_layers
    head = hidden_size * vocab_size
    per_token = num_weights = len(further) * 2 * hidden_size**2 + head
    per_square = 0
    of_window: dict[int, int] = {}
    for kind in (*layers, *further):
        used, all_weights = kind.mlp_weights(hidden_size, is_gated)
        mixer = kind.mixer_work(hidden_size)
        per_token += mixer.per_token + used
        num_weights += mixer.num_weights + all_weights  # one output layer, used several times
        if kind.window is None:
            per_square += mixer.per_square
        else:
            of_window[kind.window] = of_window.get(kind.window, 0) + mixer.per_square
    per_token += len(further) * head
    return PackCost(
        linear=float(_FLOPS_PER_MULTIPLY_ADD * per_token),
        quadratic=float(_FLOPS_PER_MULTIPLY_ADD * per_square),
        fixed=float(_BYTES_PER_WEIGHT * _FLOPS_PER_BYTE * num_weights),
        head=float(_FLOPS_PER_MULTIPLY_ADD * head),
        windows=tuple(
            (window, float(_FLOPS_PER_MULTIPLY_ADD * factor))
            for window, factor in sorted(of_window.items())
        ),
    )


def part_shares(
    layers: Sequence[LayerKind],
    of_parts: Sequence[int],
    *,
    hidden_size: int,
    vocab_size: int,
    is_gated: bool,
    mtp_num_layers: int = 0,
    loss_share: float = 1.0,
) -> tuple[float, ...]:
    """Returns each pipeline part's share of a token's FLOPs, for `StepModel.shares`.

    Pairs of tokens are left out: they are shared as layers are, but for the output layer's part.

    Args:
        of_parts: layers of each part, in the order of the layers (see `StageLayers.of_parts`).
        loss_share: share of the tokens that need the output layer, which the last part has.
    """
    sums = [0, *accumulate(kind.per_token(hidden_size, is_gated) for kind in layers)]
    ends = list(accumulate(of_parts))
    flops = [float(sums[end] - sums[end - count]) for end, count in zip(ends, of_parts)]
    head = hidden_size * vocab_size
    further = layers[-1].per_token(hidden_size, is_gated) + 2 * hidden_size**2 + head
    flops[-1] += head * loss_share + mtp_num_layers * further
    return tuple(each / sum(flops) for each in flops)
