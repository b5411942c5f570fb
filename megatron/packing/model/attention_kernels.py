"""tensor. What computes causal attention of a pack's segments, never with a mask of T x T.

On CUDA in bf16 and fp16 it is one variable-length kernel: FlashAttention 4 where `flash-attn-4` is
installed and takes the model, else torch's own. Elsewhere it is `scaled_dot_product_attention`
sequence by sequence, at the cost of the sum of squared lengths; on CUDA that is slow, and said
once. Of what is for CUDA, nothing has run on a GPU yet: the calls are checked against stand-ins.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable
from functools import cache, lru_cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

from megatron.packing.model.zigzag import Lengths, sent

Kernel = Callable[[Tensor, Tensor, Tensor, Lengths, Lengths, float], Tensor]


def causal_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_lengths: Lengths,
    key_lengths: Lengths,
    scale: float,
) -> Tensor:
    """Attention of packed segments: the last query of each segment sees all its keys, the one
    before all but one, and so on.

    query: [sum(query_lengths), heads, d]; key, value: [sum(key_lengths), groups, d] ->
    [sum(query_lengths), heads, d].
    """
    kernel = kernel_for(
        query.device, query.dtype, query.shape[-1], torch.are_deterministic_algorithms_enabled()
    )
    return kernel(query, key, value, query_lengths, key_lengths, scale)


@cache
def kernel_for(
    device: torch.device, dtype: torch.dtype, width: int, is_deterministic: bool
) -> Kernel:
    """The fastest there is for heads of that width. Warns of slow ones on CUDA, once.

    is_deterministic: torch's own kernel has a backward pass that is the same to the bit each time.
    """
    if device.type != "cuda":
        return _by_sequence
    capability = torch.cuda.get_device_capability(device)
    reasons = {
        f"heads of {width} channels: it takes 256 at most": width > 256,
        f"{str(dtype).removeprefix('torch.')}: it takes bfloat16; pass --bf16": dtype
        not in (torch.bfloat16, torch.float16),
        f"{torch.cuda.get_device_name(device)}: it takes compute capability 8.0 and "
        "later": capability < (8, 0),
    }
    for reason in (reason for reason, holds in reasons.items() if holds):
        warnings.warn(
            f"attention is computed sequence by sequence, which is slow: no kernel for {reason}",
            stacklevel=2,
        )
        return _by_sequence
    if capability >= (9, 0) and width <= 128 and not is_deterministic and _flash_4_installed():
        return _flash_4()
    return _varlen()


def _by_sequence(
    q: Tensor, k: Tensor, v: Tensor, query_lengths: Lengths, key_lengths: Lengths, scale: float
) -> Tensor:
    if (
        q.is_cuda and q.shape[1] != k.shape[1]
    ):  # with groups of heads only one that has all scores in memory is left
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    out = []
    segments = zip(q.split(query_lengths), k.split(key_lengths), v.split(key_lengths))
    for queries, keys, values in segments:
        is_square = len(queries) == len(keys)
        q1, k1, v1 = (x.transpose(0, 1).unsqueeze(0) for x in (queries, keys, values))
        attended = scaled_dot_product_attention(
            q1,
            k1,
            v1,
            attn_mask=None
            if is_square
            else _bottom_right_causal(len(queries), len(keys), q.device),
            is_causal=is_square,
            scale=scale,
            enable_gqa=q.shape[1] != k.shape[1],
        )
        out.append(attended.squeeze(0).transpose(0, 1))
    return torch.cat(out)


def _bottom_right_causal(num_queries: int, num_keys: int, device: torch.device) -> Tensor:
    return torch.ones(num_queries, num_keys, dtype=torch.bool, device=device).tril(
        num_keys - num_queries
    )


@cache
def _varlen() -> Kernel:
    """torch's kernel behind one signature; its own differs by release.

    Heads may share keys and values in all releases; 2.13 wants to be told. No tensor is copied:
    rows need not be dense.
    """
    from torch.nn.attention.varlen import varlen_attn

    accepted = inspect.signature(varlen_attn).parameters
    causal = {"window_size": (-1, 0)} if "window_size" in accepted else {"is_causal": True}

    def attend(
        q: Tensor, k: Tensor, v: Tensor, query_lengths: Lengths, key_lengths: Lengths, scale: float
    ) -> Tensor:
        options: dict[str, Any] = dict(causal)
        if "enable_gqa" in accepted:
            options["enable_gqa"] = q.shape[1] != k.shape[1]
        if "scale" in accepted:
            options["scale"] = scale
        else:
            q = q * (scale * q.shape[-1] ** 0.5)
        cu_seqlens = _on_device(query_lengths, q.device), _on_device(key_lengths, q.device)
        attended = varlen_attn(
            q, k, v, *cu_seqlens, max(query_lengths), max(key_lengths), **options
        )
        assert isinstance(attended, Tensor)  # a tuple only with return_aux
        return attended

    return _of_multiples_of_8(attend)


@cache
def _flash_4_installed() -> bool:
    return find_spec("flash_attn") is not None and find_spec("flash_attn.cute") is not None


@cache
def _flash_4() -> Kernel:
    from flash_attn.cute import flash_attn_varlen_func

    def attend(
        q: Tensor, k: Tensor, v: Tensor, query_lengths: Lengths, key_lengths: Lengths, scale: float
    ) -> Tensor:
        out, _ = flash_attn_varlen_func(
            q=q,
            k=k,
            v=v,
            cu_seqlens_q=_on_device(query_lengths, q.device),
            cu_seqlens_k=_on_device(key_lengths, q.device),
            max_seqlen_q=max(query_lengths),
            max_seqlen_k=max(key_lengths),
            softmax_scale=scale,
            causal=True,
        )
        return out

    return _of_multiples_of_8(attend)


def _of_multiples_of_8(kernel: Kernel) -> Kernel:
    """`kernel`, which takes heads of such widths only, for heads of any: zeros add nothing to a
    score.
    """

    def attend(
        q: Tensor, k: Tensor, v: Tensor, query_lengths: Lengths, key_lengths: Lengths, scale: float
    ) -> Tensor:
        width = q.shape[-1]
        if width % 8 == 0:
            return kernel(q, k, v, query_lengths, key_lengths, scale)
        q, k, v = (pad(x, (0, -width % 8)) for x in (q, k, v))
        return kernel(q, k, v, query_lengths, key_lengths, scale)[..., :width]

    return attend


@lru_cache(maxsize=64)
def _on_device(lengths: Lengths, device: torch.device) -> Tensor:
    """int32 running sum; cached, so that the copy is made once per microbatch and not once per
    layer.
    """
    return sent(torch.tensor((0, *lengths), dtype=torch.int32).cumsum(0, dtype=torch.int32), device)
