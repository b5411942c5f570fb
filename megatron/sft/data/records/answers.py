"""pure. Reads several answers to one prompt, and conversations that branch: paths of a tree.

    prompt or messages, + responses     each response is a continuation: text, a turn, or turns
    messages [turn, turn, [a, b]]       a list at the end has alternatives, each a turn or turns;
                                        an alternative may branch again at its end

A path is a whole conversation, from the first turn to the end of one answer. `[u, [a, b]]` has the
paths `[u, a]` and `[u, b]`. A turn that several paths share is trained in the first of them only,
so that each turn is trained once. `weights` scales the loss of each response.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from megatron.packing.quoting import shown
from megatron.sft.data.records.messages import Message, read_turns
from megatron.sft.data.records.values import SampleError, text_of, weight_of

MAX_LEVELS = 100
"""Maximum depth of branches within branches."""


class Keys(NamedTuple):
    """Further names of a turn's keys, by --data-columns."""

    role: str | None = None
    content: str | None = None


class Paths(NamedTuple):
    """Conversations with a common beginning, and the keys of their turns that were not read."""

    paths: list[list[Message]]
    unread: set[str]


def read_branches(turns: object, where: str, keys: Keys, level: int = 0) -> Paths:
    """Reads turns whose last entry may be a list of alternatives. Raises SampleError for any other
    value.

    level: number of branches on the way to these turns.
    """
    if level > MAX_LEVELS:
        raise SampleError(f"turns must branch at most {MAX_LEVELS} times, but {where:.60} do more")
    for number, turn in enumerate(turns[1:-1] if isinstance(turns, list) else (), 1):
        if isinstance(turn, list):
            raise SampleError(
                f"{where}[{number}] is a list of alternatives, which must be the last entry, but "
                "more follow; put what continues an alternative into a list with it"
            )
    has_branches = isinstance(turns, list) and len(turns) > 1 and isinstance(turns[-1], list)
    if not isinstance(turns, list) or not has_branches:
        messages, unread = read_turns(turns, where, *keys)
        return Paths([messages], unread)
    trunk, unread = read_turns(turns[:-1], where, *keys)
    return _behind(trunk, unread, turns[-1], f"{where}[{len(turns) - 1}]", keys, level + 1)


def read_responses(
    trunk: Sequence[Message], responses: object, weights: object, keys: Keys
) -> Paths:
    """Returns a path for each of `responses`: the turns of `trunk`, then the response, its loss
    scaled by its weight.
    """
    found = _behind(trunk, set(), _listed(responses), "responses", keys)
    factors = weights_of(weights, len(found.paths))
    size = len(trunk)
    for path in found.paths:
        if all(one.role != "assistant" for one in path[size:]):
            raise SampleError(
                f"each of responses must hold a turn of the assistant, but one is a turn of the "
                f"{path[size].role}, {shown(path[size].content)}; leave it out"
            )
    scaled = [
        [*path[:size], *(one._replace(weight=one.weight * factor) for one in path[size:])]
        for path, factor in zip(found.paths, factors)
    ]
    return Paths(scaled, found.unread)


def read_texts(responses: object) -> list[str]:
    """Returns the responses to a prompt of plain text, which must be plain text, too."""
    return [text_of(text, f"responses[{number}]") for number, text in enumerate(_listed(responses))]


def weights_of(weights: object, count: int) -> list[float]:
    """Returns the weight of each of `count` responses, 1 by default."""
    if weights is None:
        return [1.0] * count
    if not isinstance(weights, list) or len(weights) != count:
        raise SampleError(
            f"weights must be a list of one number per response ({count}), but is {shown(weights)}"
        )
    return [weight_of(weight, f"weights[{number}]") for number, weight in enumerate(weights)]


def _listed(responses: object) -> list[Any]:
    if isinstance(responses, Mapping):  # one turn, as a column of chosen answers has it
        return [responses]
    if not isinstance(responses, list):
        raise SampleError(
            f"responses must be a list of texts, turns or lists of turns, but is {shown(responses)}"
        )
    return responses


def _behind(
    trunk: Sequence[Message],
    unread: set[str],
    branches: Sequence[Any],
    where: str,
    keys: Keys,
    level: int = 1,
) -> Paths:
    """Returns the paths of alternatives: the turns of `trunk`, then one of `branches`. The trunk
    has weights in the first path only.
    """
    if not branches:
        raise SampleError(f"{where} must hold at least one answer, but is empty")
    paths: list[list[Message]] = []
    before = list(trunk)
    for number, branch in enumerate(branches):
        place = f"{where}[{number}]"
        if isinstance(branch, str):
            read = Paths([[Message("assistant", text_of(branch, place))]], set())
        elif isinstance(branch, list | Mapping):
            turns = branch if isinstance(branch, list) else [branch]
            read = read_branches(turns, place, keys, level)
        else:
            raise SampleError(f"{place} must be text, a turn or turns, but is {shown(branch)}")
        for path in read.paths:
            paths.append([*before, *path])
            before = [message._replace(weight=0.0) for message in trunk]
        unread = unread | read.unread
    return Paths(paths, unread)
