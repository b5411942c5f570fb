"""Which sequences wait: never too long, never all, and only where it saves time."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.packing.scheduling.cost import PackCost
from megatron.packing.scheduling.delay import capacity_that_matters, outliers_to_delay
from megatron.packing.scheduling.problem import ScheduleRequest
from megatron.packing.scheduling.registry import get_scheduler
from megatron.packing.scheduling.step_time import StepModel

LINEAR = PackCost(linear=1.0, quadratic=0.0)
QUADRATIC = PackCost(linear=1.0, quadratic=1 / 8000, fixed=200.0)
MODELS = {
    "ranks": StepModel(),
    "pipeline": StepModel(num_stages=4),
    "ranks that meet": StepModel(sync_every_microbatch=True),
}


def waits(lengths, ages, num_ranks, max_steps, capacity=None, cost=LINEAR) -> list[bool]:
    """With room for all in a pack unless told otherwise."""
    lengths = np.array(lengths, np.int64)
    return outliers_to_delay(
        lengths,
        cost,
        np.array(ages, np.int64),
        num_ranks=num_ranks,
        pack_capacity=max(int(lengths.sum()), 1) if capacity is None else capacity,
        max_steps=max_steps,
    ).tolist()


@pytest.mark.parametrize(
    ("lengths", "ages", "expected"),
    [
        (
            [3, 12, 3, 2, 1],
            [0] * 5,
            [False, True, False, False, False],
        ),  # 21 < 2 * 12, and 9 >= 2 * 3
        ([12, 12, 3, 2, 2], [1, 0, 0, 0, 0], [False] * 5),  # 31 >= 2 * 12: one on each rank
        ([3, 12, 3, 2, 1], [0, 4, 0, 0, 0], [False] * 5),  # it has waited long enough
        (
            [20, 12, 3, 3, 1],
            [0, 4, 0, 0, 0],
            [True, False, False, False, False],
        ),  # the costlier one may still wait
        (
            [20, 12, 3, 3, 1],
            [4, 0, 0, 0, 0],
            [False] * 5,
        ),  # beside what must leave, cheaper ones cost no time
        ([12, 9], [0, 0], [False, False]),  # no fewer sequences than ranks leave
        ([5, 5, 5], [0] * 3, [False] * 3),  # 15 >= 2 * 5
        ([], [], []),
    ],
)
def test_literal_decisions_of_ranks_that_meet_at_the_end(lengths, ages, expected):
    """A rule that is off by one sequence still trains, and saves nothing."""
    assert waits(lengths, ages, num_ranks=2, max_steps=4) == expected


@pytest.mark.parametrize(
    ("num_long", "expected"),
    [
        (1, [True] + [False] * 40),  # 41 * 8 tokens beside it cost far less
        (2, [False] * 42),  # a pack on each rank
        (3, [False] * 2 + [True] + [False] * 40),  # the third would have a microbatch of its own
    ],
)
def test_literal_decisions_of_ranks_that_meet_at_every_microbatch(num_long, expected):
    """Where ranks meet at every microbatch, company that fills half of one leaves the other ranks
    idle in it.
    """
    lengths = [64] * num_long + [8] * 40
    quadratic = PackCost(linear=1.0, quadratic=1.0)
    assert (
        waits(lengths, [0] * len(lengths), num_ranks=2, max_steps=4, capacity=64, cost=quadratic)
        == expected
    )


def test_the_oldest_of_equals_leaves_first():
    """Else one of two alike could wait to its last step, every time."""
    lengths, ages = [64, 64, 64] + [8] * 40, [0, 2, 1] + [0] * 40
    quadratic = PackCost(linear=1.0, quadratic=1.0)
    found = waits(lengths, ages, num_ranks=2, max_steps=4, capacity=64, cost=quadratic)
    assert found == [True, False, False] + [False] * 40


class Played:
    """Steps of `batches` (lengths each), sequences numbered in the order drawn, until nothing
    waits.
    """

    def __init__(
        self, batches, num_ranks, max_steps, model=MODELS["ranks"], capacity=2**17
    ) -> None:
        self.steps: list[list[int]] = []
        """The numbers of the sequences of each step."""
        self.time = 0.0
        """Modelled, of all steps."""
        self.lengths = np.concatenate([np.array(batch, np.int64) for batch in batches])
        self.loaded_at = np.repeat(np.arange(len(batches)), [len(batch) for batch in batches])
        waiting = np.empty(0, np.int64)
        for step in range(len(batches)):
            local = np.concatenate((waiting, np.flatnonzero(self.loaded_at == step)))
            lengths = self.lengths[local]
            wait = outliers_to_delay(
                lengths,
                QUADRATIC,
                step - self.loaded_at[local],
                num_ranks=num_ranks,
                pack_capacity=capacity_that_matters(model, capacity, lengths),
                max_steps=0 if step == len(batches) - 1 else max_steps,
            )
            waiting = local[wait]
            self.steps.append(local[~wait].tolist())
            self.time += self._time_of(lengths[~wait], num_ranks, model, capacity)

    def _time_of(self, lengths, num_ranks, model, capacity) -> float:
        zeros = np.zeros_like(lengths)
        request = ScheduleRequest(
            lengths=lengths,
            source_rank=zeros,
            source_fetch=zeros,
            num_ranks=num_ranks,
            num_fetches=1,
            capacity=capacity,
            cost=QUADRATIC,
            model=model,
        )
        return request.time_of(get_scheduler("default")(request))

    def delays(self) -> list[int]:
        """Steps that each sequence waited, in the order of the steps."""
        return [
            int(step - self.loaded_at[number])
            for step, numbers in enumerate(self.steps)
            for number in numbers
        ]


LENGTHS = st.one_of(st.integers(1, 20), st.integers(1, 2**17))


@pytest.mark.slow
@settings(max_examples=60)
@given(
    st.lists(st.lists(LENGTHS, min_size=1, max_size=12), min_size=1, max_size=8),
    st.integers(1, 6),
    st.integers(0, 4),
    st.sampled_from(sorted(MODELS)),
)
def test_each_sequence_once_and_never_too_late(batches, num_ranks, max_steps, mode):
    """A sequence lost, trained on twice or left waiting for ever would not be seen in any loss."""
    played = Played(batches, num_ranks, max_steps, MODELS[mode])
    assert sorted(number for numbers in played.steps for number in numbers) == list(
        range(played.lengths.size)
    )
    assert max(played.delays()) <= max_steps
    for batch, numbers in zip(batches, played.steps):
        assert len(numbers) >= min(len(batch), max(num_ranks, -(-len(batch) // 2)))


def long_tailed(num_batches: int, num_sequences: int) -> list[np.ndarray]:
    random = np.random.default_rng(7)
    lengths = np.exp(random.normal(7.0, 1.4, (num_batches, num_sequences)))
    return list(np.clip(lengths, 16, 2**17).astype(np.int64))


@pytest.mark.parametrize(
    ("mode", "at_most"), [("ranks", 0.75), ("pipeline", 0.75), ("ranks that meet", 0.75)]
)
def test_waiting_shortens_the_modelled_time_on_a_long_tail(mode, at_most):
    """It is what outliers wait for; without it they would lose freshness for nothing."""
    batches = long_tailed(12, 128)
    without, with_delay = (Played(batches, 8, max_steps, MODELS[mode]) for max_steps in (0, 4))
    assert with_delay.time <= at_most * without.time
    delays = with_delay.delays()
    assert max(delays) == 4, "the property tests above are vacuous if none waits so long"
    assert delays.count(0) > 0.95 * len(delays)
    assert set(without.delays()) == {0}


def test_alike_lengths_do_not_wait():
    """On data without a tail the order of samples should stay as drawn."""
    random = np.random.default_rng(3)
    batches = [random.integers(900, 1100, 64) for _ in range(10)]
    assert set(Played(batches, 8, 4).delays()) == {0}
    assert set(Played(long_tailed(10, 16), 1, 4, MODELS["pipeline"]).delays()) == {0}
