"""mcore. The reference model: a copy of the trained weights, as they are when the run begins.

Only what is trained is copied: of full fine-tuning all weights, with adapters these alone, so that
new ones (B is zero) give the model without them, and those of --lora-adapter the model that they
made. While the copy takes the weights' place, the same modules compute, in the same packs: before
the first step policy and reference are equal to the bit.

Price: the memory of the trained weights once more, without gradients and optimizer state.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor


class _Copied(NamedTuple):
    tensor: Tensor
    """A parameter, or a buffer."""
    copy: Tensor
    """A tensor of the same shape in a copy of its storage."""


class Reference:
    """Weights that the model had when this was made."""

    def __init__(self, model: Sequence[torch.nn.Module]) -> None:
        """Copies the weights that have gradients, and all buffers, of this rank's chunks.

        A storage is copied as a whole: kernels of several experts read weights that stand side by
        side.
        """
        storages: dict[int, Tensor] = {}
        self._copied: list[_Copied] = []
        for tensor in _changing(model):
            storage = tensor.untyped_storage()
            key = storage.data_ptr()
            if key not in storages:
                flat = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
                flat.set_(storage.clone())  # type: ignore[call-overload]
                storages[key] = flat
            copy = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
            copy.set_(  # type: ignore[call-overload]
                storages[key].untyped_storage(),
                tensor.storage_offset(),
                tensor.shape,
                tensor.stride(),
            )
            self._copied.append(_Copied(tensor, copy))

    @property
    def num_bytes(self) -> int:
        """Bytes of the copy."""
        storages = {one.copy.untyped_storage().data_ptr(): one.copy for one in self._copied}
        return sum(copy.untyped_storage().nbytes() for copy in storages.values())

    @contextmanager
    def weights(self) -> Iterator[None]:
        """Context in which the model has the copied weights."""
        before = [one.tensor.data for one in self._copied]
        for one in self._copied:
            one.tensor.data = one.copy
        try:
            yield
        finally:
            for one, data in zip(self._copied, before):
                one.tensor.data = data


def _changing(model: Sequence[torch.nn.Module]) -> Iterator[Tensor]:
    seen: set[int] = set()
    for chunk in model:
        for parameter in chunk.parameters():
            if parameter.requires_grad and id(parameter) not in seen:
                seen.add(id(parameter))
                yield parameter
        # megatron-core's DistributedDataParallel has gradients under the name `buffers`.
        for _, buffer in chunk.named_buffers():
            if buffer is not None and buffer.numel() and id(buffer) not in seen:
                seen.add(id(buffer))
                yield buffer
