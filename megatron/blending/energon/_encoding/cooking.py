"""pure. Cookers: functions of the user that turn a crude sample (the parts of a record) into a
sample. Each source gets the first cooker that matches its subflavors.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from megatron.blending.arguments import check_function, shown

T = TypeVar("T")

DECODE: Any = "decode"
"""Default of `decoder`: parts are decoded by their names (text, JSON, arrays, images). With None
they stay bytes.
"""


class EncoderSettings(Protocol):
    """The attributes of a task encoder that turn records into samples."""

    @property
    def cookers(self) -> "Sequence[Cooker]": ...
    @property
    def decoder(self) -> Any: ...


class NoEncoder:
    """Settings without cookers: samples stay as the data has them."""

    cookers: "Sequence[Cooker]" = ()
    decoder: Any = DECODE


@dataclass(frozen=True)
class Cooker:
    """Turns CrudeSamples into samples, for sources whose subflavors include `has_subflavors`.

    It is called as `cook(sample, **stores)`: with each side store (`aux`) that the metadataset
    names for the source, and with the extra arguments that the decorator `cooker` requests.
    """

    cook: Callable[..., Any]
    has_subflavors: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        check_function("Cooker: cook", self.cook)
        if self.has_subflavors is not None and not isinstance(self.has_subflavors, Mapping):
            raise ValueError(
                f"Cooker: has_subflavors must be a dict, but is {shown(self.has_subflavors)}"
            )

    def is_match(self, subflavors: Mapping[str, Any]) -> bool:
        """Returns whether the source has all of `has_subflavors`, with the same values."""
        asked = self.has_subflavors or {}
        return all(key in subflavors and subflavors[key] == value for key, value in asked.items())


def cooker(function: Any = None, *, need_cache: bool = False, need_primary: bool = False) -> Any:
    """Decorator of a cook function that requests extra arguments: `cache` to read stores, and
    `primary`, a store of the files of its own source.
    """
    if function is None:
        return functools.partial(cooker, need_cache=need_cache, need_primary=need_primary)
    function.__need_cache__ = need_cache
    function.__need_primary__ = need_primary
    return function


class DirectCache:
    """A cache without memory of its own: each `get` reads the file. The page cache of the operating
    system keeps it.
    """

    def get(self, store: Any, name: str, sample: object = None) -> Any:
        return store.get(name, sample)

    def get_lazy(self, store: object, name: str) -> "Lazy":
        return Lazy(store, name)

    def to_cache(self, data: object, name: str) -> "Lazy":
        """Returns a Lazy of computed data. It keeps the data itself, as there is no cache."""
        return Lazy(_Kept(data), name)

    def close(self) -> None:
        pass


@dataclass(frozen=True)
class Lazy(Generic[T]):
    """A file of a store that is read by `get`, and not before."""

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
    """Returns the function of the first cooker that matches a source; None if the encoder has no
    cookers. Raises ValueError, starting with `where`, if it has cookers and none matches.
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
