"""tensor. Runs a subject while watching or disturbing its modules.

A module is disturbed within a run of the whole model, which is stopped behind it: whatever the
module is given (masks, caches, layouts) is what the model gives it. Rows of a tensor are those of
the flattened stream of tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from megatron.packing.doctor.subject import Subject
from megatron.packing.doctor.unusable import check_logits


class Rows(NamedTuple):
    """Rows of the stream that a tensor of this rank has."""

    values: Tensor
    """[rows, everything else]."""
    places: Tensor | None
    """Their places in the stream, int64 [rows]; None for all of it, in order."""


Trace = dict[str, tuple[list[Rows], list[Rows]]]
"""Name of a module -> rows of its inputs and of its outputs, in the order in which modules end."""


class _Stop(Exception):
    """Ends a run behind the module that was asked for."""


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yields the floating-point tensors in nested tuples, lists, mappings and dataclasses."""
    if isinstance(value, Tensor):
        if value.is_floating_point():
            yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from tensors_in(item)
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_in(item)


def stream_dimension(shape: Sequence[int], num_slots: int) -> tuple[int, int] | None:
    """Returns the first dimension of the stream of tokens and how many dimensions it takes.

    (1, 41, 64) of 41 rows -> (1, 1); (3, 17, 64) of 51 rows -> (0, 2); None if no dimension is it,
    or two could be, as in a mask of [41, 41].
    """
    single = [place for place, size in enumerate(shape) if size == num_slots]
    if single:
        return (single[0], 1) if len(single) == 1 else None
    pairs = [
        place
        for place in range(len(shape) - 1)
        if shape[place] * shape[place + 1] == num_slots and 1 not in shape[place : place + 2]
    ]
    return (pairs[0], 2) if pairs == [0] else None


def as_rows(tensor: Tensor, num_slots: int) -> Tensor | None:
    """Returns the tensor as [rows, everything else], or None if it has no rows of the stream."""
    place = stream_dimension(tensor.shape, num_slots)
    if place is None:
        return None
    first, count = place
    if count == 1:
        return tensor.movedim(first, 0).reshape(num_slots, -1)
    return tensor.reshape(num_slots, -1)


def _disturbed(value: Any, rows: Tensor, orders: Sequence[Tensor], seed: int) -> Any:
    """Returns a copy of an argument in which some rows are random, of their own size.

    Tensors within tuples stay as they are: they are tables of positions.
    """
    if not isinstance(value, Tensor) or not value.is_floating_point():
        return value
    for order in orders:
        num_slots = len(order)
        if (place := stream_dimension(value.shape, num_slots)) is not None:
            break
    else:
        return value
    rows = torch.isin(order, rows).nonzero().flatten()  # as numbered on this rank
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(value.shape, generator=generator, dtype=torch.float32).to(value)
    scale = value.detach().float().pow(2).mean().sqrt().to(value)
    keep = torch.ones(num_slots, dtype=torch.bool, device=value.device)
    keep[rows.to(value.device)] = False
    first, count = place
    shape = [1] * value.dim()
    for dimension in range(first, first + count):
        shape[dimension] = value.shape[dimension]
    return torch.where(keep.reshape(shape), value, 2 * scale * noise)


class Probe:
    """Runs of one subject, all with the same seed.

    Counts forward passes in `num_forwards`; those that are stopped half-way count, too.
    """

    def __init__(self, subject: Subject) -> None:
        self.subject = subject
        self.num_forwards = 0
        self.num_backwards = 0
        self.modules = dict(subject.model.named_modules())
        self.names = {
            module: name for name, module in self.modules.items() if name
        }  # a module that is used twice has one name

    def logits(
        self, sequences: Sequence[Tensor], fill: int = 0, *, seed: int | None = 0
    ) -> list[Tensor]:
        """Returns the logits of each sequence, detached, float64 [length, vocabulary]."""
        with torch.no_grad():
            return [
                logits.detach().double().cpu() for logits in self.run(sequences, fill, seed=seed)
            ]

    def run(
        self, sequences: Sequence[Tensor], fill: int = 0, *, seed: int | None = 0
    ) -> list[Tensor]:
        """Returns the subject's logits.

        Raises:
            Unusable: if they are not one tensor of floats for each sequence, of its length.
        """
        if seed is not None:
            torch.manual_seed(seed)
        self.num_forwards += 1
        logits = self.subject.logits(sequences, fill)
        check_logits(self.subject, logits, sequences)
        return logits

    def coarsest(self, sequences: Sequence[Tensor], dtype: torch.dtype) -> torch.dtype:
        """Returns the precision in which the model computes, by one run: the coarsest of its
        modules' outputs, such as bfloat16 within autocast, or `dtype` if none is coarser.
        """
        found = {dtype}

        def hook(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            found.update(tensor.dtype for tensor in tensors_in(output))

        with ExitStack() as hooks:
            for module in self.names:
                hooks.enter_context(hooked(module, hook))
            self.logits(sequences)
        found = {one for of_rank in self.gather(found) for one in of_rank}
        return max(found, key=lambda one: torch.finfo(one).eps)

    @torch.no_grad()
    def trace(
        self, sequences: Sequence[Tensor], *, fill: int = 0, only: Sequence[str] = ()
    ) -> Trace:
        """Returns the rows of all modules' inputs and outputs in one run.

        Args:
            sequences: token ids of the pack.
            fill: token for padding slots.
            only: names of the modules to record; all where it is empty.
        """
        found: Trace = {}
        orders = self.subject.orders(sequences)

        def hook(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            name = self.names[module]
            if name in found:  # of a module that runs several times the first run counts
                return
            found[name] = _kept_rows([args, kwargs], orders), _kept_rows(output, orders)

        with ExitStack() as hooks:
            for module, name in self.names.items():
                if not only or name in only:
                    hooks.enter_context(hooked(module, hook))
            self.run(sequences, fill)
        return found

    def output(
        self, sequences: Sequence[Tensor], name: str, rows: Tensor | None = None, seed: int = 3
    ) -> list[Rows]:
        """Returns the rows that a module puts out, after some rows of its inputs were replaced; []
        where another rank has it.

        Args:
            sequences: token ids of the pack.
            name: the module. The run ends behind it, unless other ranks take part in it.
            rows: rows of its inputs to replace by random ones, int64; None leaves all.
            seed: for the random rows.
        """
        subject = self.subject
        orders = subject.orders(sequences)
        found: list[Rows] = []
        num_calls = 0

        def disturb(_: nn.Module, args: Any, kwargs: Any) -> Any:
            if rows is None:
                return None
            return (
                tuple(_disturbed(argument, rows, orders, seed) for argument in args),
                {key: _disturbed(item, rows, orders, seed) for key, item in kwargs.items()},
            )

        def collect(_: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            nonlocal num_calls
            num_calls += 1
            if num_calls > 1:
                return
            found.extend(_kept_rows(output, orders))
            if subject.ranks is None:
                raise _Stop

        with ExitStack() as hooks, torch.no_grad():
            if (module := self.modules.get(name)) is not None:
                before = module.register_forward_pre_hook(disturb, with_kwargs=True)
                hooks.callback(before.remove)
                hooks.enter_context(hooked(module, collect))
            with suppress(_Stop):
                self.run(sequences)
        return found

    def changed(
        self, before: Sequence[Rows], after: Sequence[Rows], slots: int, exact: float = 0.0
    ) -> Tensor:
        """Returns what `changed_rows` does, of all ranks together."""
        mask = changed_rows(before, after, slots, exact)
        if self.subject.ranks is None:
            return mask
        masks = [torch.tensor(rows) for rows in self.gather(mask.tolist()) if rows]
        return torch.stack(masks).any(0) if masks else torch.zeros(0, dtype=torch.bool)

    def gather(self, value: Any) -> list[Any]:
        """Returns the value of each rank; they are names and numbers."""
        ranks = self.subject.ranks
        return [value] if ranks is None else ranks.gather(value)


def _kept_rows(value: Any, orders: Sequence[Tensor]) -> list[Rows]:
    """Returns copies of the rows of the stream in nested tensors."""
    return [
        Rows(rows.values.detach().clone(), rows.places)
        for tensor in tensors_in(value)
        if (rows := local_rows(tensor, orders)) is not None
    ]


def local_rows(tensor: Tensor, orders: Sequence[Tensor]) -> Rows | None:
    """Returns the rows of a tensor that holds this rank's part of the stream, in one of its orders;
    None if it has no rows of the stream.
    """
    for order in orders:
        if (rows := as_rows(tensor, len(order))) is not None:
            return Rows(rows, order)
    return None


@contextmanager
def hooked(module: nn.Module, hook: Any) -> Iterator[None]:
    """Sets a forward hook (with keyword arguments) within the block."""
    handle = module.register_forward_hook(hook, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()


def changed_rows(
    before: Sequence[Rows], after: Sequence[Rows], slots: int, exact: float = 0.0
) -> Tensor:
    """Returns which rows of the stream differ by more than `exact`, relative to the largest value;
    bool [slots], or [0] if there are no rows. NaN in both counts as equal.
    """
    changed: Tensor | None = None
    for (one, index), (other, _) in zip(before, after):
        if one.shape != other.shape or not one.numel():
            continue
        wide = torch.promote_types(one.dtype, torch.float32)
        one, other = one.to(wide), other.to(wide)
        difference = (one - other).abs()
        same = (one == other) | (one.isnan() & other.isnan())
        limit = exact * float(one.nan_to_num(0, 0, 0).abs().max())
        part = (((difference > limit) | difference.isnan()) & ~same).any(1).cpu()
        rows = torch.zeros(slots, dtype=torch.bool)
        rows[slice(None) if index is None else index] = part
        changed = rows if changed is None else changed | rows
    return torch.zeros(0, dtype=torch.bool) if changed is None else changed
