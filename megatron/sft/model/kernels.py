"""tensor. Which of the fused kernels a run takes."""

from __future__ import annotations

import warnings
from dataclasses import replace

import torch

from megatron.packing.model.attention.kernels import compiles_triton as compiles
from megatron.sft.options.config import SFTConfig
from megatron.sft.options.kernels import KernelConfig


def kernels_for(config: SFTConfig, device: torch.device) -> KernelConfig:
    """Returns the kernels of a run on `device`, each True or False: what the user chose, and else
    on CUDA each that computes the same as torch's operations for this model. Warns where Triton
    cannot compile there.
    """
    if device.type == "cuda" and not compiles():
        warnings.warn(
            "loss, SwiGLU and rotary embeddings are not fused, which costs up to a fifth of the "
            "speed: Triton needs a C compiler (gcc) and Python's headers (Python.h)",
            stacklevel=2,
        )
    can_be = {
        "bias_swiglu_fusion": compiles(),
        "cross_entropy_loss_fusion": compiles(),
        "moe_grouped_gemm": config.training.bf16,
        "gradient_accumulation_fusion": config.training.bf16,
    }
    refused = config.refused_kernels()
    chosen = {
        name: device.type == "cuda" and possible and name not in refused
        for name, possible in can_be.items()
        if getattr(config.kernels, name) is None
    }
    return replace(config.kernels, **chosen)
