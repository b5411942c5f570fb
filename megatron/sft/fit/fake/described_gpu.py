"""mcore. A GPU that is not there, for a fake world: its answers to the trainer, and the memory that
its kernels allocate.

Fake tensors are on the CPU: a CPU build of torch makes no others. `DescribedGPU` is the `Device`
that the trainer's code is given, so that it goes CUDA's ways. Kernels that cannot run on tensors
without memory have stand-ins, which allocate as much: this project's and flash-linear-attention's
come with the device. torch and megatron-core ask for a tensor's device by themselves; `replaced`
lists what takes the place of their functions.

Counted as on a CPU, which takes as much: kernels that turn queries and keys, that sum rows of
experts, and attention in float32. Transformer Engine's layers are those without it.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from types import SimpleNamespace
from typing import Any

import torch
from megatron.core.fusions import fused_bias_swiglu
from megatron.core.tensor_parallel import layers
from torch import Tensor

from megatron.packing.device import CPU, Device
from megatron.packing.model.attention import kernels as attention_kernels
from megatron.packing.model.loss import cross_entropy
from megatron.packing.model.parts import known_parts
from megatron.sft.fit.fake import optimizers

ALLOCATION_BYTES = 512
"""torch's allocator on CUDA rounds each tensor up to a multiple of it."""


@dataclass(frozen=True)
class DescribedGPU(Device):
    """A GPU on which all kernels run but FlashAttention 4, and whose tensors are on the CPU."""

    kind: str = "cuda"
    name: str = "a GPU"
    capability: tuple[int, int] = (8, 0)
    triton_fault: str | None = None

    @property
    def place(self) -> torch.device:
        """torch's device of its tensors."""
        return CPU.place

    def has_package(self, name: str) -> bool:
        """Returns whether its kernels are described here; they need not be installed."""
        return any(module.startswith(f"{name}.") for module in _kernels())

    def kernels(self, module: str) -> Any:
        """Returns what takes the place of a module of kernels."""
        return _kernels()[module]


def replaced() -> Iterator[tuple[Any, str, Any]]:
    """Yields (owner, name, replacement) of functions of torch and megatron-core."""
    yield Tensor, "to", _to(Tensor.to)
    for name, kernel in _COMPILED.items():
        yield fused_bias_swiglu, name, kernel
    yield layers, "fused_weight_gradient_mlp_cuda", _IN_PLACE
    yield torch.nn.functional, "rms_norm", _rms_norm
    yield torch.nn.functional, "layer_norm", _layer_norm
    yield (
        sys.modules["torch.optim.adam"],
        "_default_to_fused_or_foreach",
        lambda *_, **__: (False, True),
    )


def _to(plain: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Copies where the host does not wait: from host to device, which are both the CPU here."""

    def to(self: Tensor, *arguments: Any, non_blocking: bool = False, **options: Any) -> Tensor:
        moved = plain(self, *arguments, **options)
        return moved.clone() if non_blocking and moved is self else moved

    return to


class _FusedLoss:
    """Allocates as the kernels of `fused_cross_entropy` do."""

    @staticmethod
    def row_statistics(logits: Tensor, labels: Tensor, num_words: int) -> tuple[Tensor, ...]:
        wide = torch.promote_types(logits.dtype, torch.float32)
        return tuple(torch.empty(3, len(logits), dtype=wide, device=logits.device))

    @staticmethod
    def write_gradients(*_: Any) -> None:
        """Over the logits."""


def _kernels() -> dict[str, Any]:
    """Returns what takes the place of modules of kernels, by their names."""
    of_parts = (part.kernel_stand_ins().items() for part in known_parts())
    others = {cross_entropy.FUSED: _FusedLoss, optimizers.FUSED_ADAM: optimizers}
    return others | dict(chain.from_iterable(of_parts))


def _half(x: Tensor, *_: Tensor) -> Tensor:
    return x.new_empty(*x.shape[:-1], x.shape[-1] // 2)


_COMPILED: Mapping[str, Callable[..., Any]] = {
    "swiglu": _half,
    "bias_swiglu": _half,
    "weighted_swiglu": _half,
    "swiglu_back": lambda gradient, x: torch.empty_like(x),
    "bias_swiglu_back": lambda gradient, x, bias: torch.empty_like(x),
    "weighted_swiglu_back": lambda gradient, x, weights: (
        torch.empty_like(x),
        torch.empty_like(weights),
    ),
}
"""Functions of megatron-core's fused SwiGLU, which torch.compile makes kernels of."""


_IN_PLACE = SimpleNamespace(
    wgrad_gemm_accum_fp32=lambda x, gradient, total: None,
    wgrad_gemm_accum_fp16=lambda x, gradient, total: None,
)
"""Products that are added to gradients: those of Apex, or `weight_gradients.add_product`."""


class _Norm(torch.autograd.Function):
    """Shapes of a fused norm: what it keeps for its backward pass, and what that returns."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, num_rows: int
    ) -> Tensor:
        statistics = [
            x.new_empty((*x.shape[:-1], 1), dtype=torch.promote_types(x.dtype, torch.float32))
            for _ in range(num_rows)
        ]
        ctx.save_for_backward(x, weight, bias, *statistics)
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, *parameters = ctx.saved_tensors[:3]
        return (
            torch.empty_like(x),
            *(p if p is None else torch.empty_like(p) for p in parameters),
            None,
        )


def _rms_norm(x: Tensor, shape: Any, weight: Tensor | None = None, eps: Any = None) -> Tensor:
    return _Norm.apply(x, weight, None, 1)


def _layer_norm(
    x: Tensor,
    shape: Any,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    return _Norm.apply(x, weight, bias, 2)


def flash_backward_bytes(query: Tensor, key: Tensor, cu_seqlens: Tensor) -> int:
    """Returns the workspace of FlashAttention 2's backward pass over packs.

    A float32 sum of the queries' gradient, with 128 rows more for each sequence and heads rounded
    up to 32 channels; one float32 per query and head; and the gradients of keys and values for each
    head where heads share them.
    """
    rows = query.shape[0] + 128 * (cu_seqlens.shape[0] - 1)
    heads, width = query.shape[1:]
    sum_of_gradient = 4 * rows * heads * math.ceil(width / 32) * 32
    expanded = 2 * 2 * key.shape[0] * heads * width if key.shape[1] != heads else 0
    return sum_of_gradient + 4 * rows * heads + expanded


def workspaces() -> Mapping[Any, Callable[..., int]]:
    """Returns the bytes that kernels take meanwhile, by operation: functions of its arguments."""
    attention_kernels._varlen()  # defines the operation
    backward = torch.ops.torch_attn._varlen_attn_backward.default
    return {
        backward: lambda gradient, query, key, value, out, lse, cu_q, *rest: flash_backward_bytes(
            query, key, cu_q
        )
    }
