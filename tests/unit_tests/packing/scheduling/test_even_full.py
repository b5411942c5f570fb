"""Full packs made evener: valid each, and better where anything is found."""

from collections import Counter

import numpy as np
import pytest

from megatron.packing.scheduling.cost import PackCost
from megatron.packing.scheduling.even import Effort, Room
from megatron.packing.scheduling.even_full import evener_ranks, evener_rows
from megatron.packing.scheduling.placement import best_fit
from megatron.packing.scheduling.repacking import deal
from megatron.packing.scheduling.step_time import StepModel
from megatron.packing.scheduling.work import Work
from tests.unit_tests.packing.stubs import array, in_python, needs_compiled

WAYS = {"ranks": (evener_ranks, StepModel()), "rows": (evener_rows, StepModel(ranks_meet=True))}


def random_case(rng) -> tuple[Work, Room, np.ndarray]:
    """Packs by best-fit decreasing, dealt to ranks."""
    length = rng.integers(1, int(rng.choice([5, 60, 900])), int(rng.integers(2, 60)))
    work = Work.of(length, PackCost(1.0, float(rng.choice([0, 0.002, 0.1])), float(rng.choice([0, 7]))))
    capacity = int(work.length[0] * rng.choice([1, 1.5, 2, 3]))
    packs, num_packs = best_fit(work.length, capacity=capacity)
    num_ranks = int(rng.integers(1, num_packs + 1))
    num_microbatches = -(-num_packs // num_ranks)
    room = Room(num_ranks=num_ranks, num_microbatches=num_microbatches, capacity=capacity, effort=Effort(0))
    return work, room, deal(work.cost, packs, num_ranks, num_microbatches)


@pytest.mark.parametrize("way", WAYS)
def test_what_is_found_is_valid_and_better(form, way):
    """The search takes what is quicker: were it invalid, it would be over capacity, or lose a sequence, in training."""
    evener, model = WAYS[way]
    seen: Counter[bool] = Counter()
    for case in range(120):
        work, room, pack = random_case(np.random.default_rng([7, case]))
        shape = room.num_ranks, room.num_microbatches
        fixed = work.fixed * room.num_microbatches
        low = max(-(-work.total // room.num_ranks), int(work.cost[0]))
        before, splits = pack.copy(), Effort(20_000)
        found = evener(work, room, pack, low, splits)
        assert pack.tolist() == before.tolist()
        seen[found is None] += 1
        if found is None:
            continue
        assert np.bincount(found, weights=work.length).max() <= room.capacity
        assert 0 <= found.min() <= found.max() < room.num_ranks * room.num_microbatches
        time = model.time_of(work.pack_costs(found, *shape))
        assert low + fixed <= time < model.time_of(work.pack_costs(pack, *shape))
        assert evener(work, room, pack, low, Effort(-1)) is None
    assert min(seen[True], seen[False]) > 20, seen


@needs_compiled
@pytest.mark.parametrize("way", WAYS)
def test_compiled_and_python_form_are_equal(way):
    """Ranks with and without a compiler would follow different schedules."""
    evener, _ = WAYS[way]
    for case in range(100):
        work, room, pack = random_case(np.random.default_rng([8, case]))
        low = max(-(-work.total // room.num_ranks), int(work.cost[0]))
        compiled = evener(work, room, pack, low, Effort(20_000))
        with in_python():
            python = evener(work, room, pack, low, Effort(20_000))
        assert (compiled is None) == (python is None)
        if compiled is not None and python is not None:
            assert compiled.tolist() == python.tolist()


def test_evener_ranks_by_hand(form):
    """Packs of 9 + 1 and 6 + 4 on one rank, 7 + 2 and 5 + 4 on the other, full but for two tokens: 20 and 18 become 19
    and 19, where a trade of 5 for 4, or of 2 for 1, is within capacity only where it is of no use.
    """
    length = array(9, 7, 6, 5, 4, 4, 2, 1)
    work = Work(order=np.arange(8), length=length, cost=length, fixed=1, unit=1.0)
    room = Room(num_ranks=2, num_microbatches=2, capacity=10, effort=Effort(0))
    pack = array(0, 2, 1, 3, 1, 3, 2, 0)
    assert StepModel().time_of(work.pack_costs(pack, 2, 2)) == 22
    found = evener_ranks(work, room, pack, 19, Effort(10**5))
    assert found is not None
    assert StepModel().time_of(work.pack_costs(found, 2, 2)) == 21
    assert evener_ranks(work, room, found, 19, Effort(10**5)) is None


def test_evener_rows_by_hand(form):
    """Rows of 5 + 3 and 2 + 1 + 1, and of 4 and 2, become rows of 5 + 1 and 4 + 2, and of 3 and 2 + 1."""
    length = array(5, 4, 3, 2, 2, 1, 1)
    work = Work(order=np.arange(7), length=length, cost=length, fixed=1, unit=1.0)
    room = Room(num_ranks=2, num_microbatches=2, capacity=8, effort=Effort(0))
    pack = array(0, 1, 0, 2, 3, 2, 2)
    model = StepModel(ranks_meet=True)
    assert model.time_of(work.pack_costs(pack, 2, 2)) == 14
    found = evener_rows(work, room, pack, 9, Effort(10**5))
    assert found is not None
    assert model.time_of(work.pack_costs(found, 2, 2)) == 11
