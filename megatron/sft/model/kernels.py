"""mcore. Which of the fused kernels a run takes."""

from __future__ import annotations

import warnings
from dataclasses import replace

from megatron.core.transformer.moe import moe_utils

from megatron.packing.device import Device
from megatron.packing.model.get_batch import transformer_engine_installed
from megatron.sft.model.needs import NEEDS_OF_TRITON
from megatron.sft.options.config import SFTConfig
from megatron.sft.options.kernels import KernelConfig

_OF_PERMUTATION = (
    "fused_permute",
    "fused_permute_with_probs",
    "fused_sort_chunks_by_index",
    "fused_sort_chunks_by_index_with_probs",
    "fused_unpermute",
)


def kernels_for(config: SFTConfig, device: Device) -> KernelConfig:
    """Returns the kernels of a run on `device`, each True or False: what the user chose, and else
    on CUDA each that computes the same as torch's operations for this model. Warns where Triton's
    do not run there.
    """
    fault = device.triton_fault
    if device.is_gpu and fault is not None:
        warnings.warn(
            "loss, SwiGLU and rotary embeddings are not fused, which costs up to a fifth of the "
            f"speed: {NEEDS_OF_TRITON} ({fault})",
            stacklevel=2,
        )
    # Transformer Engine's grouped experts have names for biases that are not known here.
    has_foreign_biases = not config.model.disable_bias_linear and transformer_engine_installed()
    can_be = {
        "bias_swiglu_fusion": fault is None,
        "cross_entropy_loss_fusion": fault is None,
        "moe_grouped_gemm": config.training.bf16 and not has_foreign_biases,
        "gradient_accumulation_fusion": config.training.bf16,
    }
    refused = config.refused_kernels()
    chosen = {
        name: device.is_gpu and possible and name not in refused
        for name, possible in can_be.items()
        if getattr(config.kernels, name) is None
    }
    return replace(config.kernels, **chosen)


def has_fused_permutation(device: Device) -> bool:
    """Returns whether Transformer Engine's kernels that sort tokens by expert are installed: those
    of 2.1 or later.
    """
    is_there = device.has_package("transformer_engine")
    return is_there and all(getattr(moe_utils, name, None) for name in _OF_PERMUTATION)
