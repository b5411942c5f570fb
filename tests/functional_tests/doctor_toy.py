"""A small trainer in which every fault of packing can be put back, for the doctor's proof."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

WIDTH, HEADS, VOCABULARY, MAX_POSITIONS = 24, 2, 61, 128


@dataclass
class Layout:
    """A pack as the layers see it, one value for each row of the stream."""

    segments: Tensor
    """Sequence of each row, -1 for padding."""
    positions: Tensor
    order: Tensor
    """Place of each row in time; causal masks go by it."""


@dataclass(frozen=True, kw_only=True)
class Fault:
    """What the toy trainer does wrong; nothing by default."""

    kinds: tuple[str, ...] = ("attention",) * 4
    """Mixer of each layer: attention, window, chunk, linear, conv, shifted, experts."""
    segments: Callable[[int, Tensor], Tensor] = lambda layer, segments: segments
    """Changes the borders that a layer sees."""
    conv_segments: Callable[[int, Tensor], Tensor] = lambda layer, segments: segments
    """Changes the borders that the short convolutions of a layer see."""
    window: int = 6
    window_in_packs: int | None = None
    mask: Callable[[Tensor], Tensor] = lambda mask: mask
    """Changes the mask of allowed pairs."""
    is_mask_added: bool = False
    """Adds the mask as ones and zeros to the scores."""
    learned_positions: bool = False
    temperature: bool = False
    """Scales scores by position."""
    positions: Callable[[Tensor, Tensor], Tensor] = lambda positions, order: positions
    dropout: float = 0.0
    keeps_state: bool = False
    backward_crosses: bool = False
    norm_over_pack: bool = False
    capacity: float | None = None
    align: int = 1
    """Rows of a sequence are a multiple of it; padding lies behind it, or before it."""
    pads_left: bool = False
    padding_joins: bool = False
    """Padding is part of its sequence."""
    zigzag: bool = False
    """Rows are in the order of two context-parallel ranks while layers run."""
    zigzag_swapped: bool = False


class _CrossingBackward(torch.autograd.Function):
    """Identity whose gradient is smeared over all rows."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:  # type: ignore[override]
        return x.clone()

    @staticmethod
    def backward(ctx, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient + 0.1 * gradient.mean(0, keepdim=True)


def allowed(layout: Layout, segments: Tensor) -> Tensor:
    """Returns which rows may see which, bool [rows, rows]; each sees itself."""
    same = segments[:, None] == segments[None]
    causal = layout.order[:, None] >= layout.order[None]
    return (same & causal) | torch.eye(len(segments), dtype=torch.bool)


def convolve(x: Tensor, weight: Tensor, segments: Tensor) -> Tensor:
    """Returns a causal depthwise convolution, [rows, width], within segments."""
    out = torch.zeros_like(x)
    for back in range(len(weight)):
        shifted = F.pad(x, (0, 0, back, 0))[: len(x)]
        before = F.pad(segments, (back, 0), value=-9)[: len(x)]
        out = out + weight[back] * shifted * (before == segments)[:, None].to(x.dtype)
    return out


class SelfAttention(nn.Module):
    def __init__(self, fault: Fault, kind: str, layer: int) -> None:
        super().__init__()
        self.fault, self.kind, self.layer = fault, kind, layer
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.taps = nn.Parameter(torch.randn(3, WIDTH))

    def forward(self, x: Tensor, layout: Layout) -> Tensor:
        fault = self.fault
        if self.kind == "shifted":
            x = convolve(x, self.taps, fault.conv_segments(self.layer, layout.segments))
        q, k, v = (
            each.unflatten(-1, (HEADS, -1)).transpose(0, 1) for each in self.qkv(x).chunk(3, -1)
        )
        mask = allowed(layout, fault.segments(self.layer, layout.segments))
        distance = (layout.order[:, None] - layout.order[None]).abs()
        window = fault.window
        if fault.window_in_packs is not None and len(layout.segments.unique()) > 1:
            window = fault.window_in_packs
        if self.kind == "window":
            mask = mask & (distance < window)
        if self.kind == "chunk":
            mask = mask & (layout.positions[:, None] // window == layout.positions[None] // window)
        mask = fault.mask(mask)
        scores = q @ k.transpose(1, 2) / math.sqrt(q.shape[-1])
        if fault.temperature:
            scores = scores * (1 + layout.positions[:, None] / 16).log1p().to(scores.dtype)
        scores = scores + mask if fault.is_mask_added else scores.masked_fill(~mask, -torch.inf)
        return self.out((scores.softmax(-1) @ v).transpose(0, 1).flatten(1))


class LinearAttention(nn.Module):
    """A state that decays, behind a short convolution."""

    def __init__(self, fault: Fault, layer: int) -> None:
        super().__init__()
        self.fault, self.layer = fault, layer
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.taps = nn.Parameter(torch.randn(4, WIDTH))

    def forward(self, x: Tensor, layout: Layout) -> Tensor:
        x = convolve(x, self.taps, self.fault.conv_segments(self.layer, layout.segments))
        q, k, v = self.qkv(x).chunk(3, -1)
        segments = self.fault.segments(self.layer, layout.segments)
        state, rows = torch.zeros_like(v[0]), []
        for at in range(len(x)):
            if at and segments[at] != segments[at - 1]:
                state = torch.zeros_like(state)
            state = 0.9 * state + torch.tanh(k[at]) * v[at]
            rows.append(q[at] * state)
        return self.out(torch.stack(rows))


class ShortConv(nn.Module):
    def __init__(self, fault: Fault, layer: int) -> None:
        super().__init__()
        self.fault, self.layer = fault, layer
        self.taps = nn.Parameter(torch.randn(4, WIDTH))

    def forward(self, x: Tensor, layout: Layout) -> Tensor:
        return convolve(x, self.taps, self.fault.conv_segments(self.layer, layout.segments))


class Experts(nn.Module):
    """One of three experts for each token, which drop what is above their capacity."""

    def __init__(self, fault: Fault) -> None:
        super().__init__()
        self.fault = fault
        self.router = nn.Linear(WIDTH, 3, bias=False)
        self.weight = nn.Parameter(torch.randn(3, WIDTH, WIDTH))

    def forward(self, x: Tensor, layout: Layout) -> Tensor:
        scores = self.router(x).softmax(-1)
        best, chosen = scores.max(-1)
        out = torch.zeros_like(x)
        for expert in range(3):
            rows = (chosen == expert).nonzero().flatten()
            if self.fault.capacity is not None:  # the highest scores stay
                room = int(self.fault.capacity * len(x) / 3)
                rows = rows[best[rows].argsort(descending=True)[:room]]
            out[rows] = (x[rows] @ self.weight[expert]) * best[rows][:, None]
        return out


class Block(nn.Module):
    def __init__(self, fault: Fault, kind: str, layer: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        if kind == "linear":
            self.linear_attn: nn.Module = LinearAttention(fault, layer)
        elif kind == "conv":
            self.conv: nn.Module = ShortConv(fault, layer)
        elif kind == "experts":
            self.experts: nn.Module = Experts(fault)
        else:
            self.self_attn: nn.Module = SelfAttention(fault, kind, layer)
        self.mixer_name = list(dict(self.named_children()))[-1]
        self.mlp_norm = nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 32), nn.GELU(), nn.Linear(32, WIDTH))

    def forward(self, x: Tensor, layout: Layout) -> Tensor:
        x = x + getattr(self, self.mixer_name)(self.norm(x), layout)
        return x + self.mlp(self.mlp_norm(x))


class NormOverPack(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x / x.std()


class Toy(nn.Module):
    """Takes tokens [rows] and their layout, returns logits [rows, VOCABULARY]."""

    def __init__(self, fault: Fault) -> None:
        super().__init__()
        self.fault = fault
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.position = nn.Parameter(torch.randn(MAX_POSITIONS, WIDTH))
        self.dropout = nn.Dropout(fault.dropout)
        self.layers = nn.ModuleList(
            Block(fault, kind, layer) for layer, kind in enumerate(fault.kinds)
        )
        self.norm: nn.Module = NormOverPack() if fault.norm_over_pack else nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.kept: Tensor | None = None

    def forward(self, tokens: Tensor, layout: Layout) -> Tensor:
        x = self.embedding(tokens)
        if self.fault.learned_positions:
            x = x + self.position[layout.positions]
        x = self.dropout(x)
        if self.fault.backward_crosses:
            x = _CrossingBackward.apply(x)
        if self.fault.keeps_state:
            before, self.kept = self.kept, x.detach().mean(0)
            x = x if before is None else x + before
        for layer in self.layers:
            x = layer(x, layout)
        self.balance = x.float().mean(0).softmax(0).pow(2).sum()
        return self.head(self.norm(x))


def place(fault: Fault, sequences: Sequence[Tensor]) -> tuple[list[Tensor], int]:
    """Returns rows of each sequence in its own order, and the number of all rows."""
    rows, start = [], 0
    for each in sequences:
        padded = -(-len(each) // fault.align) * fault.align
        first = start + padded - len(each) if fault.pads_left else start
        rows.append(torch.arange(first, first + len(each)))
        start += padded
    return rows, start


def lay_out(fault: Fault, sequences: Sequence[Tensor]) -> tuple[Layout, list[Tensor], int]:
    """Returns the layout of a pack, rows of its sequences and the number of rows."""
    rows, size = place(fault, sequences)
    segments = torch.full((size,), -1)
    positions = torch.zeros(size, dtype=torch.int64)
    start = 0
    for index, each in enumerate(rows):
        segments[each] = index
        positions[each] = torch.arange(len(each))
        if fault.padding_joins:
            segments[start : max(int(each[-1]) + 1, start)] = index
        start = int(each[-1]) + 1
    order = torch.arange(size)
    if fault.zigzag or fault.zigzag_swapped:  # halves of a sequence lie the other way round
        turned = []
        for each in rows:
            half = len(each) // 2
            turned.append(torch.cat([each[len(each) - half :], each[: len(each) - half]]))
            positions[turned[-1]] = torch.arange(len(each))
            if fault.zigzag:
                order[turned[-1]] = each
        rows = turned
    return Layout(segments, fault.positions(positions, order), order), rows, size
