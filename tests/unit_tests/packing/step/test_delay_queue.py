"""The queue of what waits: its state survives a checkpoint, a failed step, and a step run again."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron.packing.step.delay_queue import DelayQueue, Waiting


def waiting(*sizes: int, age: int = 1) -> Waiting:
    """Samples of so many words, each of which says whose it is."""
    return Waiting(
        [torch.full((size,), 100 * size, dtype=torch.int32) for size in sizes], [(size, 0, -age) for size in sizes]
    )


def content(queue: DelayQueue) -> list:
    words, rows = queue.begin(is_repeated=False)
    return [(row, each.tolist()) for row, each in zip(rows, words, strict=True)]


def test_a_failed_step_changes_nothing():
    """The checkpoint that is saved before an error is raised would lack what the failed step had taken."""
    queue = DelayQueue(3)
    queue.finish(waiting(2, 3))
    before = queue.state_dict()
    queue.begin(is_repeated=False)
    after = queue.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_a_repeated_step_begins_with_the_same():
    """Megatron runs a step again whose result it doubts; it would see other packs."""
    queue = DelayQueue(3)
    queue.finish(waiting(2, 3))
    first = queue.begin(is_repeated=False)
    queue.finish(waiting(5))
    assert queue.begin(is_repeated=True) == first
    queue.finish(waiting(5))
    assert content(queue) == [((5, 0, -1), [500] * 5)]


@given(
    st.lists(st.lists(st.integers(1, 9), max_size=4), min_size=1, max_size=4),
    st.integers(1, 5),
)
def test_state_loads_on_any_number_of_ranks(sizes_of_ranks, num_ranks):
    """A sequence that two ranks load, or none, is trained on twice or never; as many ranks take back their own."""
    states = []
    for rank, sizes in enumerate(sizes_of_ranks):
        queue = DelayQueue(3)
        queue.finish(waiting(*sizes, age=rank + 1))
        states.append(queue.state_dict())
    loaded = []
    for rank in range(num_ranks):
        queue = DelayQueue(3)
        queue.load_state_dict(states, rank, num_ranks)
        again = queue.state_dict()
        if num_ranks == len(states):
            assert all(torch.equal(again[name], states[rank][name]) for name in again)
        loaded.append(content(queue))
    expected = [
        ((size, 0, -rank - 1), [100 * size] * size) for rank, sizes in enumerate(sizes_of_ranks) for size in sizes
    ]
    assert [sample for samples in loaded for sample in samples] == expected
    assert num_ranks == len(states) or max(map(len, loaded)) - min(map(len, loaded)) <= 1


@pytest.mark.parametrize("sizes", [(), (4,), (1, 7)])
def test_length_counts_what_waits(sizes):
    """Scripts ask it whether their data is used up."""
    queue = DelayQueue(1)
    queue.finish(waiting(*sizes))
    assert len(queue) == len(sizes)
