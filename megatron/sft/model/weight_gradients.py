"""mcore. Weight gradients that are added to those of earlier microbatches in the product that makes
them.

megatron-core's linear layers do so with `gradient_accumulation_fusion`, by functions of Apex's CUDA
extensions. torch has such a product, too, which takes their place where Apex is not installed.
"""

from __future__ import annotations

from types import SimpleNamespace

import torch
from megatron.core.tensor_parallel import layers
from torch import Tensor


def install() -> None:
    """Offers the product to megatron-core's layers; Apex's comes first. Idempotent."""
    if not layers._grad_accum_fusion_available:
        layers.fused_weight_gradient_mlp_cuda = SimpleNamespace(
            wgrad_gemm_accum_fp32=add_product, wgrad_gemm_accum_fp16=add_product
        )
        layers._grad_accum_fusion_available = True


def add_product(x: Tensor, gradient: Tensor, total: Tensor) -> None:
    """Adds the transpose of `gradient` [rows, out] times `x` [rows, in] to `total` [out, in].

    `total` has the dtype of both, or is float32. On CPU the product in half precision is made, then
    added, to the same bits as without fusion.
    """
    if not len(x):
        return
    if total.dtype == x.dtype:
        total.addmm_(gradient.t(), x)
    elif total.is_cuda:
        torch.addmm(total, gradient.t(), x, out_dtype=total.dtype, out=total)
    else:
        total.add_(gradient.t() @ x)
