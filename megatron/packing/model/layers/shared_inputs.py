"""mcore. A tensor that each tensor-parallel rank uses for its own heads: the gradients of all
uses are summed.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.tensor_parallel.mappings import copy_to_tensor_model_parallel_region
from torch import Tensor


def shared_by_ranks(x: Tensor, group: Any) -> Tensor:
    """Returns `x`, whose gradient is the sum of those of all ranks of `group`, whatever strides
    they have: of one that is not contiguous megatron-core 0.16 sums a copy, and loses the sum.
    """
    copied: Tensor = copy_to_tensor_model_parallel_region(x, group=group)
    return with_dense_gradient(copied)


def with_dense_gradient(x: Tensor) -> Tensor:
    """Returns `x`, whose gradient is handed on contiguous."""
    out: Tensor = _DenseGradient.apply(x)
    return out


class _DenseGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient.contiguous()
