"""tensor. Chooses what computes causal attention of a pack's segments; never a mask of T x T.

On CUDA in bf16 and fp16 it is one variable-length kernel: FlashAttention 4 where `flash-attn-4` is
installed and takes the layer, else torch's own. Elsewhere it is `scaled_dot_product_attention`
sequence by sequence, at the cost of the sum of squared lengths, or `blocks` for windows,
soft caps, sinks and pieces of sequences; on CUDA both are slow, and a warning says so once.

| on CUDA        | FlashAttention 4 | torch's varlen_attn       | else               |
|----------------|------------------|---------------------------|--------------------|
| plain, windows | yes              | windows from torch 2.11   | sequence or blocks |
| soft cap       | yes              | no                        | blocks             |
| sinks          | no               | by `attend`, torch 2.11   | blocks             |
| by groups      | no               | torch 2.11                | blocks             |
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, lru_cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

from megatron.packing.device import Device, to_device
from megatron.packing.model.attention.blocks import (
    BlockKernel,
    LogSumKernel,
    Scores,
    Segments,
    attend,
)
from megatron.packing.model.attention.zigzag import Lengths

Kernel = Callable[[Tensor, Tensor, Tensor, Segments, Scores, Tensor | None], Tensor]


def causal_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    segments: Segments,
    scores: Scores,
    sinks: Tensor | None = None,
    device: Device | None = None,
) -> Tensor:
    """Returns attention of packed segments: the last query of each segment sees all its keys, the
    one before all but one, and so on, as far back as the window of `scores`.

    query: [sum(query_lengths), heads, d]; key: [sum(key_lengths), groups, d]; value:
    [sum(key_lengths), groups, d_v]; sinks: [heads], scores of one more key without a value (see
    `attend`) -> [sum(query_lengths), heads, d_v]. device: whose kernels compute it; None for that
    of the tensors.
    """
    width, of_value = query.shape[-1], value.shape[-1]
    kernel = kernel_for(
        device or Device.at(query.device),
        query.dtype,
        max(width, of_value),
        torch.are_deterministic_algorithms_enabled(),
        Needs(scores.window is not None, scores.softcap is not None, sinks is not None),
    )
    if width != of_value and kernel is not _by_sequence:
        # Kernels take one width: channels of zeros add nothing to scores, and are cut off again.
        query, key = (pad(x, (0, max(of_value - width, 0))) for x in (query, key))
        value = pad(value, (0, max(width - of_value, 0)))
        return kernel(query, key, value, segments, scores, sinks)[..., :of_value]
    return kernel(query, key, value, segments, scores, sinks)


def log_sum_kernel(
    query: Tensor,
    value_width: int,
    segments: Segments,
    scores: Scores,
    *,
    has_sinks: bool = False,
    by_head: bool = False,
    device: Device | None = None,
) -> LogSumKernel:
    """Returns what computes `causal_attention` without sinks, forward and backward apart, for the
    heads of `query` [t, heads, d], all at once or some at a time.

    by_head: a variable-length kernel's backward pass is called for one query head at a time where
        heads share keys: its workspace is then one head's.
    """
    kernel = kernel_for(
        device or Device.at(query.device),
        query.dtype,
        max(query.shape[-1], value_width),
        torch.are_deterministic_algorithms_enabled(),
        Needs(scores.window is not None, scores.softcap is not None, has_sinks, is_apart=True),
    )
    if kernel is _by_sequence:
        return BlockKernel(segments, scores, num_heads=query.shape[1])
    return _VarlenKernel(segments, scores, by_head)


@dataclass(frozen=True)
class Needs:
    """Features that a layer asks of a kernel beside causal attention."""

    window: bool = False
    softcap: bool = False
    sinks: bool = False
    is_apart: bool = False
    """Forward and backward pass are called apart."""


@cache
def kernel_for(
    device: Device,
    dtype: torch.dtype,
    width: int,
    is_deterministic: bool,
    needs: Needs = Needs(),
) -> Kernel:
    """Returns the fastest kernel for heads of that width. Warns of slow ones on CUDA, once.

    is_deterministic: torch's own kernel has a backward pass that is the same to the bit each time.
    """
    if not device.is_gpu:
        return _by_sequence
    # FlashAttention 4 is for Hopper and later; its backward pass adds in no fixed order. With heads
    # of 80 channels 4.0.0b36 gave wrong gradients of queries on an H200.
    is_new = device.capability >= (9, 0) and width in (64, 96, 128) and not is_deterministic
    takes_flash_4 = is_new and not (needs.sinks or needs.is_apart) and _flash_4_installed()
    reasons = {
        f"heads of {width} channels: it takes 256 at most": width > 256,
        f"{str(dtype).removeprefix('torch.')}: it takes bfloat16; pass --bf16": dtype
        not in (torch.bfloat16, torch.float16),
        f"{device.name}: it takes compute capability 8.0 and later": device.capability < (8, 0),
        "soft caps of scores by groups; drop --query-groups-per-gather": needs.softcap
        and needs.is_apart,
        "soft caps of scores: FlashAttention 4 takes them; install flash-attn-4 on compute "
        "capability 9.0 or later": needs.softcap and not takes_flash_4,
        "windows or sinks in this torch, or groups apart; install torch 2.11 or later": (
            (needs.window or needs.sinks or needs.is_apart)
            and not takes_flash_4
            and not _varlen_takes_windows()
        ),
    }
    reason = next((reason for reason, holds in reasons.items() if holds), None)
    if reason is not None:
        warnings.warn(
            f"attention is computed sequence by sequence, which is slow: no kernel for {reason}",
            stacklevel=2,
        )
        return _by_sequence
    return _flash_4() if takes_flash_4 else _varlen()


def _by_sequence(
    q: Tensor, k: Tensor, v: Tensor, segments: Segments, scores: Scores, sinks: Tensor | None = None
) -> Tensor:
    query_lengths, key_lengths = segments
    window = scores.window if max(key_lengths) > (scores.window or 0) else None
    if (
        query_lengths != key_lengths
        or (window, scores.softcap, sinks) != (None, None, None)
        or v.shape[-1] != q.shape[-1]
    ):
        return attend(q, k, v, sinks, BlockKernel(segments, scores))
    # For grouped heads torch has one kernel only, which keeps all scores in memory: repeat them.
    if q.is_cuda and q.shape[1] != k.shape[1]:
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    out = []
    for parts in zip(q.split(query_lengths), k.split(key_lengths), v.split(key_lengths)):
        q1, k1, v1 = (x.transpose(0, 1).unsqueeze(0) for x in parts)
        attended = scaled_dot_product_attention(
            q1, k1, v1, is_causal=True, scale=scores.scale, enable_gqa=q.shape[1] != k.shape[1]
        )
        out.append(attended.squeeze(0).transpose(0, 1))
    return torch.cat(out)


@cache
def _varlen_takes_windows() -> bool:
    from torch.nn.attention.varlen import varlen_attn

    return "window_size" in inspect.signature(varlen_attn).parameters


@cache
def _varlen() -> Kernel:
    """Returns torch's kernel behind one signature; its own differs by release.

    Heads may share keys and values in all releases; 2.13 has an argument for it. No tensor is
    copied: rows need not be dense.
    """
    from torch.nn.attention.varlen import varlen_attn

    accepted = inspect.signature(varlen_attn).parameters

    def attend_plain(
        q: Tensor, k: Tensor, v: Tensor, segments: Segments, scores: Scores, sinks: Tensor | None
    ) -> Tensor:
        if sinks is not None:
            return attend(q, k, v, sinks, _VarlenKernel(segments, scores))
        options: dict[str, Any] = {"is_causal": True}
        if "window_size" in accepted:
            options = {"window_size": _window_of(scores)}
        if "enable_gqa" in accepted:
            options["enable_gqa"] = q.shape[1] != k.shape[1]
        if "scale" in accepted:
            options["scale"] = scores.scale
        else:  # the kernel divides by the root of the width itself
            q = q * (scores.scale * q.shape[-1] ** 0.5)
        attended = varlen_attn(q, k, v, *_places(segments, q.device), **options)
        assert isinstance(attended, Tensor)  # a tuple only with return_aux
        return attended

    return _of_multiples_of_8(attend_plain)


@dataclass(frozen=True)
class _VarlenKernel:
    """torch's kernel, forward and backward apart: its own autograd leaves out the gradient of the
    log of the sum of exponentials.
    """

    segments: Segments
    scores: Scores
    by_head: bool = False

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """See `LogSumKernel`."""
        from torch.nn.attention.varlen import AuxRequest, varlen_attn

        options: dict[str, Any] = {}
        if "enable_gqa" in inspect.signature(varlen_attn).parameters:
            options["enable_gqa"] = query.shape[1] != key.shape[1]
        width = _common_width(query, value)
        output, log_sum = varlen_attn(
            _widened(query, width),
            _widened(key, width),
            _widened(value, width),
            *_places(self.segments, query.device),
            return_aux=AuxRequest(lse=True),
            scale=self.scores.scale,
            window_size=_window_of(self.scores),
            **options,
        )
        return output[..., : value.shape[-1]], log_sum

    def backward(
        self, gradient: Tensor, inputs: tuple[Tensor, ...], output: Tensor, log_sum: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See `LogSumKernel`."""
        query, key, value = inputs
        per_group = query.shape[1] // key.shape[1]
        if not self.by_head or per_group == 1:
            return self._backward(gradient, inputs, output, log_sum)
        # For all heads at once the kernel makes gradients of keys and values for each of them, and
        # adds those of a group; it keeps a float32 sum of the queries' gradient besides.
        of_query = torch.empty_like(query)
        of_key, of_value = (torch.zeros_like(x, dtype=log_sum.dtype) for x in (key, value))
        for head in range(query.shape[1]):
            one, own = slice(head, head + 1), slice(head // per_group, head // per_group + 1)
            found = self._backward(
                gradient[:, one],
                (query[:, one], key[:, own], value[:, own]),
                output[:, one],
                log_sum[one],
            )
            of_query[:, one] = found[0]
            of_key[:, own] += found[1]
            of_value[:, own] += found[2]
            del found  # before the next head's are made
        return of_query, of_key.to(key.dtype), of_value.to(value.dtype)

    def _backward(
        self, gradient: Tensor, inputs: tuple[Tensor, ...], output: Tensor, log_sum: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        window, width = _window_of(self.scores), _common_width(inputs[0], inputs[2])
        found = torch.ops.torch_attn._varlen_attn_backward(
            _widened(gradient, width).contiguous(),
            *(_widened(x, width) for x in (*inputs, output)),
            log_sum,
            *_places(self.segments, gradient.device),
            is_causal=window == (-1, 0),
            # no dropout, so that its state is not read
            rng_state=torch.zeros(2, dtype=torch.uint64, device=gradient.device),
            scale=self.scores.scale,
            window_size=list(window),
        )
        of_query, of_key, of_value = (
            one[..., : x.shape[-1]] for one, x in zip(found, inputs, strict=True)
        )
        return of_query, of_key, of_value


def _common_width(query: Tensor, value: Tensor) -> int:
    """Returns the channels of heads that the kernel takes for both, a multiple of 8."""
    return -(-max(query.shape[-1], value.shape[-1]) // 8) * 8


def _widened(x: Tensor, width: int) -> Tensor:
    """Returns `x` with channels of zeros behind its own, which change no score and no sum."""
    return x if x.shape[-1] == width else pad(x, (0, width - x.shape[-1]))


def _window_of(scores: Scores) -> tuple[int, int]:
    """Returns how many keys before and after its own a query sees; -1 for all."""
    if not scores.is_causal:
        return -1, -1
    return (-1 if scores.window is None else scores.window - 1, 0)


def _places(segments: Segments, device: torch.device) -> tuple[Tensor, Tensor, int, int]:
    query_lengths, key_lengths = segments
    return (
        _on_device(query_lengths, device),
        _on_device(key_lengths, device),
        max(query_lengths),
        max(key_lengths),
    )


@cache
def _flash_4_installed() -> bool:
    return find_spec("flash_attn") is not None and find_spec("flash_attn.cute") is not None


@cache
def _flash_4() -> Kernel:
    from flash_attn.cute import flash_attn_varlen_func

    def attend_flash_4(
        q: Tensor, k: Tensor, v: Tensor, segments: Segments, scores: Scores, sinks: Tensor | None
    ) -> Tensor:
        assert sinks is None
        options: dict[str, Any] = {}
        if scores.window is not None:
            options["window_size"] = _window_of(scores)
        if scores.softcap is not None:
            options["softcap"] = scores.softcap
        names = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
        out, _ = flash_attn_varlen_func(
            q=q,
            k=k,
            v=v,
            **dict(zip(names, _places(segments, q.device))),
            softmax_scale=scores.scale,
            causal=True,
            **options,
        )
        return out

    return _of_multiples_of_8(attend_flash_4)


def _of_multiples_of_8(kernel: Kernel) -> Kernel:
    """Returns `kernel`, which takes heads of 8, 16, ... channels only, for heads of any width.

    Heads of 100 channels get 4 of zeros, which add nothing to a score. `scores.scale` stays that of
    100.
    """

    def attend_padded(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        segments: Segments,
        scores: Scores,
        sinks: Tensor | None = None,
    ) -> Tensor:
        width = q.shape[-1]
        if width % 8 == 0:
            return kernel(q, k, v, segments, scores, sinks)
        q, k, v = (pad(x, (0, -width % 8)) for x in (q, k, v))
        return kernel(q, k, v, segments, scores, sinks)[..., :width]

    return attend_padded


@lru_cache(maxsize=64)
def _on_device(lengths: Lengths, device: torch.device) -> Tensor:
    """Returns `cu_seqlens` of the lengths, int32: (3, 2) -> [0, 3, 5]. Cached, so that it is copied
    once per microbatch and not once per layer.
    """
    return to_device(
        torch.tensor((0, *lengths), dtype=torch.int32).cumsum(0, dtype=torch.int32), device
    )
