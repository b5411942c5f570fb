"""mcore. Random weights for a GPTModel, so that nothing hides behind zeros."""

from __future__ import annotations

import zlib
from collections.abc import Iterator

import torch
from megatron.core import parallel_state

from megatron.packing.doctor.subject import draw_weights

_SLOW_DECAY = -3.0
"""Logarithm of the decay rate of delta nets."""


@torch.no_grad()
def set_weights(gpt: torch.nn.Module) -> None:
    """Draws the weights: copies alike on all ranks that hold them, shards unlike one another."""
    stage = parallel_state.get_pipeline_model_parallel_rank()
    shards: dict[str, int] = {}
    for name, parameter in gpt.named_parameters():
        key = f"{stage} {name}"
        if name.endswith("word_embeddings.weight") or (
            name == "output_layer.weight"
            and getattr(gpt, "share_embeddings_and_output_weights", False)
        ):
            key = "embedding"  # tied weights live on the first and on the last stage
        if getattr(parameter, "tensor_model_parallel", False):
            key += f" tensor {parallel_state.get_tensor_model_parallel_rank()}"
        if not getattr(parameter, "allreduce", True):
            key += f" expert {parallel_state.get_expert_model_parallel_rank()}"
        shards[name] = zlib.crc32(key.encode())
    for name, holder in _each_alone(gpt):
        draw_weights(holder, seed=shards[name])
    for name, parameter in gpt.named_parameters():
        if name.endswith("A_log"):  # states that decay at once would not show that they are kept
            parameter.fill_(_SLOW_DECAY)


def _each_alone(gpt: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module]]:
    """Yields each parameter as the only one of a module, under its own name."""
    for name, parameter in gpt.named_parameters():
        holder = torch.nn.Module()
        holder.register_parameter(name.replace(".", "_"), parameter)
        yield name, holder
