"""A script that the plug-in is installed in: as much of it as one process needs."""

from __future__ import annotations

import argparse
from typing import Any

import torch
from megatron.core import pipeline_parallel
from megatron.core.datasets import data_schedule
from megatron.core.distributed import finalize_model_grads
from megatron.core.pipeline_parallel import schedules
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron.packing import plugin


def make_config(**settings: Any) -> Any:
    config: Any = TransformerConfig(
        num_layers=2, hidden_size=8, num_attention_heads=2, moe_token_dispatcher_type="alltoall"
    )
    config.max_seqlen_per_dp_cp_rank = 64
    config.calculate_per_token_loss = True
    config.finalize_model_grads_func = finalize_model_grads
    for name, value in settings.items():
        setattr(config, name, value)
    return config


def parse(text: str, parser: argparse.ArgumentParser | None = None) -> argparse.Namespace:
    return plugin.add_arguments(parser or argparse.ArgumentParser()).parse_args(text.split())


class Model(torch.nn.Module):
    """As much of a model as the schedules ask for."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config = config


def forward_step(data_iterator: Any, model: Any) -> Any:
    return None, lambda output: (1.0, 2, {"lm loss": 3.0})


def state_of_megatron_core() -> dict[str, dict[str, int]]:
    """The identity of everything in the modules that the plug-in touches."""
    modules = {
        "schedules": schedules,
        "pipeline_parallel": pipeline_parallel,
        "data_schedule": data_schedule,
    }
    return {
        name: {key: id(value) for key, value in vars(module).items()}
        for name, module in modules.items()
    }
