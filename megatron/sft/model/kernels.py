"""tensor. Which of the fused kernels a run takes."""

from __future__ import annotations

from dataclasses import replace

import torch

from megatron.packing.model.attention.kernels import compiles_triton as compiles
from megatron.sft.options.config import SFTConfig
from megatron.sft.options.kernels import KernelConfig


def kernels_for(config: SFTConfig, device: torch.device) -> KernelConfig:
    """Returns the kernels of a run on `device`, each True or False: what the user chose, and else
    on CUDA each that computes the same as torch's operations for this model.
    """
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
