"""pure. The state of a loader is ints, strings, lists and dicts; here states are checked, compared
and put together.

The state of a rank says which stream it is of, how many outputs were given, and for each part of
the stream (lane) which cells are left (cells.py) and which samples wait, by reference. Where
nothing was left out or packed, it is the same for any number of ranks and workers.
"""

import base64
import difflib
import json
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

from megatron.blending.arguments import shown
from megatron.blending.energon._loading.cells import CellState, dealt_again

State = dict[str, Any]

VERSION = 5
_LEVEL = 6
"""Level of deflate: numbers that are alike take about a byte each, at about 20 MB/s."""
_NAMES = (
    "rank world_size epoch given count is_over cells held counts positions stream checksum"
).split()


def check_stream(saved: State, now: State) -> None:
    """Raises ValueError that names the first difference between two streams."""
    if _without_names(saved) == _without_names(now):
        return
    if saved["seed"] != now["seed"]:
        raise ValueError(
            f"seed must be {saved['seed']} as in the saved state, but is {now['seed']}"
        )
    before, here = _by_place(saved), _by_place(now)
    _check_names([name for name, _, _ in before.values()], [name for name, _, _ in here.values()])
    _check_records(before, here)
    raise _differs("weights, batch sizes or the like changed")


def _check_names(names_before: list[str], names_here: list[str]) -> None:
    if sorted(names_before) == sorted(names_here) and names_before != names_here:
        raise _differs(
            "the sources are the same in another order: " + _moved(names_before, names_here)
        )
    for name in [*names_before, *names_here]:
        if names_before.count(name) > names_here.count(name):
            near = difflib.get_close_matches(name, names_here, 1)
            raise _differs(
                f"source {shown(name)} is missing"
                + (f"; was it renamed to {near[0]!r}?" if near else "")
            )
        if names_before.count(name) < names_here.count(name):
            raise _differs(f"source {shown(name)} was added")


def _check_records(before: Mapping[str, Any], here: Mapping[str, Any]) -> None:
    for place, (name, fingerprint, num_records) in before.items():
        if here.get(place, (name, fingerprint, num_records))[1:] != (fingerprint, num_records):
            records = here[place][2]
            same = "; or what its dataset.yaml says of them"
            counts = (
                same
                if records == num_records
                else f": it had {num_records} records and has {records}"
            )
            raise _differs(f"the data of {shown(name)} changed{counts}")


def merge_states(states: Sequence[State], rank: int, num_ranks: int) -> State:
    """Returns the state that a rank continues from: its own, or one made of those of all ranks of
    another number.

    ValueError if ranks are missing, or were saved at different points.
    """
    by_rank = {state["rank"]: state for state in states}
    first = states[0]
    for state in states:
        for name in ("world_size", "stream"):
            if state[name] != first[name]:
                raise ValueError(
                    f"states of different runs: {name} of rank {state['rank']} is not that of the "
                    "others"
                )
    if first["world_size"] == num_ranks and rank in by_rank:
        return dict(by_rank[rank])
    missing = [other for other in range(first["world_size"]) if other not in by_rank]
    if missing:
        raise ValueError(
            f"the state is of rank {first['rank']} of {first['world_size']}, but this is rank "
            f"{rank} of {num_ranks}; pass a list of the states of all ranks (missing: "
            f"{', '.join(map(str, missing)):.100})"
        )
    states = [by_rank[number] for number in range(first["world_size"])]
    _check_point(states)
    return {
        **states[0],
        "rank": rank,
        "world_size": num_ranks,
        "given": states[0]["given"] + sum(state["count"] for state in states),
        "count": 0,
        # Of data that continues, one rank may have noticed that an epoch is over. Finite data is
        # over when all have.
        "is_over": all(state["is_over"] for state in states)
        or (
            any(state["is_over"] for state in states)
            and len({state["count"] for state in states}) == 1
        ),
        "cells": [
            list(dealt_again([CellState(*state) for state in lane], rank, num_ranks))
            for lane in zip(*(state["cells"] for state in states))
        ],
        "held": _held_again([state["held"] for state in states], rank, num_ranks),
        "counts": _counts_again([state["counts"] for state in states], num_ranks),
    }


def _held_again(held: Sequence[dict[str, Any]], rank: int, num_ranks: int) -> dict[str, Any]:
    """Deals the samples that wait: neighbours stay together, so that most batches are whole."""
    dealt: dict[str, Any] = {}
    for name in {name for one in held for name in one}:
        numbers = {number for one in held for number in one.get(name, {})}
        for number in sorted(numbers):
            refs = [ref for one in held for ref in one.get(name, {}).get(number, [])]
            # 5 samples on 2 ranks: 0 1 and 2 3 4.
            own = refs[rank * len(refs) // num_ranks : (rank + 1) * len(refs) // num_ranks]
            if own:
                dealt.setdefault(name, {})[number] = own
    return dealt


def _counts_again(counts: Sequence[dict[str, Any]], num_ranks: int) -> dict[str, Any]:
    """Returns what ranks count: blends count a rank's own outputs, limits those of all before."""
    merged: dict[str, Any] = {}
    for name in {name for one in counts for name in one}:
        values = [one[name] for one in counts if name in one]
        kind, _, number = name.partition(" ")
        if kind == "blend":
            given = [sum(column) for column in zip(*(value["given"] for value in values))]
            over = set.intersection(*(set(value["over"]) for value in values))
            is_every = len(values) == len(counts)
            merged[name] = {
                "given": [count // num_ranks for count in given],
                "over": sorted(over) if is_every else [],
            }
        elif kind == "limit":
            before = f"before {number}"
            merged[before] = sum(values) + max(one.get(before, 0) for one in counts)
    return merged


def _check_point(states: Sequence[State]) -> None:
    """Raises ValueError if ranks gave different numbers of outputs, though they had more."""
    first = max(states, key=lambda state: state["count"])
    for state in states:
        is_same = all(state[name] == first[name] for name in ("epoch", "given"))
        if not is_same or (state["count"] != first["count"] and not state["is_over"]):
            raise ValueError(
                f"rank {first['rank']} was saved after {first['count']} outputs of pass "
                f"{first['epoch']}, rank {state['rank']} after {state['count']} of pass "
                f"{state['epoch']}; save all ranks at one point"
            )


def _without_names(stream: State) -> list[Any]:
    """Leaves out names, for data may be moved: its fingerprint tells that it is the same."""
    return [
        stream["seed"],
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
    return f"number {at} was {shown(before[at])} and is {shown(here[at])}"


def _differs(what: str) -> ValueError:
    return ValueError(
        f"the state was saved of another stream: {what}; go back to what it was, or "
        "on_change='remap'"
    )


def _as_states(given: object) -> list[State]:
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
    return states


def checked_states(given: object) -> list[State]:
    """Returns what `load_state_dict` was given as a list; ValueError if it is damaged, or has two
    states of a rank.
    """
    states = _as_states(given)
    for state in states:
        if state["version"] != VERSION:
            raise ValueError(
                f"the state is of version {shown(state['version'])}, but this release "
                "reads version "
                f"{VERSION}; continue with the release that saved it, or restart the data"
            )
    by_rank: dict[int, State] = {}
    for state in states:
        for name in _NAMES:
            if name not in state:
                raise _damaged(f"it has no {shown(name)}")
        if state["checksum"] != _checksum(state):
            raise _damaged("its checksum is another one")
        # Equal ones come from processes that share the data, such as those of a tensor-parallel
        # group.
        if by_rank.setdefault(state["rank"], state) != state:
            raise ValueError(
                "there must be one state of each rank, but two that differ are of rank "
                f"{state['rank']}; pass one, and give each data-parallel rank its own "
                "WorkerConfig(rank=...)"
            )
    return states


def with_checksum(state: State) -> State:
    """Returns a state as it is kept: plain lists, and a sum over all of it."""
    plain: State = json.loads(json.dumps(state))
    return {**plain, "checksum": _checksum(plain)}


def _checksum(state: State) -> int:
    rest = {name: value for name, value in state.items() if name != "checksum"}
    try:
        return zlib.crc32(json.dumps(rest, sort_keys=True).encode())
    except (TypeError, ValueError, RecursionError):
        return -1


def _damaged(how: str) -> ValueError:
    return ValueError(f"this is no state of a loader, or a damaged one: {how}")


def compact(value: object) -> str:
    """Returns a value of ints, strings, None, lists and dicts with strings as keys as text; tuples
    become lists.
    """
    return base64.b85encode(
        zlib.compress(json.dumps(value, separators=(",", ":")).encode(), _LEVEL)
    ).decode()


def expanded(text: str) -> Any:
    """Returns what `compact` made the text of; ValueError if it is not such a text, by its
    checksum."""
    try:
        return json.loads(zlib.decompress(base64.b85decode(text)))
    except (ValueError, zlib.error, RecursionError) as error:
        raise ValueError(f"this is no state of a loader, or a damaged one: {error}") from error
