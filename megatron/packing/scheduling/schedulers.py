"""pure. The schedulers that a name on the command line stands for; users add their own as `module:function`.

Every one keeps the invariants in the docstring of `schedule`. `default` and `dp_balanced` leave a pack empty only where
there are fewer sequences than packs.
"""

from __future__ import annotations

import difflib
import importlib
from heapq import heapify, heappop, heappush

import numpy as np
import numpy.typing as npt

from megatron.packing.scheduling.balance import default
from megatron.packing.scheduling.schedule import Schedule, Scheduler, ScheduleRequest, check_capacity

IntArray = npt.NDArray[np.int64]


def empty(request: ScheduleRequest) -> Schedule:
    """The sampler has decided: what a rank drew by one `next` is one pack of that rank, in the order drawn.

    Empty packs at the end make up `microbatch_multiple`. CapacityError where what was drawn together is over capacity.
    """
    num_microbatches = _rounded_up(request.num_draws * request.num_ranks, request) // request.num_ranks
    schedule = Schedule(request.source_rank, request.source_draw, request.num_ranks, num_microbatches)
    check_capacity(request, schedule)
    return schedule


def dp_balanced(request: ScheduleRequest) -> Schedule:
    """Packs are filled one after the other in arrival order and dealt to ranks in turn, as Megatron-LM does.

    The name is Megatron-LM's; it evens out the number of packs, not their cost: use `default` for that. A pack is
    closed by the first sequence that doesn't fit (next-fit). The pack with the most tokens is split in halves until
    the number of packs is a multiple of num_ranks * microbatch_multiple.
    """
    ends = np.cumsum(request.lengths)
    starts = []
    start = 0
    while start < ends.size:
        starts.append(start)
        start = int(np.searchsorted(ends, ends[start] - request.lengths[start] + request.capacity, side="right"))
    num_packs = _rounded_up(len(starts), request)
    starts = _split_largest(starts, ends, num_packs)
    pack = np.searchsorted(starts, np.arange(ends.size), side="right") - 1
    return Schedule(
        pack % request.num_ranks, pack // request.num_ranks, request.num_ranks, num_packs // request.num_ranks
    )


SCHEDULERS: dict[str, Scheduler] = {"default": default, "empty": empty, "dp_balanced": dp_balanced}


def get_scheduler(name: str) -> Scheduler:
    """The scheduler of that name in SCHEDULERS, or the function that `module:function` names.

    ValueError with the choices for an unknown name, and with the cause for a module that can't be imported or has no
    such function.
    """
    if ":" in name:
        return _import(name)
    if name not in SCHEDULERS:
        close = difflib.get_close_matches(name, SCHEDULERS, n=1)
        hint = f"; did you mean {close[0]}?" if close else ""
        raise ValueError(
            f"--sequence-packing-scheduler must be one of {', '.join(SCHEDULERS)} or module:function, "
            f"but is {name!r}{hint}"
        )
    return SCHEDULERS[name]


def _import(name: str) -> Scheduler:
    module_name, _, function_name = name.partition(":")
    try:
        function = getattr(importlib.import_module(module_name), function_name)
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        raise ValueError(
            f"--sequence-packing-scheduler {name!r} can't be imported: {error}; give module:function, with the module "
            "on the Python path"
        ) from error
    except SystemExit as end:
        raise ValueError(
            f"--sequence-packing-scheduler {name!r} can't be imported: its module raises SystemExit({end}); guard what "
            "it does as a program by if __name__ == '__main__'"
        ) from end
    if not callable(function):
        raise ValueError(f"--sequence-packing-scheduler {name!r} must be a function, but is {function!r}")
    scheduler: Scheduler = function
    return scheduler


def _split_largest(starts: list[int], ends: IntArray, num_packs: int) -> list[int]:
    """First sequences of `num_packs` packs of consecutive ones (fewer if sequences run out): `starts` and splits.

    `ends[i]` is the number of tokens up to and with sequence i. Ascending.
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


def _rounded_up(num_packs: int, request: ScheduleRequest) -> int:
    """`num_packs` raised to the next positive multiple of num_ranks * microbatch_multiple."""
    step = request.num_ranks * request.microbatch_multiple
    return max(1, -(-num_packs // step)) * step
