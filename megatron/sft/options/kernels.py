"""pure. Options of kernels that compute the same in fewer passes."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class KernelConfig:
    """Fused kernels. Those that are None are taken on a GPU wherever they can be (see
    `model.kernels`); `--no-...` turns one off.
    """

    bias_swiglu_fusion: bool | None = None
    """Compute the activation of --swiglu, with its bias, in one compiled kernel each way (default:
    on a GPU).
    """
    moe_grouped_gemm: bool | None = None
    """Multiply with all experts of a layer at once, in bfloat16 (float32 on CPU; default: on a GPU,
    in bfloat16).
    """
    moe_permute_fusion: bool = False
    """Move tokens to experts and back in Transformer Engine's kernels where it is installed, and
    else by gathers (never run on CUDA so far).
    """
    gradient_accumulation_fusion: bool | None = None
    """Add a weight's gradient to those of earlier microbatches within the product that makes it
    (default: on a GPU, in bfloat16).
    """
    cross_entropy_loss_fusion: bool | None = None
    """Compute losses from logits, and their gradients, in one Triton kernel each way (default: on a
    GPU).
    """
