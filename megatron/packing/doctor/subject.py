"""tensor. The thing under examination: anything that packs sequences and trains on them.

    subject = Subject(name="my trainer", model=model, vocab_size=1000, logits=logits)

where `logits(sequences, fill)` packs the sequences as the trainer does, runs the model, and returns
the logits of each sequence. All else is optional, and lets the doctor see more.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

LENGTHS = (11, 17, 13)
"""Tokens of the sequences of the doctor's pack. None is a multiple of 8, and their sum is prime, so
that a shape tells which of a tensor's dimensions is the stream of tokens.
"""


@dataclass(frozen=True, kw_only=True)
class Sample:
    """A sequence and the tokens of it that are to be trained."""

    tokens: Tensor
    """Token ids, int64 [length]."""
    trained: Tensor
    """True for tokens that are targets, bool [length]; the first token never is one."""
    weight: float = 1.0
    """Factor of its tokens' losses in the step's sum; the number that is divided by has none."""

    def mask(self) -> Tensor:
        """Returns what a data set says of the tokens, bool [length]: False for those of a prompt.

        The first token of a sequence without a prompt is True: to drop it is the trainer's task,
        and one that forgets it trains the token before, of another sequence.
        """
        has_prompt = not bool(self.trained[1:].all())
        return self.trained if has_prompt else torch.ones_like(self.trained)


@dataclass(frozen=True, kw_only=True)
class Step:
    """What one optimizer step did."""

    change: Mapping[str, Tensor]
    """Name -> what one step of SGD with learning rate 1 subtracts from the parameter, or from this
    rank's part of it. A parameter that ranks hold copies of is the same to the bit on each.
    """
    loss: float | None = None
    """The loss that the trainer reports for it."""
    norm: float | None = None
    """Norm of the gradients that the trainer reports, before it clips them."""
    copies: Mapping[str, str] = field(default_factory=dict)
    """Name of a change -> name of the parameter on all ranks that hold a copy of it."""
    replicas: tuple[tuple[int, ...], ...] = ()
    """Data-parallel replica of each sequence of each pack, where there are several."""


@dataclass(frozen=True, kw_only=True)
class Ranks:
    """Processes that hold parts of one subject. All of them call the doctor alike."""

    gather: Callable[[Any], list[Any]]
    """Takes a picklable value of names and numbers; returns that of each process, in their order.
    """
    is_first: bool = True
    """Whether this process writes the report."""


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A trainer and its model, as the doctor needs them.

    Every call must run in the mode of training (`model.train()`, caches as the trainer has them),
    and with autograd on.
    """

    name: str
    """Its name in the report."""
    model: nn.Module
    """Model whose modules are watched; of several pipeline stages a module that holds all."""
    vocab_size: int
    """Token ids below it may be fed."""
    logits: Callable[[Sequence[Tensor], int], list[Tensor]]
    """Takes token ids, int64 [length] of each sequence, and a token for all padding slots. Packs
    and runs them. Returns the logits of each sequence, [length, vocabulary], or its last hidden
    states, [length, hidden].
    """
    places: Callable[[Sequence[Tensor]], list[Tensor]] | None = None
    """Takes the same sequences. Returns the rows of each in the flattened stream of tokens, int64
    [length] (default: one after the other, without padding).
    """
    num_slots: Callable[[Sequence[Tensor]], int] | None = None
    """Takes the same sequences. Returns the rows of the flattened stream, padding included
    (default: the sum of lengths).
    """
    loss: Callable[[Sequence[Sequence[Sample]]], Tensor] | None = None
    """Takes packs of samples. Returns the scalar that the trainer minimises in one step over all
    of them, with the labels that it makes itself.
    """
    has_logits: bool = True
    """False if `logits` returns hidden states, as where a fused loss has no logits. Labels are then
    watched, and the reported loss is not compared. Without `head`, another width shows it.
    """
    masks_prompts: bool = True
    """Whether `loss` heeds `Sample.trained`; without it every token but the first is a target."""
    reduction: str = "token"
    """Scale that the trainer means to have: "token" (mean over all trained tokens of the step) or
    "sequence" (mean over sequences of their own means).
    """
    embedding: nn.Module | None = None
    """Module that turns tokens into vectors (default: the first nn.Embedding of a single process;
    several processes name it, where they have it).
    """
    head: nn.Module | None = None
    """Module whose output are the logits, where there is one."""
    windows: Mapping[str, int] = field(default_factory=dict)
    """Name of a layer -> tokens that its attention sees, itself included, as declared."""
    is_causal: bool = True
    """Whether a token must not see those after it."""
    step: Callable[[Sequence[Sequence[Sample]]], Step] | None = None
    """Takes packs of samples. Takes one optimizer step on all of them, with clipping off, and puts
    the weights back (default: the gradients of `loss`). The trainer may pack otherwise.
    """
    move: Callable[[float], Mapping[str, Tensor]] | None = None
    """Takes a factor. Sets the weights to those before the last step, plus that multiple of its
    change; 0 restores them. Returns what it added, under the names of the change (default: by
    parameters' names).
    """
    takes_weights: bool = False
    """Whether `step` heeds `Sample.weight`."""
    balances: bool = False
    """Whether the step has a balancing loss, which couples the sequences of a pack."""
    has_further_losses: bool = False
    """Whether tokens have losses beside those of their logits (multi-token prediction)."""
    shards: Callable[[Sequence[Tensor]], list[Tensor]] | None = None
    """Takes the same sequences. Returns the rows that this rank holds, int64 [rows], in each order
    in which tensors here have them (default: all rows, in order).
    """
    backward: Callable[[Sequence[Tensor], int, bool], None] | None = None
    """Takes sequences, the index of one, and whether only its last token counts. Packs and runs
    them, and then backward from a sum of that one's logits in which each has its own weight
    (default: by autograd, from `logits`).
    """
    ranks: Ranks | None = None
    """The processes that hold parts of it; None for this one alone."""
    num_copies: Mapping[str, int] = field(default_factory=dict)
    """Words for a wrong factor of the loss -> number, such as {"context-parallel ranks": 2}."""

    notes: Sequence[str] = ()
    """Limits of this subject, which the report tells."""

    def rows(self, sequences: Sequence[Tensor]) -> list[Tensor]:
        """Returns the rows of each sequence in the flattened stream, int64 [length]."""
        if self.places is not None:
            return self.places(sequences)
        ends = torch.tensor([len(tokens) for tokens in sequences]).cumsum(0).tolist()
        return [torch.arange(end - len(tokens), end) for tokens, end in zip(sequences, ends)]

    def slots(self, sequences: Sequence[Tensor]) -> int:
        """Returns the number of rows of the flattened stream, padding included."""
        return self.num_slots(sequences) if self.num_slots else sum(map(len, sequences))

    def orders(self, sequences: Sequence[Tensor]) -> list[Tensor]:
        """Returns the rows of the stream that tensors of this rank have, in each of their orders,
        int64 [rows].
        """
        if self.shards is not None:
            return self.shards(sequences)
        return [torch.arange(self.slots(sequences))]

    def embeds(self) -> nn.Module | None:
        """Returns the module that turns tokens into vectors, or None."""
        if self.embedding is not None or self.ranks is not None:
            return self.embedding
        found = (module for module in self.model.modules() if isinstance(module, nn.Embedding))
        return next(found, None)


def draw_pack(
    vocab_size: int, lengths: Sequence[int] = LENGTHS, seed: int = 1, lowest: int = 4
) -> list[Tensor]:
    """Returns random token ids, int64 [length] for each length; ids below `lowest` are left out,
    as they often stand for padding and ends.
    """
    generator = torch.Generator().manual_seed(seed)
    low = min(lowest, vocab_size - 2)
    return [torch.randint(low, vocab_size, (length,), generator=generator) for length in lengths]


def draw_other(tokens: Tensor, vocab_size: int, seed: int = 2) -> Tensor:
    """Returns token ids of which each differs from that of `tokens` at its place; same shape."""
    generator = torch.Generator().manual_seed(seed)
    low = min(4, vocab_size - 2)
    shift = torch.randint(1, vocab_size - low, tokens.shape, generator=generator)
    return low + (tokens - low + shift) % (vocab_size - low)


_WIDTH = 128
"""Inputs of a layer up to which `draw_weights` draws with the same deviation."""
_AS_INITIALISED = ("a_log", "dt_", "decay", "time_", ".d", "a_param", "lambda", "inv_freq", "alpha")
"""Parts of the names of parameters that make states decay: other values would hide them."""


@torch.no_grad()
def draw_weights(model: nn.Module, seed: int = 0, std: float = 0.2) -> None:
    """Replaces the weights of a model by random ones, in place.

    Initial weights hide faults: projections and adapters that begin with zero, and logits so small
    that nothing shows. Parameters of decays keep their values.
    """
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        lowered = f".{name.lower()}"
        if any(part in lowered for part in _AS_INITIALISED):
            continue
        if not parameter.is_floating_point():  # quantized
            continue
        noise = torch.randn(parameter.shape, generator=generator)
        if parameter.dim() >= 2:  # of wide layers smaller ones, or logits saturate
            value = std * min(1.0, math.sqrt(_WIDTH / parameter.shape[-1])) * noise
        elif lowered.endswith("weight"):  # of a norm
            value = 1 + 0.05 * noise
        else:
            value = 0.05 * noise
        parameter.copy_(value.to(parameter))
