"""pure. Schedulers by name, as the command line has them; users add theirs as `module:function`.

Each keeps the invariants in the docstring of `problem`. Here are also the two that keep the order
of arrival and balance no cost: packs as the sampler made them (`empty`), or filled one after the
other as in Megatron-LM (`dp_balanced`).
"""

from __future__ import annotations

import difflib
import importlib
from heapq import heapify, heappop, heappush

import numpy as np
import numpy.typing as npt

from megatron.packing.quoting import shown
from megatron.packing.scheduling.default import default
from megatron.packing.scheduling.problem import (
    Schedule,
    Scheduler,
    ScheduleRequest,
    check_capacity,
    rounded_up,
)

IntArray = npt.NDArray[np.int64]


def empty(request: ScheduleRequest) -> Schedule:
    """Returns the schedule that the sampler has decided: each `next` of a rank is one of its packs.

    Packs keep the order of loading. Empty packs at the end make up `microbatch_multiple`. Raises
    CapacityError where a pack is over capacity.
    """
    num_microbatches = rounded_up(request.num_fetches, request.microbatch_multiple)
    schedule = Schedule(
        request.source_rank, request.source_fetch, request.num_ranks, num_microbatches
    )
    check_capacity(request, schedule)
    return schedule


def dp_balanced(request: ScheduleRequest) -> Schedule:
    """Fills packs in arrival order and deals them to ranks in turn, as Megatron-LM does.

    The name is Megatron-LM's. It balances the number of packs, not their cost: use `default` for
    that. A pack is closed by the first sequence that doesn't fit (next-fit). The pack with the most
    tokens is split in halves until the number of packs is a multiple of num_ranks *
    microbatch_multiple, so that one is empty only where there are fewer sequences than packs.
    """
    ends = np.cumsum(request.lengths)
    starts = []
    start = 0
    while start < ends.size:
        starts.append(start)
        # Lengths 4 4 4, capacity 9: ends 4 8 12, and the pack that starts at 0 stops before 12.
        full = ends[start] - request.lengths[start] + request.capacity
        start = int(np.searchsorted(ends, full, side="right"))
    num_packs = rounded_up(len(starts), request.num_ranks * request.microbatch_multiple)
    starts = _split_largest(starts, ends, num_packs)
    pack = np.searchsorted(starts, np.arange(ends.size), side="right") - 1
    return Schedule(
        pack % request.num_ranks,
        pack // request.num_ranks,
        request.num_ranks,
        num_packs // request.num_ranks,
    )


def _split_largest(starts: list[int], ends: IntArray, num_packs: int) -> list[int]:
    """Splits the packs with the most tokens in halves until there are `num_packs`.

    Returns the first sequence of each pack, ascending; fewer packs if sequences run out.

    Args:
        starts: first sequence of each pack.
        ends: number of tokens up to and with each sequence.
    """

    def entry(start: int, stop: int) -> tuple[int, int, int]:
        before = int(ends[start - 1]) if start else 0
        return before - int(ends[stop - 1]), start, stop

    splittable = [entry(a, b) for a, b in zip(starts, [*starts[1:], ends.size]) if b - a > 1]
    heapify(splittable)
    starts = list(starts)
    while len(starts) < num_packs and splittable:
        negative_tokens, start, stop = heappop(splittable)
        half = int(ends[stop - 1]) + negative_tokens // 2
        middle = min(max(int(np.searchsorted(ends, half)) + 1, start + 1), stop - 1)
        starts.append(middle)
        for piece in ((start, middle), (middle, stop)):
            if piece[1] - piece[0] > 1:
                heappush(splittable, entry(*piece))
    return sorted(starts)


SCHEDULERS: dict[str, Scheduler] = {"default": default, "empty": empty, "dp_balanced": dp_balanced}


def get_scheduler(name: str) -> Scheduler:
    """Returns the scheduler of that name, in any case, or the function of `module:function`.

    Raises ValueError with the choices for an unknown name, and with the cause for a module that
    can't be imported or has no such function.
    """
    if ":" in name:
        return _import(name)
    if name.lower() not in SCHEDULERS:
        close = difflib.get_close_matches(name, SCHEDULERS, n=1)
        hint = f"; did you mean {close[0]}?" if close else ""
        raise ValueError(
            f"--sequence-packing-scheduler must be one of {', '.join(SCHEDULERS)} "
            f"or module:function, but is {shown(name)}{hint}"
        )
    return SCHEDULERS[name.lower()]


def _import(name: str) -> Scheduler:
    module_name, _, function_name = name.partition(":")
    try:
        function = getattr(importlib.import_module(module_name), function_name)
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        raise ValueError(
            f"--sequence-packing-scheduler {shown(name)} can't be imported: {error}; "
            "give module:function, with the module on the Python path"
        ) from error
    except SystemExit as end:
        raise ValueError(
            f"--sequence-packing-scheduler {shown(name)} can't be imported: its module raises "
            f"SystemExit({end}); guard what it does as a program by if __name__ == '__main__'"
        ) from end
    if not callable(function):
        raise ValueError(
            f"--sequence-packing-scheduler {shown(name)} must be a function, but is {function!r}"
        )
    scheduler: Scheduler = function
    return scheduler
