"""pure. Shapes of a step's picture: packs and operations in lines, merged where too thin to see."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Literal, NamedTuple

Kind = Literal["pack", "forward", "backward"]


class Block(NamedTuple):
    """One or more packs, or an operation, in a line."""

    start: float
    end: float
    kind: Kind
    shade: float
    """0 to 1: share of the capacity that a pack fills, or cost of an operation over the costliest.
    """
    text: str
    cuts: tuple[float, ...] = ()
    """Starts of its sequences, without the first."""


class Line(NamedTuple):
    """A rank or a stage over time."""

    name: str
    blocks: list[Block]


def joined(blocks: Iterable[Block]) -> list[Block]:
    """Returns a pack's forward and backward pass as one block, where no time lies between them."""
    joined: list[Block] = []
    for block in blocks:
        last = joined[-1] if joined else None
        if last is not None and last.text == block.text and block.start - last.end < 1e-9:
            joined[-1] = last._replace(end=block.end)
        else:
            joined.append(block)
    return joined


def merged(blocks: Sequence[Block], finest: float) -> Iterator[Block]:
    """Yields neighbours thinner than `finest` as one block: at most about 2 / `finest` blocks."""
    pending: list[Block] = []
    for block in blocks:
        is_full = pending and pending[-1].end - pending[0].start >= finest
        if is_full or (pending and block.start - pending[-1].end > finest):
            yield _one(pending)
            pending = []
        pending.append(block)
    if pending:
        yield _one(pending)


def _one(blocks: Sequence[Block]) -> Block:
    """Returns one block in place of several, of the kind that takes most of the time."""
    if len(blocks) == 1:
        return blocks[0]
    widths = [block.end - block.start for block in blocks]
    shade = sum(block.shade * width for block, width in zip(blocks, widths)) / (sum(widths) or 1)
    kind = max(zip(widths, blocks), key=lambda pair: pair[0])[1].kind
    text = f"{len(blocks)} drawn together: {blocks[0].text} to {blocks[-1].text}"
    return Block(blocks[0].start, blocks[-1].end, kind, shade, text)
