"""The queue of what waits: its state survives a checkpoint, a failed step, and a step run again."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.packing.batch.layout import Alignment
from megatron.packing.batch.tree_shapes import ShapedSamples
from megatron.packing.step.decide import RankReport
from megatron.packing.step.delay import Delayed, DelayQueue, LocalSamples
from megatron.packing.step.load import Loaded
from tests.unit_tests.packing.batch.test_samples import (
    extra_of,
    parts_of,
    ragged_of,
    samples_of,
    with_extra,
    with_nodes_and_images,
)


def delayed(*lengths: int, steps: int = 1) -> Delayed:
    """Samples of so many tokens, each of which says whose it is."""
    parts = [([100 * n] * n, [100 * n] * n, [1.0] * n, list(range(n))) for n in lengths]
    return Delayed(samples_of(parts), np.full(len(lengths), steps))


def content(queue: DelayQueue) -> list[tuple[int, list[int]]]:
    samples, steps, _ = queue.begin(is_repeated=False)
    return [(step, part[0]) for step, part in zip(steps.tolist(), parts_of(samples), strict=True)]


def state_of(queue: DelayQueue) -> dict[str, Any]:
    """Its state with lists in place of tensors."""

    def plain(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: plain(part) for name, part in value.items()}
        return np.asarray(value).tolist()

    return plain(queue.state_dict())


def test_a_failed_step_changes_nothing() -> None:
    """The checkpoint that is saved before an error is raised would lack what the failed step had
    taken.
    """
    queue = DelayQueue(3)
    queue.finish(delayed(2, 3))
    before = state_of(queue)
    queue.begin(is_repeated=False)
    assert state_of(queue) == before


def test_a_repeated_step_begins_with_the_same() -> None:
    """Megatron runs a step again whose result it doubts; it would see other packs."""
    queue = DelayQueue(3)
    queue.finish(delayed(2, 3))
    first = queue.begin(is_repeated=False)
    queue.finish(delayed(5))
    assert queue.begin(is_repeated=True) is first
    queue.finish(delayed(5))
    assert content(queue) == [(1, [500] * 5)]


@given(
    st.lists(st.lists(st.integers(1, 9), max_size=4), min_size=1, max_size=4),
    st.integers(1, 5),
)
def test_state_loads_on_any_number_of_ranks(
    lengths_of_ranks: list[list[int]], num_ranks: int
) -> None:
    """A sequence that two ranks load, or none, is trained on twice or never; as many ranks take
    back their own.
    """
    states = []
    for rank, lengths in enumerate(lengths_of_ranks):
        queue = DelayQueue(3)
        queue.finish(delayed(*lengths, steps=rank + 1))
        states.append(queue.state_dict())
    loaded = []
    for rank in range(num_ranks):
        queue = DelayQueue(3)
        queue.load_state_dict(states, rank, num_ranks)
        if num_ranks == len(states):
            assert content(queue) == [(rank + 1, [100 * n] * n) for n in lengths_of_ranks[rank]]
        loaded.append(content(queue))
    expected = [
        (rank + 1, [100 * n] * n) for rank, lengths in enumerate(lengths_of_ranks) for n in lengths
    ]
    assert [sample for samples in loaded for sample in samples] == expected
    assert num_ranks == len(states) or max(map(len, loaded)) - min(map(len, loaded)) <= 1


def test_a_state_of_the_version_before_is_read() -> None:
    """A run that was saved while sequences waited would have to begin again."""
    queue, loaded = DelayQueue(1), DelayQueue(1)
    queue.finish(delayed(2, 3))
    state = {name: value for name, value in queue.state_dict().items() if name != "rows"}
    loaded.load_state_dict([{**state, "version": 2}], 0, 1)
    assert content(loaded) == content(queue) == [(1, [200, 200]), (1, [300, 300, 300])]


def test_trees_and_references_wait_with_their_sequences() -> None:
    """A tree that waits a step would be trained as one sequence, each branch behind the other."""
    queue, loaded = DelayQueue(1), DelayQueue(1)
    waiting = delayed(2, 3)
    queue.finish(waiting._replace(samples=with_nodes_and_images(waiting.samples)))
    loaded.load_state_dict([queue.state_dict()], 0, 1)
    assert ragged_of(loaded.delayed.samples) == ragged_of(queue.delayed.samples)
    state = queue.state_dict()
    state["rows"]["node"] = state["rows"]["node"] + 1
    with pytest.raises(ValueError, match="damaged"):
        DelayQueue(1).load_state_dict([state], 0, 1)


@pytest.mark.parametrize("version", [{}, {"version": 1}, {"version": 5}])
def test_a_state_of_another_version_is_refused(version: dict[str, int]) -> None:
    """Its numbers mean something else; read as ours they would be other tokens."""
    queue = DelayQueue(1)
    queue.finish(delayed(2, 3))
    state = {name: value for name, value in queue.state_dict().items() if name != "version"}
    with pytest.raises(
        ValueError, match="as another version wrote them; continue it with that version"
    ):
        DelayQueue(1).load_state_dict([{**state, **version}], 0, 1)


def test_samples_with_other_columns_than_those_that_wait_are_reported() -> None:
    """An exception here instead would leave the other ranks waiting for this one's report."""
    queue = DelayQueue(1)
    queue.finish(delayed(2)._replace(samples=with_extra(delayed(2).samples)))
    loaded = Loaded(samples=delayed(3, 4, 5).samples, fetch=np.array([0, 1, 1]))
    local = LocalSamples.of(loaded, queue, "rank 1", is_repeated=False)
    own = ShapedSamples(local.samples, np.arange(local.samples.lengths.size))
    report = RankReport.of(local.loaded, local.delayed, own, Alignment())
    assert report.error is not None
    assert report.error.startswith("rank 1: 'advantages' must be in all samples")
    assert report.lengths.size == report.fetch.size == 0


def test_extra_columns_wait_with_their_sequences() -> None:
    """A sequence that is trained a step late would be trained without its advantages."""
    queue, loaded = DelayQueue(1), DelayQueue(1)
    waiting = delayed(2, 3)
    queue.finish(waiting._replace(samples=with_extra(waiting.samples)))
    loaded.load_state_dict([queue.state_dict()], 0, 1)
    assert state_of(loaded) == state_of(queue)
    assert extra_of(loaded.delayed.samples) == extra_of(queue.delayed.samples)


@pytest.mark.parametrize("damaged", ["lengths", "steps", "columns", "extra_per_token"])
def test_a_damaged_state_is_refused(damaged: str) -> None:
    """Sequences that end elsewhere are other sequences."""
    queue = DelayQueue(1)
    waiting = delayed(2, 3)
    queue.finish(waiting._replace(samples=with_extra(waiting.samples)))
    state = queue.state_dict()
    part = state[damaged]
    state[damaged] = (
        {name: values[1:] for name, values in part.items()} if isinstance(part, dict) else part[1:]
    )
    with pytest.raises(ValueError, match="delayed sequences are damaged; take another checkpoint"):
        DelayQueue(1).load_state_dict([state], 0, 1)


@pytest.mark.parametrize("lengths", [(), (4,), (1, 7)])
def test_length_counts_what_waits(lengths: tuple[int, ...]) -> None:
    """Scripts ask it whether their data is used up."""
    queue = DelayQueue(1)
    queue.finish(delayed(*lengths))
    assert len(queue) == len(lengths)
