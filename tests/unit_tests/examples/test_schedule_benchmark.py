"""The schedulers that `default` is compared with: a wrong one would make it look good."""

import importlib
import itertools
from pathlib import Path

import numpy as np
import pytest

from megatron.packing.scheduling.problem import check_schedule
from megatron.packing.scheduling.step_time import StepModel

FOLDER = Path(__file__).parents[3] / "examples" / "benchmarks"


@pytest.fixture(scope="module")
def contenders():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(FOLDER))
        yield importlib.import_module("schedule_contenders")


@pytest.fixture(scope="module")
def benchmark():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(FOLDER))
        yield importlib.import_module("schedule_run")


@pytest.fixture(scope="module")
def cases():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(FOLDER))
        yield importlib.import_module("schedule_cases")


def sums(values, part_of, num_parts: int) -> list[int]:
    return sorted(np.bincount(part_of, weights=values, minlength=num_parts).astype(int).tolist())


def test_largest_differencing_by_hand(contenders):
    """The textbook example: 8, 7, 6, 5, 4 in two parts end 2 apart, though 0 would be possible."""
    values = [8, 7, 6, 5, 4]
    assert sums(values, contenders.largest_differencing(values, 2), 2) == [14, 16]
    equal = contenders.largest_differencing_of_equal_counts([9, 1, 5, 5, 7, 3], 3)
    assert sorted(np.bincount(equal).tolist()) == [2, 2, 2]
    assert sums([9, 1, 5, 5, 7, 3], equal, 3) == [10, 10, 10]


def test_largest_differencing_is_near_the_best(contenders):
    """Against all assignments of a few values."""
    rng = np.random.default_rng(61)
    ratios = []
    for _ in range(200):
        num_parts, values = (
            int(rng.integers(1, 4)),
            rng.integers(1, 50, int(rng.integers(1, 8))).tolist(),
        )
        best = min(
            max(sums(values, np.array(ways), num_parts))
            for ways in itertools.product(range(num_parts), repeat=len(values))
        )
        ratios.append(
            max(sums(values, contenders.largest_differencing(values, num_parts), num_parts)) / best
        )
    assert min(ratios) >= 1
    assert np.mean(ratios) < 1.01


@pytest.mark.slow
def test_all_but_differencing_by_cost_are_valid(cases, contenders, benchmark):
    """An invalid schedule is easily better than a valid one."""
    for distribution, (size, num_ranks), factor, multiple in itertools.product(
        cases.DISTRIBUTIONS, ((64, 8), (256, 2)), (1, 2), (1, 4)
    ):
        case = cases.Case(
            distribution=distribution,
            size=size,
            num_ranks=num_ranks,
            capacity_factor=factor,
            multiple=multiple,
        )
        request = benchmark.request_of(case, StepModel(), cases.SEED)
        for name, scheduler in contenders.CONTENDERS.items():
            schedule = scheduler(request)
            if name != "Karmarkar-Karp by cost":
                check_schedule(request, schedule)
            assert schedule.num_microbatches % multiple == 0
