"""Advice that is wrong costs GPUs: each sentence where it must come, and its figure against a
schedule made again.
"""

import numpy as np
import pytest

from megatron.packing.batch.layout import Alignment
from megatron.packing.scheduling.cost import PackCost
from megatron.packing.scheduling.default import default
from megatron.packing.scheduling.registry import SCHEDULERS
from megatron.packing.scheduling.step_time import StepModel
from megatron.planner.advice import Adviser, RunFacts, _with_twice_the_context
from megatron.planner.compare import compare, modelled_cost
from megatron.planner.sequences import Sequences
from megatron.planner.step_record import StepLayout

COST = PackCost(1.0, 0.0, 0.0)
ALONE = RunFacts(1)


def advice(
    lengths,
    *others,
    ranks,
    capacity,
    stages=1,
    cost=COST,
    facts=ALONE,
    chunks=1,
    meet=False,
    shares=(),
):
    alignment = Alignment.for_layout(
        context_parallel_size=facts.context_parallel_size,
        tensor_parallel_size=1,
        sequence_parallel=False,
    )
    group = stages if chunks > 1 else 1
    model = StepModel(
        num_stages=stages,
        num_virtual_stages=chunks,
        stage_group=group,
        sync_every_microbatch=meet,
        shares=shares,
    )
    layout = StepLayout(
        num_ranks=ranks,
        capacity=capacity,
        alignment=alignment,
        cost=cost,
        microbatch_multiple=group,
        model=model,
    )
    batches = [Sequences(np.array(each)) for each in (lengths, *others)]
    comparison = compare(
        batches, layout, SCHEDULERS, max(int(batch.lengths.max()) for batch in batches)
    )
    return " ".join(Adviser(batches, layout, facts).advice(comparison))


def test_one_long_sequence_asks_for_context_parallel():
    """1,000 tokens beside 60: two ranks of which one idles become one rank that computes twice as
    fast.
    """
    said = advice([1000, 20, 20, 20], ranks=2, capacity=1000)
    assert "The longest sequence, 1,000 tokens, costs 1.9x a rank's fair share" in said
    assert (
        "--cp 2 with --dp 1 and --max-seqlen-per-dp-cp-rank 1000, on as many devices, would save "
        "47.0% of the time" in said
    )


def test_odd_number_of_ranks_is_told_without_a_figure():
    assert "more context parallel would share it" in advice([1000, 20, 20], ranks=3, capacity=1000)


def test_bubbles_ask_for_more_microbatches():
    """Four equal packs in four stages wait for 3/7 of the step; eight for 3/11: 11/8 over 7/4 is
    21.4 % less.
    """
    said = advice([100] * 4, ranks=1, capacity=100, stages=4)
    assert (
        "Devices wait for 43% of the step: --global-batch-size 8 would save 21.4% of the time per "
        "token" in said
    )
    assert "--vpp 2, if the layers are a multiple of 8, would save 21.4% of the time" in said


def test_a_larger_batch_is_two_joined():
    """One batch twice has two of its longest sequences: a user would be told of more than a larger
    batch saves.
    """
    uneven, even = [400, 100, 100, 100], [100] * 4
    options = {"ranks": 2, "capacity": 400, "stages": 2}
    alignment = Alignment.for_layout(
        context_parallel_size=1, tensor_parallel_size=1, sequence_parallel=False
    )
    model = StepModel(
        num_stages=2, num_virtual_stages=1, stage_group=1, sync_every_microbatch=False
    )
    layout = StepLayout(
        num_ranks=2,
        capacity=400,
        alignment=alignment,
        cost=COST,
        microbatch_multiple=1,
        model=model,
    )
    joined, *apart = (
        modelled_cost([Sequences(np.array(one))], layout, default)
        for one in (uneven + even, uneven, even)
    )
    told = f"--global-batch-size 8 would save {1 - joined / sum(apart):.1%} of the time per token"
    assert told in advice(uneven, even, **options)
    assert told in advice(uneven, even, uneven, **options)  # of an odd number, the last is left out


def test_advised_chunks_are_those_that_layers_allow():
    """Twice as many may be more than there are layers, or leave layers over."""

    def advised(layers, chunks):
        said = advice(
            [100] * 4,
            ranks=1,
            capacity=100,
            stages=4,
            chunks=chunks,
            facts=RunFacts(1, num_layers=layers),
        )
        return said.partition("--vpp ")[2].partition(" would")[0]

    assert [advised(*case) for case in ((8, 1), (12, 1), (24, 2), (32, 8), (4, 1))] == [
        "2",
        "3",
        "3",
        "",
        "",
    ]


def test_an_output_layer_asks_for_fewer_layers_on_its_stage():
    """Four layers and an output layer of two: five and three are even. Eight packs of 100 take 40 +
    8 * 60 on uneven stages, and 9 * 50 on even ones.
    """

    def advised(shares, **options):
        facts = RunFacts(1, num_layers=8, **options)
        said = advice([100] * 8, ranks=1, capacity=100, stages=2, facts=facts, shares=shares)
        return said.partition("--decoder-last-pipeline-num-layers ")[2].partition(";")[0]

    assert advised((0.4, 0.6)) == "3 would save 13.5% of the time."
    assert advised((0.49, 0.51)) == ""  # it would make the first stage the slow one
    assert advised((0.4, 0.6), has_equal_stages=False) == ""
    assert advised(()) == ""


def test_advised_batch_is_a_multiple_of_the_ranks():
    """Training refuses any other. 5 sequences on 4 ranks, of which 3 wait: 12 take 3 in place of 2
    packs.
    """
    said = advice([100] * 5, ranks=4, capacity=100)
    assert "--global-batch-size 12 would save 37.5% of the time per token" in said


@pytest.mark.parametrize(
    ("ranks", "sync_below", "meet"), [(4, 2, False), (4, 4, True), (4, None, True), (2, 4, False)]
)
def test_experts_tie_fewer_ranks_with_more_context_parallel(ranks, sync_below, meet):
    """8 experts over context parallel 4 and 2 ranks lie within one rank of 8: it would be advised
    against waiting.
    """
    layout = StepLayout(
        num_ranks=ranks,
        capacity=8,
        alignment=Alignment(),
        cost=COST,
        model=StepModel(sync_every_microbatch=True),
    )
    assert (
        _with_twice_the_context(
            layout, RunFacts(1, sync_below=sync_below)
        ).model.sync_every_microbatch
        is meet
    )


def test_low_fill_asks_for_less_capacity():
    """Without a fixed cost small packs are as quick, and take less memory."""
    said = advice([100] * 8, ranks=1, capacity=1600)
    assert "Less capacity: packs are 50% filled; 800 tokens per rank would change nothing" in said
    assert "activations take 50%" in said


def test_fixed_cost_asks_for_capacity():
    """16 packs of 10 + 10 become 8 of 20 + 10."""
    said = advice([10] * 16, ranks=1, capacity=10, cost=PackCost(1.0, 0.0, 10.0))
    assert (
        "15 tokens per rank would change nothing, 20 tokens per rank would save 25.0% of the time"
        in said
    )


def test_nothing_to_gain_says_so():
    said = advice([64] * 8, ranks=2, capacity=64)
    assert "its memory: up to 128 tokens per rank" in said
    assert "It is 0.00% above the lower bound" in said
    assert "--cp" not in said
    assert "Devices wait" not in said
