"""Advice that is wrong costs GPUs: each sentence where it must come, and its figure against a schedule made anew."""

import numpy as np

from megatron.packing.layout import Alignment
from megatron.packing.planning.advice import Adviser
from megatron.packing.planning.compare import compare
from megatron.packing.planning.step_record import StepLayout
from megatron.packing.scheduling.cost import PackCost
from megatron.packing.scheduling.schedulers import SCHEDULERS
from megatron.packing.scheduling.step_time import StepModel

COST = PackCost(1.0, 0.0, 0.0)


def advice(lengths, *, ranks, capacity, stages=1, cost=COST, context=1):
    alignment = Alignment.for_layout(context_parallel_size=context, tensor_parallel_size=1, sequence_parallel=False)
    model = StepModel(num_stages=stages)
    layout = StepLayout(num_ranks=ranks, capacity=capacity, alignment=alignment, cost=cost, model=model)
    batches = [np.array(lengths)]
    comparison = compare(batches, layout, SCHEDULERS, int(max(lengths)))
    return " ".join(Adviser(batches, layout, context).advice(comparison))


def test_one_long_sequence_asks_for_context_parallel():
    """1,000 tokens beside 60: two ranks of which one idles become one rank that computes twice as fast."""
    said = advice([1000, 20, 20, 20], ranks=2, capacity=1000)
    assert "The longest sequence, 1,000 tokens, costs 1.9x a rank's fair share" in said
    assert "--cp 2 with --dp 1, on as many devices, would save 47.0% of the time" in said


def test_odd_number_of_ranks_is_told_without_a_figure():
    assert "more context parallel would share it" in advice([1000, 20, 20], ranks=3, capacity=1000)


def test_bubbles_ask_for_more_microbatches():
    """Four equal packs in four stages wait for 3/7 of the step; eight for 3/11: 11/8 over 7/4 is 21.4 % less."""
    said = advice([100] * 4, ranks=1, capacity=100, stages=4)
    assert "Devices wait for 43% of the step: --global-batch-size 8 would save 21.4% of the time per token" in said
    assert "--vpp 2 would save 21.4% of the time" in said


def test_low_fill_asks_for_less_capacity():
    """Without a fixed cost small packs are as quick, and take less memory."""
    said = advice([100] * 8, ranks=1, capacity=1600)
    assert "Less capacity: packs are 50% filled; 800 tokens per rank would change nothing" in said
    assert "activations take 50%" in said


def test_fixed_cost_asks_for_capacity():
    """16 packs of 10 + 10 become 8 of 20 + 10."""
    said = advice([10] * 16, ranks=1, capacity=10, cost=PackCost(1.0, 0.0, 10.0))
    assert "15 tokens per rank would change nothing, 20 tokens per rank would save 25.0% of the time" in said


def test_nothing_to_gain_says_so():
    said = advice([64] * 8, ranks=2, capacity=64)
    assert "More capacity is not worth its memory: up to 128 tokens per rank" in said
    assert "It is 0.00% above the lower bound" in said
    assert "--cp" not in said
    assert "Devices wait" not in said
