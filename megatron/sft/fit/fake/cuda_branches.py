"""mcore. Places at which a run on CUDA takes another way than one on CPU, and what a fake world
makes of them.

Fake tensors are on the CPU: a CPU build of torch makes no others. `BRANCHES` lists every place of
the trainer that asks for the device, with what the estimate does there. `replaced` gives the
replacements under which a fake world goes CUDA's way where memory depends on it. A test looks for
places that are not in the table.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Mapping
from types import SimpleNamespace
from typing import Any, Literal, NamedTuple

import torch
from megatron.core.fusions import fused_bias_swiglu
from megatron.core.tensor_parallel import layers
from torch import Tensor

from megatron.packing.model import grouped_experts
from megatron.packing.model.attention import kernels as attention_kernels
from megatron.packing.model.attention import zigzag
from megatron.packing.model.loss import cross_entropy
from megatron.packing.model.parts import known_parts
from megatron.sft.model import build, kernels

How = Literal["run", "described", "none"]
"""run: the fake world takes CUDA's way. described: bytes are computed beside the run. none: no
memory of the device depends on it.
"""


class Branch(NamedTuple):
    """One place that asks for the device."""

    where: str
    """module.function below `megatron`."""
    on_cuda: str
    how: How


BRANCHES = (
    Branch(
        "packing.model.attention.kernels.kernel_for",
        "torch's varlen kernel: q, k, v, its "
        "output and log-sum-exp are kept; its workspace is described",
        "run",
    ),
    Branch(
        "packing.model.attention.kernels._by_sequence",
        "float32, or heads of over 256 channels: "
        "keys and values repeated for each head; counted as on CPU",
        "none",
    ),
    Branch(
        "packing.model.attention.rotary._is_fused",
        "one kernel each way; its outputs are of the shapes of torch's, and it keeps as much",
        "none",
    ),
    Branch("packing.model.dispatcher._is_fused", "one kernel: its output is torch's", "none"),
    Branch(
        "packing.step.transformer_engine.transformer_engine_installed",
        "Transformer Engine's layers; the estimate is of layers without it",
        "none",
    ),
    Branch(
        "packing.model.get_batch._loss_rows",
        "rows that count are found on the host: 8 bytes for each, as on CPU",
        "none",
    ),
    Branch(
        "packing.model.parts.delta_rule.has_kernels",
        "kernels of flash-linear-attention: what they keep and make is described; "
        "in float32 plain torch",
        "described",
    ),
    Branch(
        "packing.model.loss.cross_entropy._add_product",
        "the weight's gradient is added up within the products of chunks, which are not held",
        "run",
    ),
    Branch(
        "packing.model.grouped_experts._is_for_grouped_mm",
        "in bfloat16 as on CPU; in float32 one product per expert",
        "run",
    ),
    Branch(
        "sft.model.mcore_fixes._recompute_without_a_compiler",
        "outputs share the memory of what is recomputed; counted as copied, as on CPU",
        "none",
    ),
    Branch("sft.model.needs.check_needs", "a check", "none"),
    Branch(
        "sft.model.kernels.kernels_for",
        "fused SwiGLU, loss and experts: kernels that keep their inputs, and make no more than "
        "their results",
        "run",
    ),
    Branch("sft.model.needs._check_optimizer", "a check", "none"),
    Branch(
        "sft.model.weight_gradients.add_product",
        "a weight's gradient is added within its product: what megatron-core returns in its place "
        "is as large",
        "run",
    ),
    Branch("sft.commands.chat.open_speaker", "no training step", "none"),
    Branch("packing.model.attention.zigzag.to_device", "indices are copied to the device", "run"),
    Branch("packing.model.pipeline.check_config", "a check", "none"),
    Branch("packing.batch.microbatches._split", "pinned memory of the host", "none"),
    Branch("packing.step.settings.cost_of", "the least cost of a pack, a time", "none"),
    Branch("packing.step.groups.device_of", "finds the device", "none"),
    Branch("packing.step.prefetch.Prefetcher.__init__", "finds the device", "none"),
    Branch(
        "packing.step.global_batch.PackedIterator.__init__",
        "two microbatches are on the device: one computed, one copied",
        "run",
    ),
    Branch("packing.plugin_checks.check_config", "a check", "none"),
    Branch("sft.model.cpu_support.install", "megatron-core as it is", "none"),
    Branch("sft.model.checkpoints.content._random_states", "random states, on the host", "none"),
    Branch(
        "sft.model.checkpoints.content._restore_random_states", "random states, on the host", "none"
    ),
    Branch(
        "sft.model.build.build_transformer_config",
        "weights are initialised where they are, "
        "and outputs of pipeline stages freed once they are sent",
        "run",
    ),
    Branch("sft.model.forward.padded_batches", "pinned memory of the host", "none"),
    Branch(
        "sft.model.checkpoints.save.CheckpointSave.__init__",
        "weights are copied to the host",
        "none",
    ),
    Branch("sft.training.reduction.SlotReduction.__init__", "pinned memory of the host", "none"),
    Branch("sft.training.reduction._Vector.__init__", "pinned memory of the host", "none"),
    Branch("sft.training.step_account.Stopwatch._mark", "events", "none"),
    Branch(
        "sft.distributed.process_groups",
        "NCCL instead of gloo: its buffers are in the margin",
        "described",
    ),
    Branch("sft.distributed._device", "finds the device", "none"),
    Branch("sft.distributed._check_gpus", "a check", "none"),
    Branch("sft.distributed._warn_of_other_ranks", "a warning", "none"),
    # Of torch, which asks by itself.
    Branch(
        "torch.nn.functional.rms_norm",
        "one kernel that keeps its input and one float32 per row",
        "run",
    ),
    Branch("torch.nn.functional.layer_norm", "two float32 per row are kept", "run"),
    Branch(
        "torch.optim.adam._default_to_fused_or_foreach",
        "all parameters at once, with a temporary of their size",
        "run",
    ),
)

_HALF = torch.bfloat16, torch.float16
ALLOCATION_BYTES = 512
"""torch's allocator on CUDA rounds each tensor up to a multiple of it."""


def replaced() -> Iterator[tuple[Any, str, Any]]:
    """Yields (owner, name, replacement) of what goes CUDA's way."""
    yield attention_kernels, "kernel_for", _kernel_for(attention_kernels.kernel_for)
    for name, module in list(sys.modules.items()):
        # Not by its name alone, which would be missed silently once it is renamed.
        its = getattr(module, zigzag.to_device.__name__, None)
        if name.startswith("megatron.packing.model.") and its is zigzag.to_device:
            yield module, zigzag.to_device.__name__, _copy
    for part in known_parts():
        yield from part.kernel_stand_ins()
    grouped = grouped_experts._is_for_grouped_mm
    yield (
        grouped_experts,
        "_is_for_grouped_mm",
        lambda x, *widths: x.dtype == torch.bfloat16 and grouped(x, *widths),
    )
    yield cross_entropy, "_add_product", _add_product
    yield torch.cuda, "current_device", lambda: torch.device("cpu")  # of layers with sinks
    yield build, "build_transformer_config", _for_cuda(build.build_transformer_config)
    yield build, "check_needs", _for_cuda(build.check_needs)
    yield build, "has_fused_permutation", lambda: False  # Transformer Engine's take no more
    yield kernels, "triton_fault", lambda: None
    yield cross_entropy, "fused", lambda: _FusedLoss
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


def _kernel_for(plain: Callable[..., Any]) -> Callable[..., Any]:
    """Chooses as the plain function does on a GPU of compute capability 8.0 or later, without
    FlashAttention 4.
    """

    def kernel(device: torch.device, dtype: torch.dtype, width: int, *rest: Any) -> Any:
        has_softcap = any(getattr(value, "softcap", False) for value in rest)
        if dtype in _HALF and width <= 256 and not has_softcap:
            return attention_kernels._varlen()
        return plain(device, dtype, width, *rest)

    return kernel


def _copy(values: Tensor, device: torch.device) -> Tensor:
    return values.clone()


def _add_product(total: Tensor | None, left: Tensor, right: Tensor, dtype: torch.dtype) -> Tensor:
    """Makes what CUDA's product makes: the sum, once."""
    if total is None:
        return left.new_empty((left.shape[0], right.shape[1]), dtype=dtype)
    return total


def _for_cuda(plain: Callable[..., Any]) -> Callable[..., Any]:
    def config_of(config: Any, device: torch.device, *arguments: Any, **options: Any) -> Any:
        return plain(config, torch.device("cuda"), *arguments, **options)

    return config_of


class _FusedLoss:
    """Allocates as the kernels of `fused_cross_entropy` do."""

    @staticmethod
    def row_statistics(logits: Tensor, labels: Tensor, num_words: int) -> tuple[Tensor, ...]:
        wide = torch.promote_types(logits.dtype, torch.float32)
        return tuple(torch.empty(3, len(logits), dtype=wide, device=logits.device))

    @staticmethod
    def write_gradients(*_: Any) -> None:
        """Over the logits."""


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
