"""pure. What a saved loader is, in ints, strings, lists and dicts: how it is made, compared and put together.

The state of a stream says which output comes next and which stream it is; then, for lanes that left samples out or hold
some back, where they stand. Where there are none, it is the same for any number of ranks and workers.

At the end of finite data outputs may be missing, and ranks that drew as many stand at different places. If others go
on from there, it is from the first place on, and "taken" says what was drawn behind it: rows of (base, next output of
each rank), by which output k >= base was drawn if it is below the next one of the rank whose it was.
"""

import difflib
import hashlib
import itertools
import json
import math
import os
from collections.abc import Sequence
from typing import Any

from megatron.blending.loading.compact import expanded
from megatron.blending.loading.server import END
from megatron.blending.streams.choice import BlendDataset
from megatron.blending.streams.node import Binding, SavableDataset
from megatron.blending.streams.sample_buffer import BufferDataset
from megatron.blending.streams.shard import block_length
from megatron.blending.streams.source import SourceDataset

VERSION = 4

State = dict[str, Any]


def describe_stream(root: SavableDataset[Any], binding: Binding) -> State:
    """Return what makes the stream of a bound tree what it is, apart from the number of lanes.

    Of each source: name, fingerprint, number of records, place, the place that its order is of, where it began.
    """
    leaves = leaves_of(root)
    names = [leaf.name for leaf in leaves]
    # All of the path that they share, but for the last letters of a folder's name.
    folder = os.path.commonprefix(names)  # noqa: RUF071
    folder = folder[: folder.rfind("/") + 1]
    return {
        "seed": binding.seed,
        "block_length": block_length(root),
        "changes": [list(change) for change in binding.changes],
        "shape": _digest([[node.number, node.end, node.signature()] for node in binding.nodes]),
        "folder": folder,
        "sources": [
            [name[len(folder) :], leaf.fingerprint()[:16], leaf.order.num_records, leaf.place, leaf.salt, leaf.base]
            for name, leaf in zip(names, leaves)
        ],
    }


def leaf_positions(root: SavableDataset[Any], position: int, drawn: dict[int, int]) -> list[int]:
    """Return how many records of each source the first outputs were made of: exact, but for what lanes left out."""
    if isinstance(root, SourceDataset):
        return [root.base + position]
    used = root.used(position, drawn)
    return [found for child, count in zip(root.children, used) for found in leaf_positions(child, count, drawn)]


def position_of_blend(root: SavableDataset[Any], place: str, position: int, drawn: dict[int, int]) -> int:
    """Return how many outputs of the blend at a place the first outputs of the stream are made of."""
    if isinstance(root, BlendDataset) and root.place == place:
        return position
    child = _towards(root, place)
    if child is None:
        raise ValueError(f"there is no blend at place {place!r}; the outermost one is at ''")
    return position_of_blend(root.children[child], place, root.used(position, drawn)[child], drawn)


def is_below_buffers(root: SavableDataset[Any], place: str) -> bool:
    """Whether outputs of the blend at a place are held back on their way, so that no arithmetic tells how many."""
    if isinstance(root, BlendDataset) and root.place == place:
        return False
    child = _towards(root, place)
    return isinstance(root, BufferDataset) or (child is not None and is_below_buffers(root.children[child], place))


def total_drawn(lanes: dict[str, Any], num_lanes: int, binding: Binding) -> dict[int, int]:
    """Return about how many samples each node that holds some back drew, over all lanes, from the states of some."""
    drawn: dict[int, int] = {}
    for state in lanes.values():
        for number, held in state[3:]:
            if isinstance(binding.nodes[number], BufferDataset):
                drawn[number] = drawn.get(number, 0) + held[0]
    return {number: count * num_lanes // len(lanes) for number, count in drawn.items()}


def remapped(state: State, now: State) -> tuple[dict[str, str], dict[str, int], str]:
    """Return for a changed stream: by place of each source the place that its order is of, and where it goes on.

    Sources are recognised by name, those of one name by their order. The text says what became of them.
    """
    before: dict[str, list[tuple[str, int]]] = {}
    for row, position in zip(state["stream"]["sources"], state["positions"]):
        before.setdefault(state["stream"]["folder"] + row[0], []).append((row[4], position))
    num_before = sum(map(len, before.values()))
    taken = {salt for known in before.values() for salt, _ in known}
    salts: dict[str, str] = {}
    bases: dict[str, int] = {}
    for name, _, _, place, *_ in now["sources"]:
        if before.get(now["folder"] + name):
            salts[place], bases[place] = before[now["folder"] + name].pop(0)
            continue
        salts[place] = next(salt for n in itertools.count() if (salt := place + "+" * n) not in taken)
        taken.add(salts[place])
    told = f"{len(bases)} sources go on, {len(now['sources']) - len(bases)} are new, {num_before - len(bases)} are gone"
    if state["lanes"]:
        told += f"; what {len(state['lanes'])} lanes held back or left out is given up"
    return salts, bases, told


def check_stream(saved: State, now: State) -> None:
    """ValueError that names the first difference between two streams."""
    if _without_names(saved) == _without_names(now):
        return
    if saved["seed"] != now["seed"]:
        raise ValueError(f"seed must be {saved['seed']} as in the saved state, but is {now['seed']}")
    before, here = _by_place(saved), _by_place(now)
    names_before = [name for name, _, _ in before.values()]
    names_here = [name for name, _, _ in here.values()]
    if sorted(names_before) == sorted(names_here) and names_before != names_here:
        raise _differs("the sources are the same in another order: " + _moved(names_before, names_here))
    for name in [*names_before, *names_here]:
        if names_before.count(name) > names_here.count(name):
            near = difflib.get_close_matches(name, names_here, 1)
            raise _differs(f"source {name!r} is gone" + (f"; did {near[0]!r} take its place?" if near else ""))
        if names_before.count(name) < names_here.count(name):
            raise _differs(f"source {name!r} was added")
    for place, (name, fingerprint, num_records) in before.items():
        if here.get(place, (name, fingerprint, num_records))[1:] != (fingerprint, num_records):
            records = here[place][2]
            counts = "" if records == num_records else f": it had {num_records} records and has {records}"
            raise _differs(f"the data of {name!r} changed{counts}")
    raise _differs("weights, batch sizes or the like changed")


def merge_states(states: Sequence[State], rank: int, num_ranks: int) -> State:
    """Return the state that a rank continues from: its own, or one made of those of all ranks of another number.

    ValueError if ranks are missing, or were saved at different points.
    """
    states = [{**state, "lanes": expanded(state["lanes"])} for state in states]
    by_rank = {state["rank"]: state for state in states}
    first = states[0]
    for state in states:
        for name in ("version", "world_size", "num_lanes", "stream"):
            if state[name] != first[name]:
                raise ValueError(f"states of different runs: {name} of rank {state['rank']} is not that of the others")
    if first["world_size"] == num_ranks and rank in by_rank:
        state = by_rank[rank]
        here = _turn(state)
        shared = [other["lanes"] for other in states if other["pass"] == state["pass"] and _turn(other) <= here]
        return {**state, "lanes": _latest(shared)}
    missing = [other for other in range(first["world_size"]) if other not in by_rank]
    if missing:
        raise ValueError(
            f"the state is of rank {first['rank']} of {first['world_size']}, but this is rank {rank} of {num_ranks}; "
            f"pass a list of the states of all ranks (missing: {', '.join(map(str, missing))})"
        )
    states = [by_rank[number] for number in range(first["world_size"])]
    _check_point(states)
    base = min(map(_turn, states))
    taken = [list(row) for row in {(row[0], *row[1]): row for state in states for row in state["taken"]}.values()]
    if any(_turn(state) != base for state in states):
        taken.append([base, [state["slot"] for state in states]])
    # Of data that goes on, the furthest has noticed that an epoch is over; finite data is over when all have.
    lead = max(states, key=lambda state: (state["epoch_start"], state["is_over"] and state["slot"] < END))
    return {
        **lead,
        "rank": rank,
        "slot": base + rank,
        "count": sum(state["count"] for state in states) // num_ranks,
        "since": min(base, *(state["since"] for state in states)),
        "taken": taken,
        "is_over": base >= END or (lead["is_over"] and lead["slot"] < END),
        "lanes": _lanes_before_all(states, base),
    }


def is_taken(taken: Sequence[Any], slot: int) -> bool:
    return any(slot < following[(slot - base) % len(following)] for base, following in taken)


def leaves_of(root: SavableDataset[Any]) -> list[SourceDataset]:
    if isinstance(root, SourceDataset):
        return [root]
    return [leaf for child in root.children for leaf in leaves_of(child)]


def _towards(root: SavableDataset[Any], place: str) -> int | None:
    """Number of the child that stands on the way to a place."""
    # Of a node with one child both may have the same place.
    on_the_way = (not child.place or (place + ".").startswith(child.place + ".") for child in root.children)
    return next((number for number, is_there in enumerate(on_the_way) if is_there), None)


def _turn(state: State) -> int:
    """The next output of rank 0, if it drew as many; END, and only then, if finite data is over."""
    return state["slot"] - state["rank"]


def _check_point(states: Sequence[State]) -> None:
    """ValueError if the ranks did not draw as many, but for those that had no more."""
    first = max(states, key=lambda state: state["slot"] < END)
    for state in states:
        is_beyond = _turn(first) != END and _turn(state) == END and state["count"] <= first["count"]
        is_there = state["count"] == first["count"] and (_turn(state) - _turn(first)) % state["world_size"] == 0
        are_over = _turn(first) == _turn(state) == END
        if state["pass"] != first["pass"] or not (is_there or is_beyond or are_over):
            raise ValueError(
                f"rank {first['rank']} was saved after {first['count']} outputs of pass {first['pass']}, rank "
                f"{state['rank']} after {state['count']} of pass {state['pass']}; save all ranks at one point"
            )


def _lanes_before_all(states: Sequence[State], base: int) -> dict[str, Any]:
    """The state of each lane where the hindmost of the ranks that run it stands: the others make some outputs again."""
    num_lanes, num_ranks = states[0]["num_lanes"], len(states)
    step = math.gcd(num_lanes, num_ranks)
    merged: dict[str, Any] = {}
    # Lanes of one residue are run by the same ranks.
    for residue in range(step):
        ranks = range((residue - base) % step, num_ranks, step)
        limit = min(_turn(states[rank]) for rank in ranks)
        at_limit = [states[rank]["lanes"] for rank in ranks if _turn(states[rank]) == limit]
        merged.update({n: lane for n, lane in _latest(at_limit).items() if int(n) % step == residue})
    return merged


def _latest(lanes: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Of each lane the state that has come furthest; where lanes are shared, some servers run behind."""
    merged: dict[str, Any] = {}
    for part in lanes:
        for number, state in part.items():
            if number not in merged or merged[number][:2] < state[:2]:
                merged[number] = state
    return merged


def _without_names(stream: State) -> list[Any]:
    """Data may be moved: its fingerprint tells that it is the same."""
    return [stream["seed"], stream["block_length"], stream["shape"], [row[1:4] for row in stream["sources"]]]


def _by_place(stream: State) -> dict[str, tuple[str, str, int]]:
    return {
        place: (stream["folder"] + name, fingerprint, num_records)
        for name, fingerprint, num_records, place, *_ in stream["sources"]
    }


def _moved(before: Sequence[str], here: Sequence[str]) -> str:
    at = next(at for at, (old, new) in enumerate(zip(before, here)) if old != new)
    return f"number {at} was {before[at]!r} and is {here[at]!r}"


def _differs(what: str) -> ValueError:
    return ValueError(f"the state was saved of another stream: {what}; go back to what it was, or on_change='remap'")


def _digest(value: Any) -> str:
    return hashlib.blake2b(json.dumps(value, default=str).encode(), digest_size=16).hexdigest()
