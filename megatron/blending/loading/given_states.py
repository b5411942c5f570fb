"""pure. States as they come back from where a user kept them, which may be damaged, or not all there."""

from collections.abc import Mapping
from typing import Any

from megatron.blending.loading.compact import expanded
from megatron.blending.loading.loader_state import VERSION, State

_FIELDS: Mapping[str, tuple[type, ...]] = {
    **dict.fromkeys("rank world_size num_lanes pass epoch_start slot count since".split(), (int,)),
    **dict.fromkeys("taken positions".split(), (list, tuple)),
    **dict.fromkeys("lanes stream".split(), (str,)),
    "is_over": (bool, int),
}


def checked_states(given: Any) -> list[State]:
    """Return what `load_state_dict` was given as a list; ValueError if it is damaged, or has two states of a rank."""
    states = [given] if isinstance(given, dict) else list(given) if isinstance(given, (list, tuple)) else []
    if not states or not all(isinstance(one, dict) and one.get("version") == VERSION for one in states):
        raise ValueError("load_state_dict takes what state_dict or save_state_rank gave, or a list of these")
    by_rank: dict[int, State] = {}
    for state in states:
        _check(state)
        # Equal ones come from processes that share the data, such as those of a tensor-parallel group.
        if by_rank.setdefault(state["rank"], state) != state:
            raise ValueError(
                f"there must be one state of each rank, but two that differ are of rank {state['rank']}; "
                "pass one, and give each data-parallel rank its own WorkerConfig(rank=...)"
            )
    return states


def _check(state: State) -> None:
    for name, kinds in _FIELDS.items():
        if name not in state:
            raise _damaged(f"it has no {name!r}")
        if not isinstance(state[name], kinds):
            raise _damaged(f"its {name!r} is {state[name]!r}")
    for name in ("lanes", "stream"):
        if not isinstance(expanded(state[name]), dict):
            raise _damaged(f"its {name!r} is not what was saved")


def _damaged(how: str) -> ValueError:
    return ValueError(f"this is no state of a loader, or a damaged one: {how}")
