"""pure. Base classes for the subclasses of energon's factories that users have. In energon a
factory opens a prepared folder.

    class ChatWebdataset(DefaultDecoderWebdatasetFactory[ChatSample]):
        __sample_type__ = ChatSample

Here folders are opened by their paths. If a dataset.yaml names such a subclass, only its sample
class and the decoder that its `__init__` sets are used.
"""

import warnings
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from megatron.blending.energon._encoding.decode import SampleDecoder, keep_bytes
from megatron.blending.formats.decode import Decode
from megatron.blending.formats.epath import EPath

_IS_OPENED: ContextVar[bool] = ContextVar("a factory is made to open a folder", default=False)
_UNSET: Any = "unset"
_USED = frozenset("__init__ __sample_type__ _decoder".split())


class Factory:
    """Stand-in for all of energon's factory classes."""

    __sample_type__: Any = None
    _decoder: Any = _UNSET

    def __init__(self, path: object = None, *, decoder: Any = _UNSET, **_: object) -> None:
        if not _IS_OPENED.get():
            raise TypeError(
                f"{type(self).__name__} is not made by hand here; get_train_dataset(path) opens "
                "the data"
            )
        self.path = path
        self._decoder = decoder

    def __init_subclass__(cls) -> None:
        own = [name for name, value in vars(cls).items() if callable(value) and name not in _USED]
        if own and not cls.__module__.startswith("megatron.blending."):
            warnings.warn(
                f"{cls.__name__}: of such a class only __sample_type__, the decoder and "
                f"prepare_dataset are used here, not {', '.join(own)}; let a cooker or "
                "encode_sample do it",
                stacklevel=2,
            )

    def __class_getitem__(cls, _: object) -> type:
        return cls


@dataclass(frozen=True)
class _WholeSampleDecode:
    """Decodes a part with a decoder of whole samples (webdataset's)."""

    decoder: Callable[[dict[str, Any]], Mapping[str, Any]]

    def __call__(self, name: str, content: bytes) -> Any:
        return self.decoder({"__key__": "", name: content})[name]


def opened_by(factory: type[Factory], path: str, decode: Decode) -> tuple[Any, Decode]:
    """Returns the sample class of a factory, and its decoder, which is `decode` if the factory sets
    none. Raises ValueError if it has no sample class, or if its `__init__` fails.
    """
    if factory.__sample_type__ is None:
        raise ValueError(
            f"{factory.__name__} must have a __sample_type__, the class of its samples"
        )
    before = _IS_OPENED.set(True)
    try:
        decoder = factory(EPath(path))._decoder
    except Exception as error:  # the user's code may raise anything
        raise ValueError(f"{factory.__name__}: {type(error).__name__}: {error}") from error
    finally:
        _IS_OPENED.reset(before)
    if decoder is None:
        return factory.__sample_type__, keep_bytes
    if decoder is _UNSET:
        return factory.__sample_type__, decode
    is_of_parts = isinstance(decoder, SampleDecoder)
    return factory.__sample_type__, decoder if is_of_parts else _WholeSampleDecode(decoder)
