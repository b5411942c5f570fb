"""A step that was written down must be the step that ran, to the last sequence."""

import json
from dataclasses import replace

import numpy as np
import pytest

from megatron.packing.batch.layout import Alignment
from megatron.packing.batch.nodes import SampleSizes
from megatron.packing.scheduling.cost import PackCost
from megatron.packing.scheduling.default import default
from megatron.packing.scheduling.options import SchedulerOptions
from megatron.packing.scheduling.step_time import StepModel
from megatron.planner.compare import compare
from megatron.planner.sequences import Sequences
from megatron.planner.step_picture import picture_of
from megatron.planner.step_record import StepLayout, StepRecord

LAYOUT = StepLayout(
    num_ranks=2,
    capacity=16,
    alignment=Alignment(sequence=4, pack=8),
    cost=PackCost(1.0, 0.5, 3.0),
    microbatch_multiple=2,
    model=StepModel(num_stages=2, num_virtual_stages=2, stage_group=2),
)
RECORD = StepRecord(
    title="step 3", scheduler="default", layout=LAYOUT, packs=[[[5, 7], [1]], [[16], []]]
)  # fmt: skip


def test_account_is_of_these_packs():
    """The figures under a picture must be those of the packs drawn."""
    stats = RECORD.stats
    assert (stats.sequences, stats.tokens, stats.microbatches) == (4, 29, 2)
    assert stats.padded_tokens == 16 + 8 + 16 + 8  # an empty pack computes one unit
    assert RECORD.schedule.rank.tolist() == [0, 0, 0, 1]
    assert RECORD.schedule.microbatch.tolist() == [0, 0, 1, 0]


def test_json_gives_the_same_step():
    """What is drawn later must be what ran."""
    assert StepRecord.from_dict(json.loads(RECORD.to_json())) == RECORD
    model = replace(LAYOUT.model, shares=(0.2, 0.3, 0.1, 0.4))
    options = SchedulerOptions(outlier_delay_steps=2)
    uneven = replace(RECORD, layout=replace(LAYOUT, model=model, options=options))
    assert uneven.request.options == options
    assert StepRecord.from_dict(json.loads(uneven.to_json())) == uneven


def test_what_images_cost_is_in_the_record_and_in_what_it_is_compared_with():
    """Other schedules of the step would be as quick as if its images were free."""
    lengths, costs = np.array([5, 1, 16, 7, 3]), np.array([0.0, 400.0, 0.0, 300.0, 0.0])
    given = Sequences(lengths, payload_costs=costs)
    record = StepRecord.of("x", "default", LAYOUT, given, default(LAYOUT.request(given)))
    assert record.sequences.payload_costs is not None
    pairs = zip(record.lengths.tolist(), record.sequences.payload_costs.tolist())
    assert sorted(pairs) == sorted(zip(lengths.tolist(), costs.tolist()))
    assert StepRecord.from_dict(json.loads(record.to_json())) == record
    assert record.stats.payload_cost == 700
    assert record.stats.step_cost > replace(record, sizes=None).stats.step_cost + 200
    comparison = compare([record.sequences], LAYOUT, {"default": default}, 16)
    assert comparison.records[0].stats.step_cost == record.stats.step_cost
    assert picture_of(record).cost == record.stats.step_cost
    with_text = Sequences.joined([Sequences(np.array([2])), given])
    assert with_text.payload_costs is not None
    assert with_text.payload_costs.tolist() == [0, *costs]


@pytest.mark.parametrize("costs", [[1.0], [1, 2, -1, 0], [1, 2, "3", 0], 7])
def test_costs_of_other_sequences_are_refused(costs):
    """A file that somebody edited must not be drawn as a step that ran."""
    sizes = {"payload_costs": costs}
    with pytest.raises(ValueError, match="payload_costs must be 4 numbers"):
        StepRecord.from_dict({**json.loads(RECORD.to_json()), "sizes": sizes})


def test_record_of_a_schedule():
    """The real lengths are kept, not those rounded up to the alignment."""
    sequences = Sequences(np.array([5, 1, 16, 7, 3]))
    record = StepRecord.of("x", "default", LAYOUT, sequences, default(LAYOUT.request(sequences)))
    assert sorted(length for rank in record.packs for pack in rank for length in pack) == [
        1,
        3,
        5,
        7,
        16,
    ]
    assert len({len(rank) for rank in record.packs}) == 1
    assert record.num_microbatches % 2 == 0


TREES = Sequences(
    np.array([5, 7, 4]),
    SampleSizes(*(np.array(each) for each in ([8, 12, 4], [25, 31, 16], [64, 80, 16], [5, 11, 4]))),
    loss_tokens=np.array([5, 3, 4]),
)
"""A tree of 7 tokens, whose paths have 11, between two sequences."""


def test_trees_are_replayed_by_their_sizes():
    """Taken for a sequence, a tree would attend to its other branches, and have no padding of its
    own.
    """
    layout = replace(LAYOUT, cost=PackCost(1.0, 0.5, 3.0, head=0.25))
    request = layout.request(TREES)
    assert request.lengths.tolist() == [8, 12, 4]
    assert request.squares is not None
    assert request.squares.tolist() == [64, 80, 16]
    schedule = default(request)
    record = StepRecord.of("x", "default", layout, TREES, schedule)
    assert (record.stats.square_sum, record.stats.path_tokens) == (25 + 31 + 16, 20)
    assert record.request.time_of(record.schedule) == request.time_of(schedule)
    again = StepRecord.from_dict(json.loads(record.to_json()))
    assert again == record
    assert again.stats == record.stats
    own = [record.costs_of(rank, at).sum() for rank in (0, 1) for at in range(len(record.packs[0]))]
    assert sum(own) == pytest.approx(request.sequence_costs.sum())


@pytest.mark.parametrize("sizes", [[], {}, {"padded": [1]}, {"padded": "x"}])
def test_sizes_of_other_samples_are_refused(sizes):
    """A file that is edited by hand would be planned for, whatever it says."""
    values = {**json.loads(RECORD.to_json()), "sizes": sizes}
    with pytest.raises(ValueError, match="sizes must be padded, squares, padded_squares, path_tok"):
        StepRecord.from_dict(values)


def test_ranks_draw_equal_parts():
    """As training deals a global batch to ranks: `empty` is nothing else."""
    request = LAYOUT.request(Sequences(np.array([1, 2, 3, 4, 5])))
    assert request.source_rank.tolist() == [0, 0, 1, 1, 1]
    assert request.source_fetch.tolist() == [0, 1, 0, 1, 2]
    assert request.lengths.tolist() == [4, 4, 4, 4, 8]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"packs": None}, "list per rank"),
        ({"packs": [[[1]], [[1], [2]]]}, "as many microbatches on each rank"),
        ({"packs": [[[1], [0]]]}, r"packs\[0\]\[1\] must be lengths above 0"),
        ({"packs": [[[1], [True]]]}, r"packs\[0\]\[1\] must be lengths above 0"),
        ({"packs": [[[16, 1], [2]]]}, "a pack holds 16"),
        ({"packs": [[[17], [2]]]}, "a pack holds 16"),
        ({"cost": {"linear": 0, "quadratic": 0}}, "linear > head"),
        ({"model": {"stages": 1}}, "not a schedule as --dump-schedule writes them"),
        ({"model": {"num_stages": 2, "shares": [0.5, "x"]}}, "shares must be a list of numbers"),
        ({"model": {"num_stages": 2, "shares": [0.5, 0.2]}}, "shares must add up to 1"),
        ({"capacity": "x"}, "capacity must be a whole number above 0, but is 'x'"),
    ],
)
def test_what_is_no_schedule_is_refused(change, said):
    """A file edited by hand must be answered with what is wrong in it."""
    with pytest.raises(ValueError, match=said):
        StepRecord.from_dict({**json.loads(RECORD.to_json()), **change})


def test_missing_key_is_named():
    values = json.loads(RECORD.to_json())
    del values["alignment"]
    with pytest.raises(ValueError, match="must have the key 'alignment'"):
        StepRecord.from_dict(values)
