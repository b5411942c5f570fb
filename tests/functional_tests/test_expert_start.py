"""Experts of a model that begins from nothing are different ones, on each expert-parallel rank."""

from __future__ import annotations

import torch
import torch.distributed as dist
from megatron.core.utils import unwrap_model

from megatron.packing.device import CPU
from megatron.sft.model.build import build_model, build_transformer_config
from tests.functional_tests.layouts import MODELS
from tests.functional_tests.oracle import VOCAB_SIZE, _prepare, options, sequences
from tests.functional_tests.ranks import run_ranks

BATCHES = [sequences(5, (8, 8))]


def starts(text: str) -> dict[str, list[float]]:
    """The first weights of each matrix of this rank's experts, and of its attention."""
    config = options(text, BATCHES, dist.get_world_size())
    _prepare(config, torch.float32)
    transformer_config = build_transformer_config(config, CPU, params_dtype=torch.float32)
    (model,) = build_model(config, transformer_config, VOCAB_SIZE, CPU)
    return {
        name: weight.flatten()[:4].tolist()
        for name, weight in unwrap_model(model).named_parameters()
        if name.endswith("weight") and ("experts." in name or "linear_qkv" in name)
    }


def test_no_two_experts_begin_alike() -> None:
    """megatron-core draws them by one seed on each rank of a CPU: of 128 experts on 8 ranks 16 were
    distinct.
    """
    first, second = run_ranks(starts, 2, f"{MODELS['experts']} --expert-model-parallel-size 2")
    assert first.keys() == second.keys()
    matrices = [name for name in first if ".experts." in name]
    assert matrices
    drawn = {tuple(rank[name]) for rank in (first, second) for name in matrices}
    assert len(drawn) == 2 * len(matrices)
    assert all(first[name] == second[name] for name in first if "linear_qkv" in name)
