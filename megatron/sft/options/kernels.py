"""pure. Options of kernels that compute the same in fewer passes."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class KernelConfig:
    """Fused kernels. Never run on CUDA so far."""

    bias_swiglu_fusion: bool = False
    """Compute the activation of --swiglu, with its bias, in one compiled kernel each way."""
    moe_permute_fusion: bool = False
    """Sort tokens by expert in Transformer Engine's kernels, which must be installed."""
    gradient_accumulation_fusion: bool = False
    """Add a weight's gradient to those of earlier microbatches within the product that makes it;
    needs Apex with its CUDA extensions.
    """
    cross_entropy_loss_fusion: bool = False
    """Compute losses from logits, and their gradients, in one Triton kernel each way."""
