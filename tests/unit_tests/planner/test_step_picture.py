"""A picture that is wrong is believed all the same: its shapes against a step worked out by
hand."""

from dataclasses import replace

import pytest

from megatron.packing.batch.layout import Alignment
from megatron.packing.scheduling.cost import PackCost
from megatron.packing.scheduling.step_time import StepModel
from megatron.planner.step_blocks import Block, joined, merged
from megatron.planner.step_picture import MAX_LINES, picture_of, ticks
from megatron.planner.step_record import StepLayout, StepRecord

COST = PackCost(1.0, 0.0, 0.0)


def record(packs, **model):
    layout = StepLayout(
        num_ranks=len(packs), capacity=10, alignment=Alignment(), cost=COST,
        model=StepModel(**model)
    )  # fmt: skip
    return StepRecord(title="step", scheduler="default", layout=layout, packs=packs)


def times(line):
    return [(round(block.start, 3), round(block.end, 3)) for block in line.blocks]


def test_ranks_over_time():
    """Rank 1 ends at half of the step; the packs of each follow one another."""
    picture = picture_of(record([[[4, 2], [4]], [[1], [4]]]))
    assert [line.name for line in picture.ranks] == ["rank 0", "rank 1"]
    assert times(picture.ranks[0]) == [(0, 0.6), (0.6, 1)]
    assert times(picture.ranks[1]) == [(0, 0.1), (0.1, 0.5)]
    assert picture.ranks[0].blocks[0].cuts == (pytest.approx(2 / 3),)
    assert picture.ranks[0].blocks[0].shade == 0.6
    assert picture.ranks[0].blocks[0].text == (
        "rank 0, microbatch 0: 2 sequences, 6 of 10 tokens (60%), longest 4"
    )  # fmt: skip
    assert picture.busy[0] == pytest.approx(1)
    assert picture.busy[-1] == pytest.approx(0.5)
    assert picture.busy.mean() == pytest.approx(1 - picture_bubble(picture))
    assert (picture.stages, picture.slowest_rank, picture.notes) == ([], 0, [])


def picture_bubble(picture):
    return float(picture.facts.rsplit("bubble ", 1)[1].rstrip("%")) / 100


def test_ranks_that_meet_wait_at_every_microbatch():
    picture = picture_of(record([[[6], [1]], [[2], [4]]], sync_every_microbatch=True))
    assert times(picture.ranks[0]) == [(0, 0.6), (0.6, 0.7)]
    assert times(picture.ranks[1]) == [(0, 0.2), (0.6, 1)]
    assert picture.notes == ["ranks wait for one another at every microbatch"]
    assert picture.busy.mean() == pytest.approx(13 / 20, abs=0.001)


def test_pipeline_stages_show_bubbles():
    """Two equal packs in two stages: forward 1, backward 2, the last stage runs them one after the
    other.
    """
    picture = picture_of(record([[[3], [3]]], num_stages=2))
    ninth = [round(place / 9, 3) for place in range(10)]
    assert [line.name for line in picture.stages] == ["stage 0", "stage 1"]
    assert times(picture.stages[0]) == [
        (ninth[0], ninth[1]), (ninth[1], ninth[2]), (ninth[4], ninth[6]), (ninth[7], ninth[9]),
    ]  # fmt: skip
    assert [block.kind for block in picture.stages[0].blocks] == [
        "forward",
        "forward",
        "backward",
        "backward",
    ]
    assert times(picture.ranks[0]) == [(ninth[1], ninth[4]), (ninth[4], ninth[7])]
    assert picture.busy.mean() == pytest.approx(12 / 18, abs=0.001)


@pytest.mark.parametrize(
    ("stages", "name", "said"),
    [(1, "lower bound", "of the bound, "), (2, "bound of even packs", "of even packs, ")],
)
def test_the_bound_has_the_name_that_the_log_gives_it(stages, name, said):
    """Pipelines may end before it: a lower bound to the left of the end would be a
    contradiction."""
    picture = picture_of(record([[[3], [3]]], num_stages=stages))
    assert picture.bound_name == name
    assert said in picture.facts


def test_many_ranks_are_thinned_out_and_told():
    """4096 lines of a pixel's fraction show nothing; those left must hold the slowest and the
    quickest.
    """
    picture = picture_of(record([[[1 + rank % 10]] for rank in range(500)]))
    assert len(picture.ranks) == MAX_LINES
    assert picture.ranks[0].blocks[0].end == 1
    assert picture.ranks[-1].blocks[0].end == pytest.approx(0.1)
    assert picture.notes == [
        "48 of 500 ranks are drawn, from the slowest to the quickest at even distances"
    ]


def test_thin_blocks_are_put_together():
    """A page of millions of shapes opens nowhere."""
    picture = picture_of(record([[[1 + m % 3] for m in range(20_000)]]))
    assert 1000 < len(picture.ranks[0].blocks) <= 4000
    assert picture.ranks[0].blocks[-1].end == pytest.approx(1)
    assert "too thin to see" in picture.notes[0]


def test_merging_keeps_gaps_and_kinds():
    def block(start, end, kind="pack", shade=1.0):
        return Block(start, end, kind, shade, "x")

    thin = [block(0, 0.1, "forward", 0.0), block(0.1, 0.4, "backward", 1.0), block(5, 5.1)]
    first, second = merged(thin, 1.0)
    assert first[:3] == (0, 0.4, "backward")
    assert first.shade == pytest.approx(0.75)
    assert second == thin[2]
    assert joined([block(0, 1), block(1, 3), block(3.5, 4)]) == [block(0, 3), block(3.5, 4)]


def test_no_sequences_at_all():
    """Data may end with a batch of nothing; it is drawn as well as any."""
    picture = picture_of(record([[[]], [[]]]))
    assert picture.ranks[0].blocks[0].text == "rank 0, microbatch 0: empty"


def test_ticks_are_round():
    picture = picture_of(record([[[4]]]))
    assert [label for _, label in ticks(picture, 1.0)] == ["0%", "20%", "40%", "60%", "80%", "100%"]
    timed = replace(picture, seconds=1.7)
    assert [label for _, label in ticks(timed, 1.0)][:2] == ["0 ms", "500 ms"]
    assert ticks(timed, 0.5)[1] == (pytest.approx(0.5 / 1.7), "500 ms")
    assert [label for _, label in ticks(replace(picture, seconds=60.0), 1.0)][1] == "10 s"
