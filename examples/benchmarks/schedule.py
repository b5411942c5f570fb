"""pure. Schedulers side by side: modelled step time over the lower bound, validity and milliseconds.

    OMP_NUM_THREADS=1 python examples/benchmarks/schedule.py --quick    a minute; prints
    OMP_NUM_THREADS=1 python examples/benchmarks/schedule.py            a quarter of an hour; writes results/schedule.md

Beside `default` and `dp_balanced` stand re-statements of algorithms that public trainers use. All see the same lengths;
the seeds are not those that `default` was tuned with.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import math
import platform
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from heapq import heapify, heappop, heapreplace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from megatron.packing.scheduling import balance, native, placement
from megatron.packing.scheduling.balance import default
from megatron.packing.scheduling.cost import gpt_pack_cost
from megatron.packing.scheduling.schedule import Schedule, Scheduler, ScheduleRequest, check_schedule
from megatron.packing.scheduling.schedulers import SCHEDULERS
from megatron.packing.scheduling.step_time import StepModel
from megatron.sft.mock_lengths import parse_distribution

IntArray = npt.NDArray[np.int64]

SEED = 20_261_120
RESULTS = Path(__file__).parent / "results" / "schedule.md"

# 8 billion parameters in the shape of Llama 3: a microbatch costs as much as 500 tokens besides its sequences.
COST = gpt_pack_cost(
    num_layers=32,
    hidden_size=4096,
    num_attention_heads=32,
    num_query_groups=8,
    kv_channels=128,
    ffn_hidden_size=14336,
    vocab_size=128256,
    swiglu=True,
)
MODES = {
    "dp": StepModel(),
    "pipeline of 8 stages": StepModel(num_stages=8),
    "sync": StepModel(ranks_meet=True),
}
PIPELINES = {
    "8 stages": StepModel(num_stages=8),
    "8 stages, interleaved twice": StepModel(num_stages=8, num_virtual_stages=2, stage_group=8),
}


def _lognormal(shortest: int, longest: int, mean: int, sigma: float) -> dict:
    return {
        "type": "lognormal",
        "min_seq_len": shortest,
        "max_seq_len": longest,
        "mean_seq_len": mean,
        "lognormal_sigma": sigma,
    }


DISTRIBUTIONS = {
    "lognormal 1K to 8K": _lognormal(1024, 8192, 4096, 1.1),
    "long tail to 128K": _lognormal(32, 131072, 4000, 1.4),
    "chat and long documents": {
        "type": "mixture",
        "components": [
            {"weight": 0.9, **_lognormal(16, 8192, 550, 0.8)},
            {"weight": 0.1, "type": "uniform", "min_seq_len": 16384, "max_seq_len": 65536},
        ],
    },
    "uniform to 8K": {"type": "uniform", "min_seq_len": 1, "max_seq_len": 8192},
    "constant": {"type": "constant", "seq_len": 4096},
    "one giant": {"type": "uniform", "min_seq_len": 16, "max_seq_len": 128},
    "shaped like chat": {"type": "empirical", "preset": "chat"},
    "shaped like long documents": {"type": "empirical", "preset": "long_documents"},
}
GIANT = 32768
MOST_FOR_DIFFERENCING = 8192
"""Sequences; more of them take minutes a call."""
MOST_SIMULATED = 512
"""Microbatches; of longer pipelines the ends matter little."""


def largest_differencing(values: list[int], num_parts: int) -> IntArray:
    """Karmarkar-Karp for `num_parts` parts: the part of each value.

    Again and again the two partitions whose sums differ most become one, the largest sums of one with the smallest of
    the other.
    """
    # A partition: its sums that are not 0, ascending, and the node that each is made of; nodes are values or pairs.
    pairs: list[tuple[int, int]] = []
    heap = [(-value, i, np.array([value], np.int64), np.array([i], np.int64)) for i, value in enumerate(values)]
    return _merged(heap, pairs, len(values), num_parts)


def largest_differencing_of_equal_counts(values: list[int], num_parts: int) -> IntArray:
    """The same with as many values in each part, or one less: partitions begin with one value in each part."""
    order = sorted(range(len(values)), key=lambda i: (values[i], i))
    heap = []
    for number, end in enumerate(range(len(order), 0, -num_parts)):
        members = np.array(order[max(end - num_parts, 0) : end], np.int64)
        sums = np.array([values[i] for i in members], np.int64)
        least = int(sums[0]) if members.size == num_parts else 0
        heap.append((least - int(sums[-1]), number, sums, members))
    return _merged(heap, [], len(values), num_parts)


def _merged(
    heap: list[tuple[int, int, IntArray, IntArray]], pairs: list[tuple[int, int]], num_values: int, num_parts: int
) -> IntArray:
    heapify(heap)
    number = num_values
    while len(heap) > 1:
        _, _, sums, nodes = heappop(heap)
        _, _, other_sums, other_nodes = heap[0]
        overlap = sums.size + other_sums.size - num_parts
        if overlap > 0:  # the smallest sums of one are joined by the largest of the other, and the other way round
            joined = np.arange(num_values + len(pairs), num_values + len(pairs) + overlap)
            pairs.extend(zip(nodes[:overlap].tolist(), other_nodes[:overlap][::-1].tolist()))
            both = sums[:overlap] + other_sums[:overlap][::-1]
            sums = np.concatenate((both, sums[overlap:], other_sums[overlap:]))
            nodes = np.concatenate((joined, nodes[overlap:], other_nodes[overlap:]))
        else:
            sums, nodes = np.concatenate((sums, other_sums)), np.concatenate((nodes, other_nodes))
        order = np.argsort(sums, kind="stable")
        sums, nodes = sums[order], nodes[order]
        least = int(sums[0]) if sums.size == num_parts else 0
        heapreplace(heap, (least - int(sums[-1]), number, sums, nodes))
        number += 1
    part_of = np.zeros(num_values + len(pairs), np.int64)
    if heap:
        part_of[heap[0][3]] = np.arange(heap[0][3].size)
    for node in range(len(pairs) - 1, -1, -1):
        part_of[list(pairs[node])] = part_of[num_values + node]
    return part_of[:num_values]


def first_fit_decreasing(request: ScheduleRequest) -> Schedule:
    """Packs by first-fit decreasing, dealt to ranks in turn."""
    pack = _first_fit_packs(request, request.work.length)
    return _schedule(request, pack % request.num_ranks, pack // request.num_ranks)


def differencing_by_cost(request: ScheduleRequest) -> Schedule:
    """Ranks by Karmarkar-Karp on costs, and each rank's microbatches by the same: capacity is only hoped for."""
    work, num_ranks = request.work, request.num_ranks
    rank = largest_differencing(work.cost.tolist(), num_ranks)
    tokens = np.bincount(rank, weights=work.length, minlength=num_ranks)
    num_microbatches = _rounded_up(int(-(-tokens.max() // request.capacity)), request)
    microbatch = np.zeros_like(rank)
    for number in range(num_ranks):
        mine = np.flatnonzero(rank == number)
        microbatch[mine] = largest_differencing(work.cost[mine].tolist(), num_microbatches)
    return _schedule(request, rank, microbatch)


def longest_processing_time(request: ScheduleRequest) -> Schedule:
    """Ranks by LPT on costs, and each rank's microbatches by first-fit decreasing."""
    work, num_ranks = request.work, request.num_ranks
    rank = placement.spread(work.cost, np.ones_like(work.cost), num_ranks=num_ranks, capacity=work.cost.size)
    assert rank is not None, "room for all"
    microbatch = np.zeros_like(rank)
    for number in range(num_ranks):
        mine = np.flatnonzero(rank == number)
        microbatch[mine] = _first_fit_packs(request, work.length[mine])
    return _schedule(request, rank, microbatch)


def packs_then_differencing(request: ScheduleRequest) -> Schedule:
    """Packs by first-fit decreasing, as many to each rank, by Karmarkar-Karp on their costs."""
    work, num_ranks = request.work, request.num_ranks
    pack = _first_fit_packs(request, work.length)
    num_packs = _rounded_up(-(-(int(pack.max()) + 1) // num_ranks), request) * num_ranks
    costs = np.bincount(pack, weights=work.cost, minlength=num_packs).astype(np.int64) + work.fixed
    rank_of_pack = largest_differencing_of_equal_counts(costs.tolist(), num_ranks)
    by_rank = np.lexsort((-costs, rank_of_pack))
    place = np.empty(num_packs, np.int64)
    place[by_rank] = np.arange(num_packs) % (num_packs // num_ranks)
    return _schedule(request, rank_of_pack[pack], place[pack])


CONTENDERS: dict[str, Scheduler] = {
    "default": default,
    "next-fit in arrival order, dealt in turn (dp_balanced)": SCHEDULERS["dp_balanced"],
    "first-fit decreasing, dealt in turn": first_fit_decreasing,
    "Karmarkar-Karp by cost": differencing_by_cost,
    "LPT by cost, then first-fit decreasing": longest_processing_time,
    "first-fit decreasing, then Karmarkar-Karp": packs_then_differencing,
}


def _first_fit_packs(request: ScheduleRequest, length: IntArray) -> IntArray:
    pack, _ = placement.first_fit(
        length, length, num_ranks=max(length.size, 1), capacity=request.capacity, limit=request.capacity
    )
    return pack


def _rounded_up(num_microbatches: int, request: ScheduleRequest) -> int:
    return max(1, -(-num_microbatches // request.microbatch_multiple)) * request.microbatch_multiple


def _schedule(request: ScheduleRequest, rank: IntArray, microbatch: IntArray, at_least: int = 1) -> Schedule:
    """From ranks and microbatches in the order of the work; as many empty packs as the multiple asks for."""
    order = request.work.order
    ranks, microbatches = np.empty_like(order), np.empty_like(order)
    ranks[order], microbatches[order] = rank, microbatch
    num_microbatches = max(_rounded_up(int(microbatch.max(initial=0)) + 1, request), at_least)
    return Schedule(ranks, microbatches, request.num_ranks, num_microbatches)


@dataclass(frozen=True, kw_only=True)
class Case:
    """One global batch."""

    distribution: str
    size: int
    num_ranks: int
    capacity_factor: int
    multiple: int

    def request(self, model: StepModel, seed: int = SEED) -> ScheduleRequest:
        """Sequences drawn in equal shares by all ranks."""
        numbers = [self.size, self.num_ranks, self.capacity_factor, self.multiple]
        rng = np.random.default_rng([seed, list(DISTRIBUTIONS).index(self.distribution), *numbers])
        lengths = parse_distribution(DISTRIBUTIONS[self.distribution]).quantile(rng.random(self.size))
        if self.distribution == "one giant":
            lengths[rng.integers(self.size)] = GIANT
        return ScheduleRequest(
            lengths=lengths,
            source_rank=np.arange(self.size) * self.num_ranks // self.size,
            source_draw=np.zeros(self.size, np.int64),
            num_ranks=self.num_ranks,
            num_draws=1,
            capacity=self.capacity_factor * int(lengths.max()),
            cost=COST,
            microbatch_multiple=math.lcm(self.multiple, model.stage_group),
            model=model,
        )


def cases(sizes: tuple[int, ...], ranks: tuple[int, ...], all_ways: bool) -> Iterator[Case]:
    """Batches of at least a sequence per rank: with `all_ways` those of up to 1,024 sequences at all capacities and
    multiples, the others at one in turn.
    """
    ways = [(factor, multiple) for factor in (1, 2) for multiple in (1, 4, 8)]
    number = 0
    for distribution in DISTRIBUTIONS:
        for size in sizes:
            for num_ranks in ranks:
                if num_ranks > size:
                    continue
                number += 1
                for factor, multiple in ways if size <= 1024 and all_ways else [ways[number % len(ways)]]:
                    yield Case(
                        distribution=distribution,
                        size=size,
                        num_ranks=num_ranks,
                        capacity_factor=factor,
                        multiple=multiple,
                    )


def unshaped(request: ScheduleRequest) -> Schedule:
    """What `default` finds for the flow shop: neither number nor order nor sizes of packs are chosen for 1F1B."""
    found = balance.search(request)[0]
    return _schedule(request, *np.divmod(found.pack, found.num_microbatches), found.num_microbatches)


@dataclass
class Record:
    """What one scheduler did in one mode."""

    ratios: list[float] = field(default_factory=list)
    """Of valid schedules."""
    num_invalid: int = 0

    def add(self, request: ScheduleRequest, schedule: Schedule) -> None:
        try:
            check_schedule(request, schedule)
        except ValueError:
            self.num_invalid += 1
            return
        costs = request.work.pack_costs(schedule.pack[request.work.order], request.num_ranks, schedule.num_microbatches)
        self.ratios.append(request.model.time_of(costs) / request.bound.time)

    def columns(self) -> list[str]:
        total = len(self.ratios) + self.num_invalid
        if not self.ratios:
            return ["-", "-", f"{self.num_invalid / total:.0%}"]
        return [f"{_mean(self.ratios):.4f}", f"{max(self.ratios):.3f}", f"{self.num_invalid / total:.1%}"]


def _mean(ratios: list[float]) -> float:
    """Geometric."""
    return math.exp(float(np.mean(np.log(ratios))))


def compare(all_cases: list[Case]) -> dict[tuple[str, str], Record]:
    """By mode and scheduler."""
    records: dict[tuple[str, str], Record] = defaultdict(Record)
    for number, case in enumerate(all_cases):
        print(f"\r{number + 1} of {len(all_cases)}", end="", file=sys.stderr, flush=True)
        made: dict[str, Schedule] = {}
        for mode, model in MODES.items():
            request = case.request(model)
            for name, scheduler in CONTENDERS.items():
                if scheduler is differencing_by_cost and case.size > MOST_FOR_DIFFERENCING:
                    continue
                # All but `default` know no modes. The flow shop, which bounds are for, gains nothing by uneven packs.
                if scheduler is default:
                    made[name] = unshaped(request)
                elif name not in made:
                    made[name] = scheduler(request)
                records[mode, name].add(request, made[name])
    print(file=sys.stderr)
    return records


def milliseconds(scheduler: Scheduler, model: StepModel, size: int, num_ranks: int, rounds: int) -> float:
    """Per call: the mean over distributions of the best of some rounds, sorting and the bound included."""
    best = []
    for distribution in DISTRIBUTIONS:
        case = Case(distribution=distribution, size=size, num_ranks=num_ranks, capacity_factor=1, multiple=1)
        request, seconds = case.request(model, SEED + 1), []
        for _ in range(rounds):
            fresh = dataclasses.replace(request)  # without the sorted work and the bound that the last one kept
            start = time.perf_counter()
            scheduler(fresh)
            seconds.append(time.perf_counter() - start)
        best.append(min(seconds))
    return 1e3 * float(np.mean(best))


@dataclass
class Simulated:
    """Simulated times of `default`'s schedules, over other times."""

    over_equal: list[float] = field(default_factory=list)
    """Over that of as many packs, equal and as costly in all; where sequences allow that."""
    over_unshaped: list[float] = field(default_factory=list)
    """Over that of the same schedules, their packs neither put in order nor resized."""


def simulate_1f1b(all_cases: list[Case], model: StepModel) -> Simulated:
    """Of all batches but those with pipelines too long to simulate."""
    found = Simulated()
    more = model.num_stages - 1
    for number, case in enumerate(all_cases):
        print(f"\rsimulating {number + 1} of {len(all_cases)}", end=" " * 20, file=sys.stderr, flush=True)
        request = case.request(model)
        schedule = default(request)
        num_microbatches = schedule.num_microbatches
        if num_microbatches > MOST_SIMULATED:
            continue
        costs, unshaped_costs = (
            request.work.pack_costs(made.pack[request.work.order], request.num_ranks, num_microbatches)
            for made in (schedule, unshaped(request))
        )
        took = model.simulated_time_of(costs)
        found.over_unshaped.append(took / model.simulated_time_of(unshaped_costs))
        # Times count `num_stages` times over. In the flow shop, which bounds are for, a chunk is a whole stage.
        mean = float(costs.mean())
        bounds = {entry.num_microbatches: entry.time for entry in request.bound.by_microbatches}
        if bounds.get(num_microbatches, math.inf) < 1.001 * mean * (num_microbatches + more):
            found.over_equal.append(took / (mean * (num_microbatches + more / model.num_virtual_stages)))
    return found


def report(quick: bool) -> str:
    """The tables, in Markdown."""
    sizes = (64, 256, 1024) if quick else (64, 256, 1024, 8192, 100_000)
    ranks = (1, 2, 8, 64) if quick else (1, 2, 8, 64, 512, 4096)
    timings = ((1024, 64), (8192, 512)) if quick else ((1024, 64), (8192, 512), (100_000, 4096))
    all_cases = list(cases(sizes, ranks, all_ways=not quick))
    records = compare(all_cases)
    lines = [
        f"{len(all_cases)} batches: N of {_listed(sizes)} on {_listed(ranks)} ranks, capacity 1 and 2 times "
        "the longest, microbatches a multiple of 1, 4 or 8."
    ]
    for mode, model in MODES.items():
        lines += ["", f"## {mode}", ""]
        columns = ["scheduler", "over the bound", "worst", "invalid"]
        columns += [f"ms, N={size:,} on {num_ranks:,}" for size, num_ranks in timings]
        lines += ["| " + " | ".join(columns) + " |", "|---" * len(columns) + "|"]
        for name, scheduler in CONTENDERS.items():
            speeds = []
            for size, num_ranks in timings:
                too_many = scheduler is differencing_by_cost and size > MOST_FOR_DIFFERENCING
                rounds = 1 if scheduler is differencing_by_cost else 5
                print(f"\rtiming {mode}, {name}, {size}", end=" " * 20, file=sys.stderr, flush=True)
                speed = math.nan if too_many else milliseconds(scheduler, model, size, num_ranks, rounds)
                speeds.append("-" if too_many else f"{speed:.1f}")
            lines.append("| " + " | ".join([name, *records[mode, name].columns(), *speeds]) + " |")
    lines += ["", "## 1F1B, simulated", ""]
    lines += ["| pipeline | over equal packs | batches | over the same unshaped | worst | batches |"]
    lines += ["|---|---|---|---|---|---|"]
    few = [case for case in all_cases if case.size <= 8192]
    for name, model in PIPELINES.items():
        found = simulate_1f1b(few, model)
        equal, unshaped = found.over_equal, found.over_unshaped
        columns = [name, f"{_mean(equal):.4f}", f"{len(equal)}", f"{_mean(unshaped):.4f}", f"{max(unshaped):.3f}"]
        lines.append("| " + " | ".join([*columns, f"{len(unshaped)}"]) + " |")
    print(file=sys.stderr)
    return "\n".join(lines)


NOTES = """\
Over the bound: geometric mean and worst of the modelled step time (megatron/packing/scheduling/step_time.py) over its
lower bound, of valid schedules, of pipelines as flow shops with `default` unshaped. Invalid: a pack over capacity.
Milliseconds: the best of five calls, mean over the eight distributions, sorting and the bound included; Karmarkar-
Karp by cost (numpy and Python) is called once, and left out above 8,192 sequences. Over equal packs: simulated time
of `default` over (microbatches + stages - 1) packs of the mean cost, with as many microbatches, in batches where the
bound allows equal packs. Unshaped: the same schedule, its packs neither put in order nor resized.
"""


def _listed(numbers: tuple[int, ...]) -> str:
    return ", ".join(f"{number:,}" for number in numbers)


def _where() -> str:
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True).stdout
    info = Path("/proc/cpuinfo")
    names = [line.split(":")[1].strip() for line in info.read_text().splitlines() if line.startswith("model name")]
    form = "compiled" if native.LIBRARY is not None else "not compiled"
    return (
        f"{datetime.date.today()}, commit {commit.strip()}, Python {platform.python_version()}, "
        f"numpy {np.__version__}, placement {form}, one core of {names[0] if names else platform.processor()}."
    )


def main() -> None:
    """Print the tables, and write them where the run is the full one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer and smaller batches; prints only")
    quick = parser.parse_args().quick
    command = "OMP_NUM_THREADS=1 python examples/benchmarks/schedule.py" + (" --quick" if quick else "")
    text = f"# Schedulers side by side\n\n{_where()}\n\n```\n{command}\n```\n\n{report(quick)}\n\n{NOTES}\n"
    print(text)
    if not quick:
        RESULTS.write_text(text)


if __name__ == "__main__":
    main()
