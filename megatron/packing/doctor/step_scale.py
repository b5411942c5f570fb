"""tensor. A step beside the loss: whether it is the gradient, and whether the reported loss is that
of the samples' own labels.

Let g be the change of a step of SGD. The loss falls along g by g g for each unit if g is its
gradient: the weights are moved along g, and the loss is computed from logits. Weights round what
they are moved by, so that what they really moved by counts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from megatron.packing.doctor.evidence import LossMistake
from megatron.packing.doctor.experiments import Examination
from megatron.packing.doctor.subject import Sample, Step, Subject

_DISTANCES = (0.004, 0.002, 0.0007, 0.0002)
"""Share of the loss by which the weights are moved along the step, both ways."""
_COARSE_DISTANCES = (0.2, 0.1, 0.05, 0.025)
"""The same in bfloat16, each half of the one before."""
_LOSS_MARGIN = 4
_LOSS_TOLERANCE = 1e-4


class MeasuredLoss(NamedTuple):
    """Loss of the samples' own labels, from logits."""

    value: float
    noise: float
    """What rounding may do to it, relatively; 0 where it was not measured."""


class Scale(NamedTuple):
    """A step beside the gradient of the loss."""

    factor: float
    noise: float
    """What rounding and the loss's bend may do to it."""


def products_of_steps(examination: Examination, steps: Sequence[Step]) -> Tensor:
    """Returns the products of each two steps' changes over all parameters, [steps, steps].

    A parameter of which ranks have copies counts once: the last step's change is the same on each,
    to the bit.
    """
    own: dict[tuple[float, float, int], list[list[float]]] = {}
    for name, change in steps[-1].change.items():
        vectors = torch.stack(
            [
                step.change[name].detach().double().flatten()
                if name in step.change
                else torch.zeros(change.numel(), dtype=torch.float64, device=change.device)
                for step in steps
            ]
        )
        table = vectors @ vectors.T
        key = float(table[-1, -1]), float(vectors[-1].sum()), change.numel()
        if key[0] != 0:  # NaN is told later
            own[key] = table.tolist()
    every = {
        key: table for of_rank in examination.probe.gather(own) for key, table in of_rank.items()
    }
    total = torch.zeros(len(steps), len(steps), dtype=torch.float64)
    for table in every.values():
        total += torch.tensor(table, dtype=torch.float64)
    return total


def measure_loss(
    examination: Examination, packs: Sequence[Sequence[Sample]], num_repeats: int
) -> MeasuredLoss:
    """Returns the mean loss of the packs, and how far repeats with other roundings are from it."""
    loss = _mean_loss(examination, packs)
    farthest = 0.0
    for seed in range(num_repeats):
        with examination.shaken(seed):
            farthest = max(farthest, abs(_mean_loss(examination, packs) - loss))
    return MeasuredLoss(loss, _LOSS_MARGIN * farthest / loss)


def measure_scale(
    examination: Examination,
    whole: Step,
    packs: Sequence[Sequence[Sample]],
    size: float,
    loss: MeasuredLoss,
) -> Scale:
    """Returns the step's change relative to the gradient.

    Without noise the distance counts at which it is nearest to 1: a clamp or a router's choice
    within one distance bends the loss, a wrong scale shows at each. One of two distances was too
    often bent: in gpt-oss, once in fifty runs.

    With noise, two neighbors count that have least of it and are least bent between them.
    """
    distances = _COARSE_DISTANCES if loss.noise else _DISTANCES
    with _moving(examination.subject, whole) as move:
        factors = [
            _factor(examination, whole, packs, move, share * loss.value / size)
            for share in distances
        ]
    if not loss.noise:
        return Scale(min(factors, key=lambda one: abs(one - 1)), 0.0)
    # Both losses of a distance round, and are 2 x share apart.
    noises = [loss.noise / (math.sqrt(2) * share) * abs(f) for share, f in zip(distances, factors)]
    scales = [
        Scale(nearer, noise + abs(nearer - farther))
        for (farther, nearer), noise in zip(pairwise(factors), noises[1:])
    ]
    return min(scales, key=lambda scale: scale.noise)


def _factor(
    examination: Examination,
    whole: Step,
    packs: Sequence[Sequence[Sample]],
    move: Callable[[float], Mapping[str, Tensor]],
    distance: float,
) -> float:
    """Returns how fast the loss would fall if the step were its gradient, beside how it falls."""
    losses, ways = [], []
    for factor in (-distance, distance):
        moved = Step(change=move(factor))
        ways.append(float(products_of_steps(examination, [moved, whole])[0, 1]))
        losses.append(_mean_loss(examination, packs))
    fall = losses[1] - losses[0]
    return (ways[1] - ways[0]) / fall if fall else math.inf


@contextmanager
def _moving(subject: Subject, step: Step) -> Iterator[Callable[[float], Mapping[str, Tensor]]]:
    """Yields what `Subject.move` is, and puts the weights back behind the block."""
    move = subject.move or _move_parameters(subject, step)
    try:
        yield move
    finally:
        move(0.0)


def _move_parameters(subject: Subject, step: Step) -> Callable[[float], Mapping[str, Tensor]]:
    parameters = {
        name: parameter
        for name, parameter in subject.model.named_parameters()
        if name in step.change
    }
    saved = {name: parameter.detach().clone() for name, parameter in parameters.items()}

    @torch.no_grad()
    def move(factor: float) -> Mapping[str, Tensor]:
        moved = {}
        for name, parameter in parameters.items():
            parameter.copy_(saved[name] + factor * step.change[name].to(parameter))
            moved[name] = parameter.double() - saved[name].double()
        return moved

    return move


def _losses(
    examination: Examination, packs: Sequence[Sequence[Sample]], shift: int = 1
) -> list[Tensor]:
    """Returns the cross entropy of each token with the one `shift` places on, [length - shift]."""
    losses = []
    for pack in packs:
        logits = examination.probe.logits([sample.tokens for sample in pack])
        for sample, values in zip(pack, logits):
            size = len(sample.tokens) - shift
            targets = sample.tokens[shift:]
            losses.append(-values[:size].log_softmax(1)[torch.arange(size), targets])
    return losses


def _mean_loss(examination: Examination, packs: Sequence[Sequence[Sample]]) -> float:
    samples = [sample for pack in packs for sample in pack]
    per_sequence = examination.subject.reduction == "sequence"
    count = sum(int(sample.trained.sum()) for sample in samples)
    total = 0.0
    for sample, of_token in zip(samples, _losses(examination, packs)):
        own = sample.trained[1:]
        part = sample.weight * float(of_token[own].sum())
        total += part / (int(own.sum()) * len(samples) if per_sequence else count)
    return total


def explain_loss(
    examination: Examination,
    packs: Sequence[Sequence[Sample]],
    reported: float,
    loss: MeasuredLoss,
) -> tuple[LossMistake, ...]:
    """Returns the mistakes with which the loss would be the reported one.

    Each is tried: fused losses put out no logits whose gradients would tell.
    """
    samples = [sample for pack in packs for sample in pack]
    losses = {shift: _losses(examination, packs, shift) for shift in (0, 1, 2)}
    trained = [of_token[sample.trained[1:]] for sample, of_token in zip(samples, losses[1])]
    # Name -> losses of the tokens of each sequence, and how many tokens each counts as.
    tried = {
        "prompt": (losses[1], [len(of_token) for of_token in losses[1]]),
        "last": ([part[:-1] for part in trained], [len(part) - 1 for part in trained]),
        "slots": (trained, [len(sample.tokens) for sample in samples]),
        "0": ([of[1:][sample.trained[1:]] for sample, of in zip(samples, losses[0])], None),
        "2": ([of[sample.trained[1:][: len(of)]] for sample, of in zip(samples, losses[2])], None),
        "sequence": ([part / len(part) for part in trained], [1] * len(samples)),
    }
    tolerance = max(_LOSS_TOLERANCE, loss.noise) * abs(loss.value)
    fitting = []
    for name, (parts, counted) in tried.items():
        counts = [len(part) for part in parts] if counted is None else counted
        total = sum(sample.weight * float(part.sum()) for sample, part in zip(samples, parts))
        if abs(total / sum(counts) - reported) < tolerance:
            fitting.append(LossMistake(name=name, num_trained=tuple(counts)))
    return tuple(fitting)
