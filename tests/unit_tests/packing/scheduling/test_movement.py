"""Sequences that stay where they were drawn: as good a schedule, fewer tokens sent."""

import numpy as np
import pytest

from megatron.packing.scheduling import balance
from megatron.packing.scheduling.balance import default
from megatron.packing.scheduling.cost import PackCost
from megatron.packing.scheduling.movement import stay_home, tokens_moved
from megatron.packing.scheduling.step_time import StepModel
from megatron.packing.scheduling.work import Work
from tests.unit_tests.packing.requests import DISTRIBUTIONS, lengths_of, request
from tests.unit_tests.packing.stubs import array

MODELS = {
    "ranks": StepModel(),
    "pipelines": StepModel(num_stages=4),
    "ranks that meet": StepModel(ranks_meet=True),
    "pipelines that meet": StepModel(num_stages=2, ranks_meet=True),
}


def test_tokens_moved_by_hand():
    """The reported share of tokens that change ranks."""
    assert tokens_moved(array(5, 4, 3), array(0, 1, 1), array(0, 0, 1)) == 4
    assert tokens_moved(array(), array(), array()) == 0


@pytest.mark.parametrize("mode", MODELS)
def test_never_slower_and_never_more_moved(mode):
    """It is allowed to spend what the search left to the bound and no more; else balance is lost where no one looks."""
    rng = np.random.default_rng(41)
    model, fewer = MODELS[mode], 0
    for case in range(300):
        num_ranks, num_microbatches = int(rng.integers(1, 7)), int(rng.integers(1, 5))
        size = int(rng.integers(1, 80))
        work = Work.of(rng.integers(1, 100, size), PackCost(1.0, 0.01, float(rng.choice([0, 50]))))
        source = rng.integers(0, num_ranks, size)
        pack = rng.integers(0, num_ranks * num_microbatches, size)
        free = rng.permutation(size)[: num_ranks * num_microbatches]
        pack[free] = np.arange(free.size)
        capacity = int(np.bincount(pack, weights=work.length).max() * rng.choice([1, 2]))
        before = model.time_of(work.pack_costs(pack, num_ranks, num_microbatches))
        good_enough = int(before * rng.choice([0.9, 1.0, 1.1]))
        other = stay_home(
            *(work, source, pack.copy()),
            num_ranks=num_ranks,
            num_microbatches=num_microbatches,
            capacity=capacity,
            model=model,
            good_enough=good_enough,
        )
        assert other.shape == pack.shape
        assert np.bincount(other, weights=work.length).max() <= capacity, case
        if size >= num_ranks * num_microbatches:
            assert np.bincount(other, minlength=num_ranks * num_microbatches).min() > 0
        after = model.time_of(work.pack_costs(other, num_ranks, num_microbatches))
        assert after <= max(before, good_enough)
        moved = [tokens_moved(work.length, source, placed // num_microbatches) for placed in (pack, other)]
        assert moved[1] <= moved[0]
        fewer += moved[1] < moved[0]
    assert fewer > 150


def test_ranks_trade_names_by_hand():
    """A placement that only has ranks the other way round moves nothing once they are named after what they hold."""
    work = Work.of(array(6, 5, 4, 3), PackCost(1.0, 0.0))
    for model in MODELS.values():
        other = stay_home(
            *(work, array(0, 1, 1, 0), array(2, 0, 1, 3)),
            num_ranks=2,
            num_microbatches=2,
            capacity=6,
            model=model,
            good_enough=0,
        )
        assert other.tolist() == [0, 2, 3, 1]


SHARE_MOVED = {
    # Of what moves where no one asks: a little above what it is, as schedules are deterministic.
    "lognormal": 0.9,
    "long tail": 0.1,
    "chat and documents": 0.6,
    "uniform": 0.9,
    "constant": 0.0,
    "one giant": 0.05,
}


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_fewer_tokens_move(distribution, monkeypatch):
    """Without the search for placements at home nearly all tokens move, and schedules are as good."""
    rng = np.random.default_rng(42)
    lengths = lengths_of(distribution, rng, 512)
    asked = request(lengths, 32, int(lengths.max()) * 4, cost=PackCost(1.0, 1 / 65536, 1000.0))
    home = default(asked)
    monkeypatch.setattr(balance, "stay_home", lambda work, source, pack, **_: pack)
    anywhere = default(asked)
    moved = [tokens_moved(lengths, asked.source_rank, schedule.rank) for schedule in (home, anywhere)]
    assert moved[0] <= SHARE_MOVED[distribution] * moved[1]
