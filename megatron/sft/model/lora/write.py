"""mcore. Write adapters as PEFT does, or the whole model with the adapters merged into it, from any
parallel layout.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core.models.gpt import GPTModel
from torch import Tensor

from megatron.sft.agreement import gathered
from megatron.sft.model.huggingface.gather import Dtypes, tensors_of, written_parts
from megatron.sft.model.huggingface.read import Placed
from megatron.sft.model.huggingface.write import (
    bytes_of,
    finished_folder,
    header_of,
    written_parameters,
)
from megatron.sft.model.lora.gates import weight_beside
from megatron.sft.model.lora.names import AdapterWeights
from megatron.sft.model.lora.peft_folder import WEIGHTS
from megatron.sft.peers import wait_for_all


def write_adapter(
    folder: str | Path,
    chunks: Sequence[GPTModel],
    weights: AdapterWeights,
    write_others: Callable[[Path], None],
) -> None:
    """Writes a PEFT folder, and on rank 0 what `write_others` adds: all other files; collective.

    PEFT reads a single file, so each rank writes its tensors to their places in it. They have the
    adapters' type.
    """
    with finished_folder(folder) as unfinished:
        if dist.get_rank() == 0:
            write_others(unfinished)
        placed = written_parameters(chunks, weights)
        dtype = next(
            p.dtype
            for chunk in chunks
            for p in chunk.parameters()
            if p.requires_grad and p.dim() == 2
        )
        dtypes = Dtypes(torch.promote_types(dtype, torch.float32))
        own = written_parts(placed)
        parts_of_all = gathered([written for part in own for written in weights.written_as(part)])
        header, begins = header_of([part for parts in parts_of_all for part in parts], dtypes)
        file = unfinished / WEIGHTS
        if dist.get_rank() == 0:
            with file.open("wb") as stream:
                stream.write(header)
                stream.truncate(begins[-1])
        wait_for_all()
        tensors = tensors_of(placed, dtypes, lambda one: one.parameter.detach())
        with file.open("r+b") as stream:
            stream.seek(begins[sum(map(len, parts_of_all[: dist.get_rank()]))])
            for number, tensor in enumerate(tensors):
                for _ in weights.written_as(own[number]):
                    stream.write(bytes_of(tensor))


def merged_values(chunks: Sequence[GPTModel]) -> Callable[[Placed], Tensor]:
    """Returns what `write_folder` writes of each parameter to merge the adapters: weight and update
    added in float32.
    """
    adapters = {
        weight_beside(layer): layer.adapter
        for chunk in chunks
        for layer in chunk.modules()
        if hasattr(layer, "adapter")
    }

    def values_of(placed: Placed) -> Tensor:
        adapter = adapters.get(placed.parameter)
        values = placed.parameter.detach()
        if adapter is None:
            return values
        update = adapter.update()
        return values.to(update.dtype) + update

    return values_of
