"""The FLOPs that schedulers balance and reports print."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from megatron.packing.layers import LayerKind
from megatron.packing.model.parts.delta_net import DeltaNet
from megatron.packing.scheduling.cost import (
    PackCost,
    gpt_layers,
    gpt_pack_cost,
    layers_pack_cost,
    part_shares,
    window_squares,
)

TINY = {
    "num_layers": 3,
    "hidden_size": 10,
    "num_attention_heads": 4,
    "num_query_groups": 2,
    "kv_channels": 5,
    "ffn_hidden_size": 7,
    "vocab_size": 100,
}


def test_dense_gpt_by_hand():
    """A wrong factor would make every reported TFLOP/s wrong by it, and look plausible."""
    # Multiply-adds per token and layer: queries 10*20, keys and values 10*20, output 20*10, three
    # matrices 10*7.
    linear = 6 * (3 * (200 + 200 + 200 + 210) + 10 * 100)
    # Scores and values: 2 products of 20 multiply-adds for each of L^2/2 pairs, in 3 layers.
    quadratic = 6 * 3 * 2 * 20 / 2
    cost = gpt_pack_cost(**TINY, swiglu=True)
    assert (cost.linear, cost.quadratic) == (linear, quadratic) == (20580.0, 360.0)
    assert gpt_pack_cost(**TINY, swiglu=False).linear == 6 * (3 * (600 + 140) + 1000)


def test_mixture_of_experts_by_hand():
    """Counting all experts instead of those a token meets would inflate the reported FLOPs many
    times.
    """
    experts = {"num_experts": 8, "moe_router_topk": 2, "moe_ffn_hidden_size": 4}
    cost = gpt_pack_cost(**TINY, swiglu=True, **experts, moe_shared_expert_intermediate_size=6)
    assert cost.linear == 6 * (3 * (600 + 3 * 10 * (2 * 4 + 6) + 10 * 8) + 1000)
    without_shared = gpt_pack_cost(**TINY, swiglu=True, num_experts=8, moe_router_topk=1)
    assert without_shared.linear == 6 * (3 * (600 + 3 * 10 * 7 + 10 * 8) + 1000)
    with_dense = gpt_pack_cost(**TINY, swiglu=True, **experts, num_dense_layers=2)
    assert with_dense.linear == 6 * (3 * 600 + 2 * 210 + (3 * 10 * 2 * 4 + 10 * 8) + 1000)


def test_multi_token_prediction_by_hand():
    """Its layers and their output layers were left out: of a small model with a large vocabulary
    nearly half.
    """
    plain, further = (
        gpt_pack_cost(**TINY, swiglu=True, mtp_num_layers=number) for number in (None, 2)
    )
    layer, projection, output = 600 + 210, 2 * 10 * 10, 10 * 100
    assert further.linear - plain.linear == 6 * 2 * (layer + projection + output)
    assert further.quadratic == plain.quadratic * 5 / 3
    assert further.head == plain.head  # of further tokens all have logits
    assert further.fixed - plain.fixed == 12 * 256 * 2 * (
        layer + projection
    )  # one matrix gives all their logits


def test_batch_from_sums_equals_sum_of_sequences():
    """The step's FLOPs come from two sums gathered over ranks; they must mean the same as the
    sequences.
    """
    lengths = np.array([1, 5, 128, 4000])
    cost = PackCost(3.0, 0.5)
    assert cost.of_sequences(lengths).tolist() == [3.5, 27.5, 8576.0, 8012000.0]
    assert (
        cost.of_batch(int(lengths.sum()), int((lengths**2).sum()))
        == cost.of_sequences(lengths).sum()
    )


def test_fixed_cost_by_hand():
    """What a microbatch costs whatever it holds decides how many there are: 12 bytes of traffic for
    each weight, and 256 FLOPs that could have been done for each byte.
    """
    weights = 3 * (600 + 210) + 1000
    assert gpt_pack_cost(**TINY, swiglu=True).fixed == 12 * 256 * weights
    # All experts pass through memory, however few of them a token meets.
    experts = {"num_experts": 8, "moe_router_topk": 2, "moe_ffn_hidden_size": 4}
    weights = 3 * (600 + 3 * 10 * 4 * 8 + 10 * 8) + 1000
    assert gpt_pack_cost(**TINY, swiglu=True, **experts).fixed == 12 * 256 * weights


def test_fixed_cost_is_no_work():
    """The reported FLOPs are the model's; time that memory takes would inflate utilisation."""
    lengths = np.array([3, 4])
    with_fixed, without = PackCost(3.0, 0.5, 1e9), PackCost(3.0, 0.5)
    assert with_fixed.of_batch(7, 25) == without.of_batch(7, 25) == 33.5
    assert with_fixed.of_sequences(lengths).tolist() == without.of_sequences(lengths).tolist()


def test_masked_tokens_need_no_output_layer():
    cost, lengths, loss_tokens = (
        PackCost(3.0, 0.5, 1e9, head=1.0),
        np.array([3, 4]),
        np.array([0, 3]),
    )
    assert cost.of_sequences(lengths).tolist() == [3 * 4.5, 4 * 5]
    assert cost.of_sequences(lengths, loss_tokens).tolist() == [3 * 3.5, 4 * 5 - 1]
    assert cost.of_batch(7, 25) == 33.5
    assert cost.of_batch(7, 25, 3) == 33.5 - 4 == cost.at_loss_share(3 / 7).of_batch(7, 25)


NAN, INFINITE = float("nan"), float("inf")


@pytest.mark.parametrize(
    "numbers",
    [
        (0.0, 1.0),
        (-1.0, 0.0),
        (1.0, -1.0),
        (NAN, 0.0),
        (1.0, NAN),
        (INFINITE, 0.0),
        (1.0, 0.0, -1.0),
        (1.0, 0.0, NAN),
        (1.0, 0.0, 0.0, 1.0),
        (1.0, 0.0, 0.0, -0.5),
    ],
)
def test_cost_that_could_fall_is_refused(numbers):
    """Schedulers place the costliest first and count on it being the longest."""
    with pytest.raises(
        ValueError, match="linear > head >= 0, quadratic >= 0 and fixed >= 0, all finite"
    ):
        PackCost(*numbers)


def test_windows_are_counted_as_far_as_they_reach():
    """Treated as full attention, Gemma 3's windowed layers would be overrated 16 times at 32k
    tokens: packs of long sequences would be given too little else.
    """
    full = LayerKind(num_attention_heads=4, num_query_groups=2, kv_channels=5, ffn_hidden_size=7)
    layers = [replace(full, window=1024)] * 5 + [full]
    cost = layers_pack_cost(layers, hidden_size=10, vocab_size=0, is_gated=True)
    alone = layers_pack_cost([full], hidden_size=10, vocab_size=0, is_gated=True)
    assert cost.quadratic == alone.quadratic
    assert cost.windows == ((1024, 5 * alone.quadratic),)
    assert cost.linear == pytest.approx(6 * alone.linear)
    attention = cost.of_sequences(np.array([32768])) - cost.linear * 32768
    overrated = 6 * alone.quadratic * 32768**2 / attention.item()
    assert overrated == pytest.approx(4.6, abs=0.05)


def test_pairs_within_a_window():
    """Against a count of the pairs that a mask lets through: twice as many, up to a token's own."""
    lengths = np.arange(1, 40)
    for window in (1, 4, 16):
        position = np.arange(40)
        seen = np.minimum(position + 1, window).cumsum()  # of the first so many tokens
        squares = window_squares(lengths, window)
        assert np.all(np.abs(2 * seen[: len(lengths)] - squares) <= lengths)
    assert window_squares(np.array([3, 4, 6]), 4).tolist() == [9, 16, 32]


def test_a_batch_costs_what_its_sequences_cost():
    """Reports count FLOPs from sums."""
    cost = PackCost(3.0, 0.5, 7.0, windows=((4, 0.25), (9, 2.0)))
    lengths = np.array([2, 4, 7, 30])
    squares = [int(window_squares(lengths, window).sum()) for window in (4, 9)]
    of_batch = cost.of_batch(int(lengths.sum()), int((lengths**2).sum()), None, squares)
    assert of_batch == pytest.approx(cost.of_sequences(lengths).sum())
    most = cost.of_batch(int(lengths.sum()), int((lengths**2).sum()))
    assert of_batch < most <= PackCost(3.0, 2.75).of_batch(43, int((lengths**2).sum()))
    assert cost.shared_by(2) == PackCost(1.5, 0.25, 7.0, windows=((4, 0.125), (9, 1.0)))


def test_layers_of_a_delta_net_cost_no_pairs():
    """Three of four layers of Qwen3.5."""
    shape = DeltaNet(
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=3,
        linear_value_head_dim=5,
    )
    kind = LayerKind(
        num_attention_heads=4,
        num_query_groups=2,
        kv_channels=5,
        ffn_hidden_size=7,
        mixer=shape,
    )
    cost = layers_pack_cost([kind], hidden_size=10, vocab_size=0, is_gated=True)
    assert cost.quadratic == 0
    assert cost.windows == ()
    assert cost.linear == 6 * (800 + 308 + 210)


def test_shares_of_stages_by_hand():
    """The last stage would be taken for as quick as the others, whose output layer weighs most."""
    layers = gpt_layers(
        num_layers=4, num_attention_heads=2, num_query_groups=2, kv_channels=4, ffn_hidden_size=16
    )
    shape: Any = {"hidden_size": 8, "is_gated": False}
    # A layer: attention 4 * 8 * 8 = 256, MLP 2 * 8 * 16 = 256. The output layer: 8 * 128 = 1024.
    found = part_shares(layers, (3, 1), vocab_size=128, **shape)
    assert found == pytest.approx((3 * 512 / 3072, (512 + 1024) / 3072))
    half = part_shares(layers, (1, 2, 1), vocab_size=128, loss_share=0.5, **shape)
    assert half == pytest.approx((512 / 2560, 1024 / 2560, 1024 / 2560))
    further = part_shares(layers, (0, 4), vocab_size=0, mtp_num_layers=1, **shape)
    assert further == (0.0, 1.0)
