"""tensor. Reads blocks of tensors from the files of a checkpoint straight to where they belong.

torch's reader allocates each stored tensor on the host, reads all of it, and copies the part that
is wanted. Here those bytes alone are read: into the tensor itself where it is one piece of the
host's memory, and else by way of a buffer of at most 16 MiB.
"""

from __future__ import annotations

import io
import pickle
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed._shard._utils import narrow_tensor_by_index
from torch.distributed.checkpoint import FileSystemReader, LoadPlan, LoadPlanner
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadItemType
from torch.futures import Future
from torch.storage import _storage_type_to_dtype_map

_MAX_BUFFER_BYTES = 1 << 24
_DTYPES = _storage_type_to_dtype_map()
"""By torch's names of storages: FloatStorage."""


def install() -> None:
    """Lets megatron-core read checkpoints by this reader. Idempotent."""
    from megatron.core.dist_checkpointing.strategies import torch as strategy

    strategy._get_filesystem_reader = lambda path, *_, **__: CheckpointReader(path)  # type: ignore[assignment]


class CheckpointReader(FileSystemReader):
    """Reader of a checkpoint in torch's format, by this or another trainer."""

    _metadata: Metadata | None = None

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Returns the table of contents, read once."""
        if self._metadata is None:
            self._metadata = super().read_metadata(*args, **kwargs)
        return self._metadata

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Reads all items of a plan. Raises ValueError if a file ends early."""
        others = []
        by_file: dict[str, list[Any]] = {}
        for item in plan.items:
            place = self.storage_data[item.storage_index]
            # Torch reads objects, and tensors that were compressed or else changed by their saver.
            if item.type == LoadItemType.BYTE_IO or getattr(place, "transform_descriptors", None):
                others.append(item)
            else:
                by_file.setdefault(place.relative_path, []).append((place, item))
        for name, items in by_file.items():
            with (Path(self.path) / name).open("rb") as file:
                for place, item in sorted(items, key=lambda one: one[0].offset):
                    stored = _without_memory(self._slice_file(file, place))
                    if stored is None:
                        others.append(item)
                        continue
                    wanted = narrow_tensor_by_index(
                        stored.tensor, item.storage_offsets, item.lengths
                    )
                    target = planner.resolve_tensor(item).detach()
                    if target.shape != wanted.shape:
                        raise ValueError(
                            f"{file.name} has {list(wanted.shape)} of {item.storage_index.fqn}, "
                            f"where {list(target.shape)} are wanted"
                        )
                    _read_into(target, wanted, file, place.offset + stored.first)
                    planner.commit_tensor(item, target)
        return super().read_data(replace(plan, items=others), planner)


class _Stored(NamedTuple):
    """A tensor in a file."""

    tensor: Tensor
    """The tensor without memory: shape, strides, and offset in its storage."""
    first: int
    """Byte at which its storage begins."""


def _without_memory(file: Any) -> _Stored | None:
    """Returns the tensor that torch.save wrote into a file; None if it is of a kind that only torch
    knows to read.
    """
    archive: Any = torch._C.PyTorchFileReader(file)
    try:
        tensor, name = _TensorUnpickler(io.BytesIO(archive.get_record("data.pkl"))).load()
        record = f"data/{name}"
        num_bytes = archive.get_record_size(record)
        if _end(tensor) > num_bytes:
            return None
    except Exception:  # of a dozen kinds: torch reads it again, and words what is wrong
        return None
    return _Stored(tensor, archive.get_record_offset(record))


class _TensorUnpickler(pickle.Unpickler):
    """Unpickler of one plain tensor, as (tensor without memory, name of its storage)."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("torch._utils", "_rebuild_tensor_v2"):
            return _rebuilt
        if (module, name) == ("collections", "OrderedDict"):  # hooks of the tensor
            return OrderedDict
        if module == "torch" and name in _DTYPES:
            return _DTYPES[name]
        raise pickle.UnpicklingError(f"{module}.{name}")

    def persistent_load(self, reference: Any) -> tuple[torch.dtype, str]:
        _, dtype, name, *_ = reference
        return dtype, name


def _end(tensor: Tensor) -> int:
    """Returns the number of bytes of its storage that a tensor reaches."""
    end = int(tensor.storage_offset()) + _span(tensor.shape, tensor.stride())
    return end * tensor.itemsize


def _rebuilt(
    storage: tuple[torch.dtype, str],
    offset: int,
    shape: Sequence[int],
    strides: Sequence[int],
    *_: object,
) -> tuple[Tensor, str]:
    dtype, name = storage
    size = offset + _span(shape, strides)
    whole = torch.empty(size, dtype=dtype, device="meta")
    return whole.as_strided(tuple(shape), tuple(strides), offset), name


def _read_into(target: Tensor, stored: Tensor, file: io.BufferedReader, first: int) -> None:
    """Fills a tensor with one in a file.

    stored: a tensor without memory, with strides and offset in the storage that begins at byte
        `first` of the file.
    """
    if not stored.numel():
        return
    size, itemsize = _span(stored.shape, stored.stride()), stored.itemsize
    is_in_place = target.device.type == "cpu" and target.dtype == stored.dtype
    is_in_place = is_in_place and target.is_contiguous() and stored.is_contiguous()
    if not is_in_place and size * itemsize > _MAX_BUFFER_BYTES and stored.numel() > 1:
        strides = [s if n > 1 else 0 for n, s in zip(stored.shape, stored.stride())]
        rows = max(_MAX_BUFFER_BYTES // (max(strides) * itemsize), 1)
        axis = strides.index(max(strides))
        for part, stored_part in zip(target.split(rows, axis), stored.split(rows, axis)):
            _read_into(part, stored_part, file, first)
        return
    buffer = target if is_in_place else torch.empty(size, dtype=stored.dtype)
    bytes_wanted: Any = with_own_storage(buffer).flatten().view(torch.uint8).numpy()
    file.seek(first + int(stored.storage_offset()) * itemsize)
    if file.readinto(bytes_wanted) != len(bytes_wanted):
        raise ValueError(f"{file.name} ends within a tensor")
    if not is_in_place:
        target.copy_(buffer.as_strided(stored.shape, stored.stride()))


def with_own_storage(tensor: Tensor) -> Tensor:
    """Returns a contiguous tensor on the host as one of the same memory, with a storage that ends
    where it ends. What is done to that storage (numpy's arrays fix the size) isn't to the other.
    """
    begin = tensor.storage_offset() * tensor.itemsize
    storage = tensor.untyped_storage()[begin : begin + tensor.nbytes]
    return torch.empty(0, dtype=tensor.dtype).set_(storage, 0, tensor.shape)  # type: ignore[call-overload,no-any-return]


def _span(shape: Sequence[int], strides: Sequence[int]) -> int:
    """Returns the number of elements from the first to the last one in memory."""
    return 1 + sum((size - 1) * stride for size, stride in zip(shape, strides))
