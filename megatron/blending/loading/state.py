"""pure. The state of a loader is ints, strings, lists and dicts; here states are checked, compared
and put together.

The state of a stream says which output comes next and which stream it is; then, for shards that
left samples out or hold some back, where they stand. Where there are none, it is the same for any
number of ranks and workers.

At the end of finite data outputs may be missing, and ranks that drew as many stand at different
places. If others go on from there, it is from the first place on, and "taken" says what was drawn
behind it: rows of (base, next output of each rank), by which output k >= base was drawn if it is
below the next one of the rank whose it was. Worked example, of two ranks: [4, [10, 9]] says that
rank 0 drew 4, 6 and 8, and rank 1 drew 5 and 7.
"""

import difflib
import math
from collections.abc import Sequence
from typing import Any

from megatron.blending.loading.server import END
from megatron.blending.loading.state_form import State, check_form, expanded
from megatron.blending.streams.shard import ShardState

VERSION = 4


def check_stream(saved: State, now: State) -> None:
    """ValueError that names the first difference between two streams."""
    if _without_names(saved) == _without_names(now):
        return
    if saved["seed"] != now["seed"]:
        raise ValueError(
            f"seed must be {saved['seed']} as in the saved state, but is {now['seed']}"
        )
    before, here = _by_place(saved), _by_place(now)
    names_before = [name for name, _, _ in before.values()]
    names_here = [name for name, _, _ in here.values()]
    if sorted(names_before) == sorted(names_here) and names_before != names_here:
        raise _differs(
            "the sources are the same in another order: " + _moved(names_before, names_here)
        )
    for name in [*names_before, *names_here]:
        if names_before.count(name) > names_here.count(name):
            near = difflib.get_close_matches(name, names_here, 1)
            raise _differs(
                f"source {name!r} is gone" + (f"; did {near[0]!r} take its place?" if near else "")
            )
        if names_before.count(name) < names_here.count(name):
            raise _differs(f"source {name!r} was added")
    for place, (name, fingerprint, num_records) in before.items():
        if here.get(place, (name, fingerprint, num_records))[1:] != (fingerprint, num_records):
            records = here[place][2]
            same = "; or what its dataset.yaml says of them"
            counts = (
                same
                if records == num_records
                else f": it had {num_records} records and has {records}"
            )
            raise _differs(f"the data of {name!r} changed{counts}")
    raise _differs("weights, batch sizes or the like changed")


def merge_states(states: Sequence[State], rank: int, num_ranks: int) -> State:
    """Return the state that a rank continues from: its own, or one made of those of all ranks of
    another number.

    ValueError if ranks are missing, or were saved at different points.
    """
    states = [
        {
            **state,
            "shards": {int(number): shard for number, shard in expanded(state["shards"]).items()},
        }
        for state in states
    ]
    by_rank = {state["rank"]: state for state in states}
    first = states[0]
    for state in states:
        for name in ("version", "world_size", "num_shards", "stream"):
            if state[name] != first[name]:
                raise ValueError(
                    f"states of different runs: {name} of rank {state['rank']} is not that of the "
                    "others"
                )
    if first["world_size"] == num_ranks and rank in by_rank:
        state = by_rank[rank]
        here = _turn(state)
        shared = [
            other["shards"]
            for other in states
            if other["pass"] == state["pass"] and _turn(other) <= here
        ]
        return {**state, "shards": _latest(shared)}
    missing = [other for other in range(first["world_size"]) if other not in by_rank]
    if missing:
        raise ValueError(
            f"the state is of rank {first['rank']} of {first['world_size']}, but this is rank "
            f"{rank} of {num_ranks}; pass a list of the states of all ranks (missing: "
            f"{', '.join(map(str, missing)):.100})"
        )
    states = [by_rank[number] for number in range(first["world_size"])]
    _check_point(states)
    base = min(map(_turn, states))
    taken = [
        list(row)
        for row in {(row[0], *row[1]): row for state in states for row in state["taken"]}.values()
    ]
    if any(_turn(state) != base for state in states):
        taken.append([base, [state["slot"] for state in states]])
    # Of data that goes on, the furthest has noticed that an epoch is over; finite data is over when
    # all have.
    lead = max(
        states, key=lambda state: (state["epoch_start"], state["is_over"] and state["slot"] < END)
    )
    return {
        **lead,
        "rank": rank,
        "slot": base + rank,
        "count": sum(state["count"] for state in states) // num_ranks,
        "since": min(base, *(state["since"] for state in states)),
        "taken": taken,
        "is_over": base >= END or (lead["is_over"] and lead["slot"] < END),
        "shards": _shards_before_all(states, base),
    }


def is_taken(taken: Sequence[Any], slot: int) -> bool:
    return any(slot < following[(slot - base) % len(following)] for base, following in taken)


def _turn(state: State) -> int:
    """Return the next output of rank 0, if it drew as many; END, and only then, if finite data is
    over.
    """
    return state["slot"] - state["rank"]


def _check_point(states: Sequence[State]) -> None:
    """ValueError if the ranks did not draw as many, but for those that had no more."""
    first = max(states, key=lambda state: state["slot"] < END)
    for state in states:
        is_beyond = _turn(first) != END and _turn(state) == END and state["count"] <= first["count"]
        is_there = (
            state["count"] == first["count"]
            and (_turn(state) - _turn(first)) % state["world_size"] == 0
        )
        are_over = _turn(first) == _turn(state) == END
        if state["pass"] != first["pass"] or not (is_there or is_beyond or are_over):
            raise ValueError(
                f"rank {first['rank']} was saved after {first['count']} outputs of pass "
                f"{first['pass']}, rank {state['rank']} after {state['count']} of pass "
                f"{state['pass']}; save all ranks at one point"
            )


def _shards_before_all(states: Sequence[State], base: int) -> dict[int, ShardState]:
    """Return each shard as the hindmost of the ranks that run it left it: the others make some
    outputs again.
    """
    num_shards, num_ranks = states[0]["num_shards"], len(states)
    step = math.gcd(num_shards, num_ranks)
    merged: dict[int, ShardState] = {}
    # Shards of one residue are run by the same ranks.
    for residue in range(step):
        ranks = range((residue - base) % step, num_ranks, step)
        limit = min(_turn(states[rank]) for rank in ranks)
        at_limit = [states[rank]["shards"] for rank in ranks if _turn(states[rank]) == limit]
        merged.update({n: shard for n, shard in _latest(at_limit).items() if n % step == residue})
    return merged


def _latest(shards: Sequence[dict[int, ShardState]]) -> dict[int, ShardState]:
    """Return of each shard the state that has come furthest; where shards are shared, some servers
    run behind.
    """
    merged: dict[int, ShardState] = {}
    for part in shards:
        for number, state in part.items():
            if number not in merged or merged[number][:2] < state[:2]:
                merged[number] = state
    return merged


def _without_names(stream: State) -> list[Any]:
    """Leave out names, for data may be moved: its fingerprint tells that it is the same."""
    return [
        stream["seed"],
        stream["block_length"],
        stream["shape"],
        [row[1:4] for row in stream["sources"]],
    ]


def _by_place(stream: State) -> dict[str, tuple[str, str, int]]:
    return {
        place: (stream["folder"] + name, fingerprint, num_records)
        for name, fingerprint, num_records, place, *_ in stream["sources"]
    }


def _moved(before: Sequence[str], here: Sequence[str]) -> str:
    at = next(at for at, (old, new) in enumerate(zip(before, here)) if old != new)
    return f"number {at} was {before[at]!r} and is {here[at]!r}"


def _differs(what: str) -> ValueError:
    return ValueError(
        f"the state was saved of another stream: {what}; go back to what it was, or "
        "on_change='remap'"
    )


def checked_states(given: object) -> list[State]:
    """Return what `load_state_dict` was given as a list; ValueError if it is damaged, or has two
    states of a rank.
    """
    states = (
        [given]
        if isinstance(given, dict)
        else list(given)
        if isinstance(given, (list, tuple))
        else []
    )
    if not states or not all(isinstance(one, dict) and "version" in one for one in states):
        raise ValueError(
            "load_state_dict takes what state_dict or save_state_rank gave, or a list of these"
        )
    for state in states:
        if state["version"] != VERSION:
            raise ValueError(
                f"the state is of version {state['version']!r:.20}, but this release reads version "
                f"{VERSION}; continue with the release that saved it, or begin the data again"
            )
    by_rank: dict[int, State] = {}
    for state in states:
        check_form(state)
        # Equal ones come from processes that share the data, such as those of a tensor-parallel
        # group.
        if by_rank.setdefault(state["rank"], state) != state:
            raise ValueError(
                "there must be one state of each rank, but two that differ are of rank "
                f"{state['rank']}; pass one, and give each data-parallel rank its own "
                "WorkerConfig(rank=...)"
            )
    return states
