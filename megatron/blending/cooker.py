"""pure. From the parts of a crude record to a sample: which of an encoder's cookers, and how it is called."""

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron.blending.stateless import with_seeds


@dataclass(frozen=True)
class Cooker:
    """A function from CrudeSample to a sample, for the sources that have all of `has_subflavors`.

    Called `cook(sample, **aux)` with the stores that the metadataset names, and with `cache=`, `primary=` on request.
    """

    cook: Callable[..., Any]
    has_subflavors: Mapping[str, Any] | None = None
    need_cache: bool = False
    need_primary: bool = False

    def __post_init__(self) -> None:
        if not callable(self.cook):
            raise ValueError(f"Cooker: cook must be a function, but is {self.cook!r}")
        if self.has_subflavors is not None and not isinstance(self.has_subflavors, Mapping):
            raise ValueError(f"Cooker: has_subflavors must be a dict, but is {self.has_subflavors!r}")

    def is_match(self, subflavors: Mapping[str, Any]) -> bool:
        """Whether the source has every subflavor that is asked for, with the same value."""
        asked = self.has_subflavors or {}
        return all(key in subflavors and subflavors[key] == value for key, value in asked.items())


class DirectCache:
    """What a cooker with `need_cache` is given: it reads at once and keeps nothing."""

    def get(self, store: Any, name: str, sample: Any = None) -> Any:
        return store[name]

    def get_lazy(self, store: Any, name: str) -> "Lazy":
        return Lazy(store, name)


@dataclass(frozen=True)
class Lazy:
    """A file of a store that is read when asked for."""

    store: Any
    fname: str

    def get(self, sample: Any = None) -> Any:
        return self.store[self.fname]


def choose_cook(
    cookers: Sequence[Cooker], subflavors: Mapping[str, Any], stores: Mapping[str, Any], primary: Any, where: str
) -> Callable[[Any], Any] | None:
    """Return the function from crude sample to sample for a source, or None if the encoder has no cookers at all.

    The first cooker that matches; ValueError, starting with `where`, if none does.
    """
    for cooker in cookers:
        if cooker.is_match(subflavors):
            extra = dict(stores)
            if cooker.need_cache:
                extra["cache"] = DirectCache()
            if cooker.need_primary:
                extra["primary"] = primary
            cook = with_seeds(cooker.cook)
            return functools.partial(cook, **extra) if extra else cook
    if not cookers:
        return None
    asked = " or ".join(str(dict(cooker.has_subflavors or {})) for cooker in cookers)
    raise ValueError(
        f"{where}: no cooker is for its subflavors {dict(subflavors)}; those of the task encoder ask for {asked}"
    )
