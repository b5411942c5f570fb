"""tensor. Reads the pickles of a checkpoint without running code from them.

A pickle may name any function, which unpickling calls. A checkpoint has three kinds of pickles:

    .metadata                   torch reads it with plain pickle; `check_metadata` reads it before
    objects in .distcp files    torch's planner asks torch.load to trust them; `only_weights`
    common.pt                   forbids that
"""

from __future__ import annotations

import os
import pickle
import re
from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum, EnumMeta
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException

_KNOWN = {
    "torch": {
        "Size",
        *(name for name, value in vars(torch).items() if isinstance(value, torch.dtype)),
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.distributed.checkpoint.metadata": {
        *(
            "Metadata",
            "MetadataIndex",
            "StorageMeta",
            "TensorStorageMetadata",
            "BytesStorageMetadata",
        ),
        *("ChunkStorageMetadata", "TensorProperties", "_MEM_FORMAT_ENCODING"),
    },
    "torch.distributed.checkpoint.planner": {
        *("SavePlan", "WriteItem", "WriteItemType", "TensorWriteData", "BytesIOWriteData"),
    },
    "torch.serialization": {"_get_layout"},
    "pathlib": {"PosixPath"},
    "pathlib._local": {"PosixPath"},  # as Python 3.13 names it
}
"""Module -> classes that may be in `.metadata`: those that torch 2.6 to 2.13 and megatron-core 0.16
to 0.19 write.
"""

_ONLY_WEIGHTS = "TORCH_FORCE_WEIGHTS_ONLY_LOAD"


class _ForeignError(ValueError):
    """A pickle names a class that does not belong into a checkpoint."""

    def __init__(self, path: Path, name: str) -> None:
        super().__init__(
            f"{path} holds a {name}, which does not belong in a checkpoint and could run code"
        )


class _MetadataUnpickler(pickle.Unpickler):
    def __init__(self, file: Any, path: Path) -> None:
        super().__init__(file)
        self._path = path

    def find_class(self, module: str, name: str) -> Any:
        # Python 3.11.0 to 3.11.3 pickle a member of an enum as getattr(enum, name).
        if (module, name) == ("builtins", "getattr"):
            return self._member
        if name not in _KNOWN.get(module, ()):
            raise _ForeignError(self._path, f"{module}.{name}")
        return super().find_class(module, name)

    def _member(self, owner: object, name: str) -> Enum:
        if not (isinstance(owner, EnumMeta) and name in owner.__members__):
            raise _ForeignError(self._path, "builtins.getattr")
        return owner[name]


def check_metadata(checkpoint: Path) -> None:
    """Raises ValueError, with the way out, unless `read_metadata` can read the file.

    The file is unpickled once more than torch does, so that reading it takes twice as long.
    """
    try:
        read_metadata(checkpoint)
    except ValueError as error:
        raise ValueError(f"{error}; take another checkpoint") from error


def read_metadata(checkpoint: Path) -> Any:
    """Returns what `.metadata` holds. Raises ValueError, naming file and class, if it has any class
    that torch does not write there, and if it cannot be read.
    """
    path = checkpoint / ".metadata"
    try:
        with path.open("rb") as file:
            return _MetadataUnpickler(file, path).load()
    except _ForeignError:
        raise
    except Exception as error:  # of a dozen kinds, depending on which byte is damaged
        raise ValueError(
            f"{path} cannot be read: {type(error).__name__}: {error!s:.200}"
        ) from error


@contextmanager
def only_weights(path: Path) -> Iterator[None]:
    """Context in which torch.load makes tensors and plain values only, even if its caller asks for
    more. It sets an environment variable of torch. A file with any other object raises ValueError,
    naming `path` and the class.
    """
    before = os.environ.get(_ONLY_WEIGHTS)
    os.environ[_ONLY_WEIGHTS] = "1"
    try:
        yield
    except (pickle.UnpicklingError, CheckpointException) as error:
        # torch raises UnpicklingError on a single rank, and CheckpointException if ranks load
        # together.
        found = re.search(r"GLOBAL (\S+)", str(error))
        # torch says the same of bytes that are no pickle at all, and then names no class.
        if "Weights only load failed" not in str(error) or found is None:
            raise
        raise ValueError(f"{_ForeignError(path, found[1])}; take another checkpoint") from None
    finally:
        if before is None:
            del os.environ[_ONLY_WEIGHTS]
        else:
            os.environ[_ONLY_WEIGHTS] = before
