"""tensor. Runs a subject while watching or disturbing its modules.

A module is disturbed within a run of the whole model, which is stopped behind it: whatever the
module is given (masks, caches, layouts) is what the model gives it. Rows of a tensor are those of
the flattened stream of tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from megatron.packing.doctor.subject import Subject

Trace = dict[str, tuple[list[Tensor], list[Tensor]]]
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


def _disturbed(value: Any, rows: Tensor, num_slots: int, seed: int) -> Any:
    """Returns a copy of an argument in which some rows are random, of their own size.

    Tensors within tuples stay as they are: they are tables of positions.
    """
    if not isinstance(value, Tensor) or not value.is_floating_point():
        return value
    if (place := stream_dimension(value.shape, num_slots)) is None:
        return value
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
        self.names = {
            module: name for name, module in subject.model.named_modules() if name
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
            ValueError: if they do not have the lengths of the sequences.
        """
        if seed is not None:
            torch.manual_seed(seed)
        self.num_forwards += 1
        logits = self.subject.logits(sequences, fill)
        lengths = [len(values) for values in logits]
        if lengths != (expected := [len(tokens) for tokens in sequences]):
            raise ValueError(
                f"{self.subject.name}: logits(sequences, fill) returned tensors of lengths "
                f"{lengths} for sequences of {expected} tokens; return "
                "one tensor [length, vocabulary] for each sequence, without its padding"
            )
        return logits

    @torch.no_grad()
    def trace(self, sequences: Sequence[Tensor], *, only: Sequence[str] = ()) -> Trace:
        """Returns the rows of all modules' inputs and outputs in one run.

        Args:
            sequences: token ids of the pack.
            only: names of the modules to record; all where it is empty.
        """
        found: Trace = {}
        slots = self.subject.slots(sequences)

        def hook(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            name = self.names[module]
            if name in found:  # of a module that runs several times the first run counts
                return
            found[name] = tuple(  # type: ignore[assignment]
                [
                    rows.detach().clone()
                    for tensor in tensors_in(value)
                    if (rows := as_rows(tensor, slots)) is not None
                ]
                for value in ([args, kwargs], output)
            )

        with ExitStack() as hooks:
            for module, name in self.names.items():
                if not only or name in only:
                    hooks.enter_context(hooked(module, hook))
            self.run(sequences)
        return found

    def output(
        self, sequences: Sequence[Tensor], name: str, rows: Tensor | None = None, seed: int = 3
    ) -> list[Tensor]:
        """Returns the rows that a module puts out, after some rows of its inputs were replaced.

        Args:
            sequences: token ids of the pack.
            name: the module. The run ends behind it.
            rows: rows of its inputs to replace by random ones, int64; None leaves all.
            seed: for the random rows.
        """
        slots = self.subject.slots(sequences)
        module = self.subject.model.get_submodule(name)
        found: list[Tensor] = []

        def disturb(_: nn.Module, args: Any, kwargs: Any) -> Any:
            if rows is None:
                return None
            return (
                tuple(_disturbed(argument, rows, slots, seed) for argument in args),
                {key: _disturbed(item, rows, slots, seed) for key, item in kwargs.items()},
            )

        def collect(_: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            for tensor in tensors_in(output):
                if (part := as_rows(tensor, slots)) is not None:
                    found.append(part.detach().clone())
            raise _Stop

        before = module.register_forward_pre_hook(disturb, with_kwargs=True)
        behind = module.register_forward_hook(collect, with_kwargs=True)
        try:
            with torch.no_grad():
                self.run(sequences)
        except _Stop:
            pass
        finally:
            before.remove()
            behind.remove()
        return found


@contextmanager
def hooked(module: nn.Module, hook: Any) -> Iterator[None]:
    """Sets a forward hook (with keyword arguments) within the block."""
    handle = module.register_forward_hook(hook, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()


def changed_rows(before: Sequence[Tensor], after: Sequence[Tensor], exact: float = 0.0) -> Tensor:
    """Returns which rows differ by more than `exact`, relative to the largest value; bool [rows].

    NaN in both counts as equal.
    """
    changed: Tensor | None = None
    for one, other in zip(before, after):
        if one.shape != other.shape or not one.numel():
            continue
        wide = torch.promote_types(one.dtype, torch.float32)
        one, other = one.to(wide), other.to(wide)
        difference = (one - other).abs()
        same = (one == other) | (one.isnan() & other.isnan())
        limit = exact * float(one.nan_to_num(0, 0, 0).abs().max())
        rows = ((difference > limit) | difference.isnan()) & ~same
        part = rows.any(1).cpu()
        changed = part if changed is None else changed | part
    return torch.zeros(0, dtype=torch.bool) if changed is None else changed
