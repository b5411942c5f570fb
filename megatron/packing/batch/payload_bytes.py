"""tensor. Payloads as bytes, as they travel between ranks, and as tensors of a microbatch."""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from megatron.packing.batch.columns import IntArray
from megatron.packing.batch.payloads import Payload

_ALIGNMENT = 64
"""Bytes: where each tensor begins, so that it is used where it arrives."""


def to_bytes(payloads: Sequence[Payload | None]) -> Tensor:
    """Returns all payloads as uint8 [n]: a header of keys, types and shapes, then the tensors."""
    tensors: list[Tensor] = []
    header: list[Any] = []
    for payload in payloads:
        if payload is None or payload.tensors is None:
            header.append(payload and (None, payload.key))
            continue
        shapes: dict[str, Any] = {}
        for name, values in payload.tensors.items():
            whole = [tensor_of(tensor).detach().cpu().contiguous() for tensor in values]
            shapes[name] = [(tensor.dtype, tuple(tensor.shape)) for tensor in whole]
            tensors += whole
        header.append((shapes, payload.key))
    head = np.frombuffer(pickle.dumps(header), np.uint8)
    size = np.frombuffer(np.int64(head.size).tobytes(), np.uint8)
    ends = np.cumsum([_rounded(8 + head.size), *(_rounded(tensor.nbytes) for tensor in tensors)])
    data = torch.empty(int(ends[-1]), dtype=torch.uint8)
    data[:8], data[8 : 8 + head.size] = (torch.from_numpy(part.copy()) for part in (size, head))
    for start, tensor in zip(ends.tolist(), tensors):
        data[start : start + tensor.nbytes] = tensor.reshape(-1).view(torch.uint8)
    return data


def from_bytes(data: Tensor) -> list[Payload | None]:
    """Returns what `to_bytes` was called on; tensors are views of `data`."""
    size = int(data[:8].view(torch.int64))
    header = pickle.loads(data[8 : 8 + size].numpy().tobytes())
    start = _rounded(8 + size)

    def taken(dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
        nonlocal start
        tensor = torch.empty(shape, dtype=dtype, device="meta")
        part = data[start : start + tensor.nbytes].view(dtype).reshape(shape)
        start += _rounded(tensor.nbytes)
        return part

    payloads: list[Payload | None] = []
    for entry in header:
        if entry is None:
            payloads.append(None)
            continue
        shapes, key = entry
        tensors = shapes and {
            name: [taken(*one) for one in values] for name, values in shapes.items()
        }
        payloads.append(Payload(tensors, key))
    return payloads


def tensor_of(value: Any) -> Tensor:
    """Returns a tensor or an array as a tensor; a copy of an array that torch cannot share, as a
    flipped or a read-only one.
    """
    if not isinstance(value, np.ndarray):
        return torch.as_tensor(value)
    array = np.ascontiguousarray(value).reshape(value.shape)
    return torch.from_numpy(array if array.flags.writeable else array.copy())


def _rounded(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT


class PackPayloads(NamedTuple):
    """The payloads of one microbatch, in the order of its sequences."""

    tensors: Mapping[str, Sequence[Tensor]]
    """Tensors by name, without those that no sequence has."""
    segments: Mapping[str, IntArray]
    """int64 [n]: number of the pack's segment that each is of."""


def payloads_of_packs(
    payloads: Sequence[Payload | None], num_sequences: IntArray
) -> Iterator[PackPayloads]:
    """Yields the payloads of each microbatch: `num_sequences[m]` of the sequences, in order."""
    ends = np.cumsum(np.concatenate(([0], num_sequences))).tolist()
    for start, end in pairwise(ends):
        tensors: dict[str, list[Tensor]] = {}
        segments: dict[str, list[int]] = {}
        for segment, payload in enumerate(payloads[start:end]):
            for name, values in (payload.tensors or {} if payload else {}).items():
                tensors.setdefault(name, []).extend(map(tensor_of, values))
                segments.setdefault(name, []).extend([segment] * len(values))
        numbers = {name: np.array(values, np.int64) for name, values in segments.items()}
        yield PackPayloads(tensors, numbers)
