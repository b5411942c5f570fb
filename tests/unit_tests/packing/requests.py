"""Requests to schedulers: by hand and at random."""

import numpy as np
import numpy.typing as npt
from hypothesis import strategies as st

from megatron.packing.scheduling.cost import PackCost
from megatron.packing.scheduling.problem import Schedule, ScheduleRequest
from megatron.packing.scheduling.step_time import StepModel

IntArray = npt.NDArray[np.int64]

COST = PackCost(linear=1.0, quadratic=1 / 8192)
MODELS = (
    StepModel(),
    StepModel(num_stages=2),
    StepModel(num_stages=5),
    StepModel(num_stages=3, shares=(0.2, 0.3, 0.5)),
    StepModel(num_stages=2, num_virtual_stages=3, stage_group=2),
    StepModel(sync_every_microbatch=True),
    StepModel(num_stages=3, sync_every_microbatch=True),
)

DISTRIBUTIONS = {
    "lognormal": lambda rng, n: np.clip(np.exp(rng.normal(8.2, 0.6, n)), 1024, 8192),
    "long tail": lambda rng, n: np.clip(np.exp(rng.normal(6.5, 1.5, n)), 16, 131072),
    "chat and documents": lambda rng, n: np.where(
        rng.random(n) < 0.9,
        np.clip(np.exp(rng.normal(6, 0.8, n)), 16, 8192),
        rng.uniform(16384, 65536, n),
    ),
    "uniform": lambda rng, n: rng.integers(1, 8193, n),
    "constant": lambda rng, n: np.full(n, 1000),
    "one giant": lambda rng, n: np.append(rng.integers(16, 512, n - 1), 65536),
}


def lengths_of(distribution: str, rng, n: int) -> IntArray:
    """`n` lengths of a sort that batches are made of."""
    return DISTRIBUTIONS[distribution](rng, n).astype(np.int64)


def request(
    lengths,
    num_ranks: int,
    capacity: int,
    *,
    microbatch_multiple: int = 1,
    per_fetch: int = 1,
    cost: PackCost = COST,
    model: StepModel | None = None,
    loss_tokens=None,
    payload_costs=None,
) -> ScheduleRequest:
    """Sequences dealt to source ranks in equal shares, `per_fetch` of them by each `next`."""
    n = len(lengths)
    per_rank = -(-n // num_ranks)
    position = np.arange(n) % max(per_rank, 1)
    return ScheduleRequest(
        lengths=np.array(lengths, np.int64),
        source_rank=np.arange(n) // max(per_rank, 1),
        source_fetch=position // per_fetch,
        loss_tokens=None if loss_tokens is None else np.array(loss_tokens, np.int64),
        payload_costs=None if payload_costs is None else np.array(payload_costs, np.float64),
        num_ranks=num_ranks,
        num_fetches=-(-per_rank // per_fetch),
        capacity=capacity,
        cost=cost,
        microbatch_multiple=microbatch_multiple,
        model=model or StepModel(),
    )


@st.composite
def requests(draw, *, models=MODELS[:1], whole_fetches_fit=False):
    """Odd ones: no sequence, fewer than ranks, all as long as the capacity, a capacity of 1, any
    fixed cost.
    """
    model = draw(st.sampled_from(models))
    capacity = draw(st.integers(1, 60))
    longest = draw(st.integers(1, capacity))
    lengths = draw(st.lists(st.integers(1, longest) | st.just(longest), max_size=40))
    per_fetch = draw(st.integers(1, 3))
    return request(
        lengths,
        draw(st.integers(1, 9)),
        capacity * per_fetch if whole_fetches_fit else capacity,
        microbatch_multiple=draw(st.integers(1, 4)) * model.stage_group,
        per_fetch=per_fetch,
        cost=PackCost(
            1.0,
            draw(st.sampled_from([0.0, 1 / 64, 3.0])),
            draw(st.sampled_from([0.0, 0.3, 10.0, 1e6])),
            draw(st.sampled_from([0.0, 0.25, 0.99])),
        ),
        model=model,
        loss_tokens=[draw(st.integers(0, length)) for length in lengths],
        payload_costs=draw(st.none() | payload_costs_of(len(lengths))),
    )


def payload_costs_of(num_sequences: int) -> st.SearchStrategy[list[float]]:
    """Of text without images, and of short texts with costly ones."""
    costs = st.sampled_from([0.0, 0.0, 1.0, 7.5, 400.0])
    return st.lists(costs, min_size=num_sequences, max_size=num_sequences)


def packs(schedule: Schedule) -> list[list[list[int]]]:
    """Of each rank, each microbatch's sequences, ascending."""
    count = schedule.num_microbatches
    return [
        [np.flatnonzero(schedule.pack == rank * count + each).tolist() for each in range(count)]
        for rank in range(schedule.num_ranks)
    ]
