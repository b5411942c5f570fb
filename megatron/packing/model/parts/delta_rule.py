"""tensor. The two steps of a gated delta net that mix tokens, each within its sequence: a short
causal convolution and the gated delta rule (arXiv 2412.06464).

The rule is a recurrence: a state S [d_k, d_v] per head decays, is asked for the value of a token's
key, and is corrected:

    S = exp(decay) S;  S = S + key (beta (value - key S))^T;  output = query S

On CUDA both are kernels of flash-linear-attention where that is installed (never run: on Hopper it
refuses the Triton of torch 2.11). Elsewhere the rule is computed in chunks of up to 64 tokens, all
chunks of a pack at once but for the state, which goes from chunk to chunk. Nothing passes from
sequence to sequence.
"""

from __future__ import annotations

import warnings
from functools import cache, lru_cache
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import silu

from megatron.packing.device import Device, to_device
from megatron.packing.model.attention.zigzag import Lengths, starts_of_tokens

_CHUNK = 64
_EPSILON = 1e-6
"""Added to the squared length of queries and keys, as flash-linear-attention and transformers do.
"""


class Inputs(NamedTuple):
    """Tensors of a pack's tokens for the gated delta rule."""

    query: Tensor
    """[t, key heads, d_k]; made of unit length, and divided by the root of d_k."""
    key: Tensor
    """[t, key heads, d_k]; made of unit length. A key head serves consecutive value heads."""
    value: Tensor
    """[t, value heads, d_v]."""
    decay: Tensor
    """[t, value heads]: logarithms, at most 0, in at least float32."""
    beta: Tensor
    """[t, value heads]: how far the state is corrected, from 0 to 1."""


def gated_delta_rule(inputs: Inputs, lengths: Lengths, device: Device | None = None) -> Tensor:
    """Returns the outputs [t, value heads, d_v] of sequences of `lengths` that stand one after the
    other, of the type of `inputs.value`. device: whose kernels compute it; None for that of the
    tensors.
    """
    device = device or Device.at(inputs.value.device)
    times = inputs.value.shape[1] // inputs.key.shape[1]
    if times > 1:
        query, key = (x.repeat_interleave(times, dim=1) for x in inputs[:2])
        inputs = inputs._replace(query=query, key=key)
    if has_kernels(device, inputs.value.dtype):
        out, _ = device.kernels("fla.ops.gated_delta_rule").chunk_gated_delta_rule(
            *(x.unsqueeze(0).contiguous() for x in inputs),
            use_qk_l2norm_in_kernel=True,
            cu_seqlens=_ends(lengths, inputs.value.device),
        )
        return out.squeeze(0)
    return _in_chunks(inputs, lengths)


def causal_convolution(
    x: Tensor, weight: Tensor, lengths: Lengths, device: Device | None = None
) -> Tensor:
    """Returns silu of each channel's convolution with its last tokens in the same sequence.

    x: [t, channels]; weight: [channels, width], of which the last is for the token itself. device:
    see `gated_delta_rule`.
    """
    device = device or Device.at(x.device)
    if has_kernels(device, x.dtype):
        out, _ = device.kernels("fla.modules.convolution").causal_conv1d(
            x.unsqueeze(0).contiguous(),
            weight,
            activation="silu",
            cu_seqlens=_ends(lengths, x.device),
        )
        return out.squeeze(0)
    # One shifted product per distance, instead of a convolution: it would run across the borders of
    # sequences. No token reaches further back than the longest sequence has tokens.
    out = x * weight[:, -1]
    for distance in range(1, min(weight.shape[1], max(lengths))):
        earlier = x[:-distance] * weight[:, -1 - distance]
        is_same = _reaches(lengths, distance, x.device)
        out = torch.cat((out[:distance], out[distance:] + earlier * is_same))
    return silu(out)


@cache
def has_kernels(device: Device, dtype: torch.dtype) -> bool:
    """Returns whether flash-linear-attention computes on that device; warns on CUDA, once, if it is
    not installed. Its rule refuses float32.
    """
    is_there = device.has_package("fla")
    if device.is_gpu and not is_there:
        warnings.warn(
            "gated delta nets are computed by plain torch, which is slow: install "
            "flash-linear-attention",
            stacklevel=2,
        )
    return device.is_gpu and is_there and dtype in (torch.bfloat16, torch.float16)


@lru_cache(maxsize=64)
def _reaches(lengths: Lengths, distance: int, device: torch.device) -> Tensor:
    """Returns bool [t - distance, 1]: whether a token's sequence holds the one so far before it."""
    starts = starts_of_tokens(lengths)
    is_same = torch.arange(distance, len(starts)) - distance >= starts[distance:]
    return to_device(is_same.unsqueeze(1), device)


@lru_cache(maxsize=64)
def _ends(lengths: Lengths, device: torch.device) -> Tensor:
    return to_device(torch.tensor((0, *(length for length in lengths if length))).cumsum(0), device)


class _Chunks(NamedTuple):
    """Cuts of sequences: the longest first, so that those that continue are always the first."""

    size: int
    num_chunks: int
    places: Tensor
    """int64 [t]: where each token stands among all chunks' tokens."""
    steps: tuple[tuple[int, int], ...]
    """(First chunk, end) of each step: chunks number n of all sequences that have one."""


@lru_cache(maxsize=64)
def _chunks(lengths: Lengths, device: torch.device) -> _Chunks:
    """Worked example: lengths (1, 5), chunks of 4: step 0 has the chunks of sequence 1, then 0;
    step 1 that of sequence 1. Tokens of sequence 0 stand at 4, those of 1 at 0 1 2 3 and 8.
    """
    size = min(_CHUNK, 1 << (max(lengths) - 1).bit_length())
    order = sorted(range(len(lengths)), key=lambda number: -lengths[number])
    counts = [-(-lengths[number] // size) for number in order]
    steps, first = [], 0
    for step in range(counts[0]):
        end = first + sum(count > step for count in counts)
        steps.append((first, end))
        first = end
    row = {number: place for place, number in enumerate(order)}
    # Chunk `step` of a sequence is chunk `steps[step][0] + row` of all; its tokens stand in a row.
    places = [
        torch.tensor([(steps[step][0] + row[number]) * size for step in range(-(-length // size))])
        .repeat_interleave(size)[:length]
        .add(torch.arange(length) % size)
        for number, length in enumerate(lengths)
        if length
    ]
    return _Chunks(size, first, to_device(torch.cat(places), device), tuple(steps))


def _in_chunks(inputs: Inputs, lengths: Lengths) -> Tensor:
    """Within a chunk, with G the sum of decays up to a token: what a token writes is

        u_i = beta_i (value_i - e^G_i key_i S - sum over j < i of e^(G_i - G_j) (key_i key_j) u_j)

    for the state S before the chunk: a triangular system for all u of a chunk, solved apart for the
    part without S and the part that S is multiplied by.
    """
    chunks = _chunks(lengths, inputs.value.device)
    query, key, value, decay, beta = (_cut(x, chunks) for x in inputs)
    query = query * (torch.rsqrt(_squares(query) + _EPSILON) * query.shape[-1] ** -0.5)
    key = key * torch.rsqrt(_squares(key) + _EPSILON)

    # All chunks at once: the writes of each, for any state S that it may begin with.
    total = decay.cumsum(-2)  # G; [chunks, heads, size, 1]
    # e^(G_i - G_j), 0 for later j. Masked before `exp`, which would overflow there.
    ratios = (total - total.mT).masked_fill(_later(chunks.size, total.device), -torch.inf).exp()
    # Two right-hand sides: the part without S, and what S is multiplied by.
    writes = torch.linalg.solve_triangular(
        (beta * (key @ key.mT) * ratios).tril(-1),
        beta * torch.cat((value, total.exp() * key), dim=-1),
        upper=False,
        unitriangular=True,
    )
    own_writes, reads = writes.split((value.shape[-1], key.shape[-1]), dim=-1)
    seen = (query @ key.mT) * ratios
    # What a token reads of S has decayed since the chunk's start; what it writes goes on decaying
    # until the chunk's end.
    queries, last = query * total.exp(), total[..., -1:, :]
    keys = key * (last - total).exp()

    # Chunk by chunk, as the state goes from one to the next. Sequences that have ended are the last
    # rows, so that a slice leaves those that continue.
    state = value.new_zeros(chunks.steps[0][1], value.shape[1], key.shape[-1], value.shape[-1])
    outputs = []
    for first, end in chunks.steps:
        here, state = slice(first, end), state[: end - first]
        written = own_writes[here] - reads[here] @ state
        outputs.append(queries[here] @ state + seen[here] @ written)
        state = state * last[here].exp() + keys[here].mT @ written
    out = torch.cat(outputs).transpose(1, 2).flatten(0, 1).index_select(0, chunks.places)
    return out.to(inputs.value.dtype)


def _cut(x: Tensor, chunks: _Chunks) -> Tensor:
    """[t, heads, d] or [t, heads] -> [chunks, heads, size, d or 1] in at least float32; zeros where
    a chunk has no token: they write nothing.
    """
    wide = x.to(torch.promote_types(x.dtype, torch.float32)).reshape(*x.shape[:2], -1)
    rows = wide.new_zeros(chunks.num_chunks * chunks.size, *wide.shape[1:])
    rows = rows.index_copy(0, chunks.places, wide)
    return rows.view(chunks.num_chunks, chunks.size, *wide.shape[1:]).transpose(1, 2)


def _squares(x: Tensor) -> Tensor:
    return x.square().sum(-1, keepdim=True)


@lru_cache(maxsize=8)
def _later(size: int, device: torch.device) -> Tensor:
    return torch.ones(size, size, dtype=torch.bool, device=device).triu(1)
