"""The schedulers that `default` is compared with: a wrong one would make it look good."""

import importlib.util
import itertools
from pathlib import Path

import numpy as np
import pytest

from megatron.packing.scheduling.schedule import check_schedule
from megatron.packing.scheduling.step_time import StepModel

SCRIPT = Path(__file__).parents[3] / "examples" / "benchmarks" / "schedule.py"


@pytest.fixture(scope="module")
def benchmark():
    spec = importlib.util.spec_from_file_location("schedule_benchmark", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(__import__("sys").modules, spec.name, module)  # dataclasses look their module up
        spec.loader.exec_module(module)
        yield module


def sums(values, part_of, num_parts: int) -> list[int]:
    return sorted(np.bincount(part_of, weights=values, minlength=num_parts).astype(int).tolist())


def test_largest_differencing_by_hand(benchmark):
    """The textbook example: 8, 7, 6, 5, 4 in two parts end 2 apart, though 0 would be possible."""
    values = [8, 7, 6, 5, 4]
    assert sums(values, benchmark.largest_differencing(values, 2), 2) == [14, 16]
    equal = benchmark.largest_differencing_of_equal_counts([9, 1, 5, 5, 7, 3], 3)
    assert sorted(np.bincount(equal).tolist()) == [2, 2, 2]
    assert sums([9, 1, 5, 5, 7, 3], equal, 3) == [10, 10, 10]


def test_largest_differencing_is_near_the_best(benchmark):
    """Against all assignments of a few values."""
    rng = np.random.default_rng(61)
    ratios = []
    for _ in range(200):
        num_parts, values = int(rng.integers(1, 4)), rng.integers(1, 50, int(rng.integers(1, 8))).tolist()
        best = min(
            max(sums(values, np.array(ways), num_parts))
            for ways in itertools.product(range(num_parts), repeat=len(values))
        )
        ratios.append(max(sums(values, benchmark.largest_differencing(values, num_parts), num_parts)) / best)
    assert min(ratios) >= 1
    assert np.mean(ratios) < 1.01


def test_all_but_differencing_by_cost_are_valid(benchmark):
    """An invalid schedule is easily better than a valid one."""
    for distribution, (size, num_ranks), factor, multiple in itertools.product(
        benchmark.DISTRIBUTIONS, ((64, 8), (256, 2)), (1, 2), (1, 4)
    ):
        case = benchmark.Case(
            distribution=distribution, size=size, num_ranks=num_ranks, capacity_factor=factor, multiple=multiple
        )
        request = case.request(StepModel())
        for name, scheduler in benchmark.CONTENDERS.items():
            schedule = scheduler(request)
            if name != "Karmarkar-Karp by cost":
                check_schedule(request, schedule)
            assert schedule.num_microbatches % multiple == 0
