"""collective. Sums and maxima of named numbers over all ranks, in one collective each.

    slots = SlotReduction({"tokens": 3.0, "counts": table}, {"longest": 812.0}, device)
    slots.result()["tokens"]    ->    the sum over all ranks, float64 [1]

All ranks pass the same names and sizes. It costs one all-reduce of 8 bytes per number for the sums,
and another one for the maxima if there are any.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor

from megatron.packing.device import Device, to_device

Value = float | npt.NDArray[np.float64] | Tensor
FloatArray = npt.NDArray[np.float64]


class SlotReduction:
    """A reduction that the constructor starts. `result` waits for it, and for all work of the
    device before it.
    """

    def __init__(
        self, sums: Mapping[str, Value], maxima: Mapping[str, Value], device: Device
    ) -> None:
        """Takes this rank's part of each slot: a number, an array, or a tensor on `device`."""
        # Sums before maxima on every rank: ranks must enter collectives in the same order.
        self._sums = _Vector(sums, dist.ReduceOp.SUM, device)
        self._maxima = _Vector(maxima, dist.ReduceOp.MAX, device) if maxima else None
        self._is_there: torch.cuda.Event | None = None
        if device.is_gpu:
            self._is_there = torch.cuda.current_stream(device.place).record_event()

    def result(self) -> dict[str, FloatArray]:
        """Returns each slot over all ranks, float64 [size]."""
        if self._is_there is not None:
            self._is_there.synchronize()
        found = self._sums.by_name()
        return found if self._maxima is None else {**found, **self._maxima.by_name()}


class _Vector:
    """Slots one after the other in one tensor."""

    def __init__(
        self, slots: Mapping[str, Value], operation: dist.ReduceOp.RedOpType, device: Device
    ) -> None:
        sizes = [_size(value) for value in slots.values()]
        self._ends = dict(zip(slots, np.cumsum(sizes).tolist()))
        # Values on the host are copied to the device at once; tensors on the device are added
        # there. float64 keeps sums of tokens and of squared lengths exact up to 2^53.
        own = torch.zeros(sum(sizes), dtype=torch.float64)
        for (name, value), size in zip(slots.items(), sizes):
            if not isinstance(value, Tensor):
                end = self._ends[name]
                own[end - size : end] = torch.as_tensor(value, dtype=torch.float64).flatten()
        numbers = to_device(own, device.place)
        for (name, value), size in zip(slots.items(), sizes):
            if isinstance(value, Tensor):
                numbers[self._ends[name] - size : self._ends[name]] = value.double().flatten()
        dist.all_reduce(numbers, op=operation)
        self._numbers = numbers
        # Start the copy back to the host. `result` waits for it, after most work of the step.
        if device.is_gpu:
            self._numbers = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
            self._numbers.copy_(numbers, non_blocking=True)

    def by_name(self) -> dict[str, FloatArray]:
        parts = np.split(self._numbers.numpy(), [*self._ends.values()][:-1])
        return dict(zip(self._ends, parts))


def _size(value: Value) -> int:
    return value.numel() if isinstance(value, Tensor) else int(np.size(value))
