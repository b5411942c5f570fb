"""The attention kernels that this device has, forward and backward, against their definition in
float64.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from megatron.packing.model.attention.blocks import Scores, Segments
from megatron.packing.model.attention.core_attention import causal_attention

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
BLOCK = 256
"""Queries whose scores are in memory at once: of 8 heads and 32k keys 0.5 GiB in float64."""


class Case(NamedTuple):
    """Heads and what they attend to."""

    head_size: int = 128
    heads: int = 8
    groups: int = 8
    lengths: str = "chats"
    dtype: torch.dtype = BF16
    cp_rank: int | None = None
    """Of two; None without context parallel."""
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False

    def __str__(self) -> str:
        shape = f"{self.heads}x{self.head_size}-{self.groups}groups-{self.lengths}-"
        shape += str(self.dtype)[6:]
        shape += f"-window{self.window}" * (self.window is not None)
        shape += "-softcap" * (self.softcap is not None) + "-sinks" * self.sinks
        return shape if self.cp_rank is None else f"{shape}-cp{self.cp_rank}of2"


CASES = [
    *(Case(head_size) for head_size in (64, 72, 80, 96, 128, 160, 192, 256)),
    *(Case(head_size, groups=2, cp_rank=rank) for head_size in (64, 256) for rank in (0, 1)),
    *(
        Case(groups=groups, lengths=name)
        for groups in (8, 2, 1)
        for name in ("one token", "short", "chats", "long")
    ),
    *(Case(groups=groups, lengths="long", cp_rank=rank) for groups in (8, 1) for rank in (0, 1)),
    *(Case(groups=2, dtype=dtype, cp_rank=rank) for dtype in (FP16, FP32) for rank in (None, 1)),
    *(
        Case(64, groups=2, lengths=name, window=window, softcap=softcap, sinks=sinks, cp_rank=rank)
        for name in ("short", "chats")
        for window, softcap, sinks in ((16, None, False), (16, None, True), (None, 2.0, False))
        for rank in (None, 1)
        if name == "chats" or rank is None
    ),
]


def lengths_of(name: str, is_tiny: bool) -> tuple[int, ...]:
    """Of the sequences of a pack, in multiples of 4, as context parallel has them; but "one token"
    and "short".
    """
    random = np.random.default_rng(1)
    chats = 4 * np.exp(random.normal(4.0, 1.0, 6 if is_tiny else 64)).astype(int) + 4
    return {
        "one token": (1,),
        "short": (1, 2, 1, 3, 5, 8, 13, 1),
        "chats": tuple((chats // 32 * 4 + 4 if is_tiny else chats).tolist()),
        "long": (240,) if is_tiny else (32768,),
    }[name]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_attention_is_that_of_each_sequence_alone(case: Case, device: torch.device) -> None:
    """A kernel that looks into the next sequence, or misses the last key, still trains."""
    query_lengths = key_lengths = lengths_of(case.lengths, device.type == "cpu")
    if (
        case.cp_rank is not None
    ):  # of each sequence's four pieces it holds these two, which see all before them
        pieces = [
            (length // 4, number)
            for length in query_lengths
            for number in (case.cp_rank, 3 - case.cp_rank)
        ]
        query_lengths = tuple(piece for piece, _ in pieces)
        key_lengths = tuple((number + 1) * piece for piece, number in pieces)
    check(case, query_lengths, key_lengths, device)


def check(
    case: Case, query_lengths: tuple[int, ...], key_lengths: tuple[int, ...], device: torch.device
) -> None:
    generator = torch.Generator(device).manual_seed(1)

    def random(num_tokens: int, heads: int, size: int) -> Tensor:
        return torch.randn(num_tokens, heads, size, generator=generator, device=device).to(
            case.dtype
        )

    query, gradient = (random(sum(query_lengths), case.heads, case.head_size) for _ in range(2))
    both = random(
        sum(key_lengths), case.groups, 2 * case.head_size
    )  # as projections leave keys and values
    query.requires_grad_()
    both.requires_grad_()
    key, value = both.chunk(2, dim=-1)
    scale = case.head_size**-0.5
    scores = Scores(scale=scale, window=case.window, softcap=case.softcap)
    segments = Segments(query_lengths, key_lengths)
    sinks = torch.randn(case.heads, generator=generator, device=device).to(case.dtype)
    sinks.requires_grad_()
    out = causal_attention(query, key, value, segments, scores, sinks if case.sinks else None)
    out.backward(gradient)
    assert query.grad is not None
    assert both.grad is not None
    found = (out.detach(), query.grad, *both.grad.chunk(2, dim=-1))
    if case.sinks:
        assert sinks.grad is not None
        found = (*found, sinks.grad[None])
    tensors = (query.detach(), key.detach(), value.detach(), gradient)
    expected = exactly(tensors, segments, scores, sinks.detach() if case.sinks else None)
    rounding = torch.finfo(case.dtype).eps
    for number, (name, lengths, times) in enumerate(
        (
            ("output", query_lengths, 2),
            ("query's gradient", query_lengths, 8),
            ("key's gradient", key_lengths, 8),
            ("value's gradient", key_lengths, 2),
            *[("sinks' gradient", (1,), 8)] * case.sinks,
        )
    ):
        # In half precision the weights are rounded, once; in float32 it is the sums.
        most = rounding * (64 if case.dtype == FP32 else times)
        difference = relative_difference(found[number], expected[number], lengths)
        assert difference <= most, (
            f"{name}: {difference:.1e}, {difference / rounding:.1f} roundings"
        )


def relative_difference(found: Tensor, expected: Tensor, lengths: tuple[int, ...]) -> float:
    """The worst of the sequences: root mean square of the difference over that of what is expected,
    or over 1 where that is zero, as the gradients of queries that see one key.
    """
    assert found.isfinite().all()
    units = [rms(part) for part in expected.split(lengths)]
    parts = (found.double() - expected).split(lengths)
    return max(
        rms(part) / (unit if unit > 1e-12 else 1.0) for part, unit in zip(parts, units, strict=True)
    )


def rms(values: Tensor) -> float:
    return values.square().mean().sqrt().item()


def exactly(
    tensors: tuple[Tensor, ...], segments: Segments, scores: Scores, sinks: Tensor | None = None
) -> tuple[Tensor, ...]:
    """Output and the gradients of queries, keys, values and sinks in float64: softmax by its
    definition, and by its derivative.
    """
    scale, window, softcap = scores.scale, scores.window, scores.softcap
    query, key, value, gradient = (
        x.double().transpose(0, 1) for x in tensors
    )  # [heads, tokens, d]
    times = len(query) // len(key)
    key, value = (x.repeat_interleave(times, dim=0) for x in (key, value))
    results = [torch.zeros_like(x) for x in (query, query, key, value)]
    of_sinks = torch.zeros(len(query), dtype=torch.float64, device=query.device)
    query_end = key_end = 0
    for num_queries, num_keys in zip(*segments, strict=True):
        query_end, key_end = query_end + num_queries, key_end + num_keys
        for start in range(query_end - num_queries, query_end, BLOCK):
            rows = slice(start, min(start + BLOCK, query_end))
            keys = slice(
                key_end - num_keys, key_end - (query_end - rows.stop)
            )  # that the last of these queries sees
            q, k, v, g = query[:, rows], key[:, keys], value[:, keys], gradient[:, rows]
            num_rows, num_seen = q.shape[1], k.shape[1]
            hidden = torch.ones(num_rows, num_seen, dtype=torch.bool, device=q.device).triu(
                num_seen - num_rows + 1
            )
            if window is not None:
                hidden |= torch.ones_like(hidden).tril(num_seen - num_rows - window)
            raw, slope = scale * q @ k.mT, torch.ones((), device=q.device)
            if softcap is not None:
                raw = softcap * (raw / softcap).tanh()
                slope = 1 - (raw / softcap).square()
            raw = raw.masked_fill(hidden, -torch.inf)
            if sinks is not None:
                sink = sinks.double()[:, None, None].expand(-1, num_rows, 1)
                raw = torch.cat((raw, sink), dim=-1)
            weights = raw.softmax(-1)[..., :num_seen]
            of_weights = g @ v.mT
            mean = (weights * of_weights).sum(-1, keepdim=True)
            of_scores = scale * slope * weights * (of_weights - mean)
            if sinks is not None:
                of_sinks -= (raw.softmax(-1)[..., num_seen:] * mean).sum((1, 2))
            results[0][:, rows] = weights @ v
            results[1][:, rows] = of_scores @ k
            results[2][:, keys] += of_scores.mT @ q
            results[3][:, keys] += weights.mT @ g
    of_groups = [x.unflatten(0, (-1, times)).sum(1) for x in results[2:]]
    found = tuple(x.transpose(0, 1) for x in (*results[:2], *of_groups))
    return found if sinks is None else (*found, of_sinks[None])


def test_a_key_too_few_is_seen(device: torch.device) -> None:
    """Tolerances that let it pass would prove nothing."""
    generator = torch.Generator(device).manual_seed(1)
    tensors = tuple(torch.randn(40, 2, 64, generator=generator, device=device) for _ in range(4))
    scores = Scores(scale=0.125)
    whole = exactly(tensors, Segments.square((40,)), scores)
    query, key, value, gradient = tensors
    parts = (query[1:], key[:-1], value[:-1], gradient[1:])
    fewer = exactly(parts, Segments.square((39,)), scores)
    assert relative_difference(fewer[0], whole[0][1:], (39,)) > 8 * torch.finfo(BF16).eps
