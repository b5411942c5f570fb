"""pure. A cooker makes a sample of the parts of a crude record; here it is chosen and called."""

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from megatron.blending.arguments import check_function

T = TypeVar("T")

DECODE: Any = "decode"
"""The default `decoder`: parts become what their names say (text, JSON, arrays, images). None
leaves them bytes.
"""


class Reader(Protocol):
    """Says how records become samples; a task encoder is one."""

    @property
    def cookers(self) -> "Sequence[Cooker]": ...
    @property
    def decoder(self) -> Any: ...


class PlainReader:
    """Leaves samples as the data says they are."""

    cookers: "Sequence[Cooker]" = ()
    decoder: Any = DECODE


@dataclass(frozen=True)
class Cooker:
    """Makes samples of CrudeSamples, for the sources that have all of `has_subflavors`.

    Called `cook(sample, **aux)` with the stores that the metadataset names, and with what `cooker`
    asks for.
    """

    cook: Callable[..., Any]
    has_subflavors: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        check_function("Cooker: cook", self.cook)
        if self.has_subflavors is not None and not isinstance(self.has_subflavors, Mapping):
            raise ValueError(
                f"Cooker: has_subflavors must be a dict, but is {self.has_subflavors!r}"
            )

    def is_match(self, subflavors: Mapping[str, Any]) -> bool:
        """Returns whether the source has every subflavor that is asked for, with the same value."""
        asked = self.has_subflavors or {}
        return all(key in subflavors and subflavors[key] == value for key, value in asked.items())


def cooker(function: Any = None, *, need_cache: bool = False, need_primary: bool = False) -> Any:
    """Asks for more arguments of a cook function: `cache`, which reads stores, and `primary`, its
    own source by name.
    """
    if function is None:
        return functools.partial(cooker, need_cache=need_cache, need_primary=need_primary)
    function.__need_cache__ = need_cache
    function.__need_primary__ = need_primary
    return function


class DirectCache:
    """A DirectCache reads at once and keeps nothing: the operating system keeps what was read."""

    def get(self, store: Any, name: str, sample: object = None) -> Any:
        return store.get(name, sample)

    def get_lazy(self, store: object, name: str) -> "Lazy":
        return Lazy(store, name)

    def to_cache(self, data: object, name: str) -> "Lazy":
        """Returns a Lazy of data that was made. It holds the data itself, as there is no cache."""
        return Lazy(_Kept(data), name)

    def close(self) -> None:
        pass


@dataclass(frozen=True)
class Lazy(Generic[T]):
    """A Lazy stands for a file of a store, which is read when it is asked for."""

    store: Any
    fname: str

    def get(self, sample: object = None) -> T:
        file: T = self.store.get(self.fname, sample)
        return file


class _Kept(NamedTuple):
    data: Any

    def get(self, name: str, sample: object = None) -> Any:
        return self.data


def choose_cook(
    cookers: Sequence[Cooker],
    subflavors: Mapping[str, Any],
    stores: Mapping[str, Any],
    primary: object,
    where: str,
) -> Callable[[Any], Any] | None:
    """Returns the function of the first cooker that matches a source, or None if the encoder has no
    cookers.

    ValueError, starting with `where`, if it has cookers and none matches.
    """
    for entry in cookers:
        if entry.is_match(subflavors):
            extra = dict(stores)
            if getattr(entry.cook, "__need_cache__", False):
                extra["cache"] = DirectCache()
            if getattr(entry.cook, "__need_primary__", False):
                extra["primary"] = primary
            return functools.partial(entry.cook, **extra) if extra else entry.cook
    if not cookers:
        return None
    asked = " or ".join(str(dict(entry.has_subflavors or {})) for entry in cookers)
    raise ValueError(
        f"{where}: no cooker is for its subflavors {dict(subflavors)}; those of the task encoder "
        f"ask for {asked}"
    )
