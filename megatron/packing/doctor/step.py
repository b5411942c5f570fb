"""tensor. One optimizer step beside the sum of its sequences' own steps, and beside the loss.

Of parameters only sums of products are used, so that between ranks nothing else travels. Let g be
the change of a step of SGD, g_i that of a step on sequence i alone, and L the loss that logits and
the samples' own labels give:

- g = sum a_i g_i by least squares: a_i says how much a sequence counts;
- the slope of L along g is g g where g is the gradient of L: their ratio is the step's scale;
- the norm that the trainer reports is the root of g g.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from megatron.packing.doctor.evidence import Evidence, SequenceShare, StepEvidence
from megatron.packing.doctor.experiments import Examination
from megatron.packing.doctor.subject import Sample, Step, Subject

WEIGHTS = (1.0, 0.5, 2.0, 1.25, 0.75)
"""Weights of the examined step's samples, in turn."""
_SLOPE_STEPS = (0.004, 0.002, 0.0007, 0.0002)
"""Share of the loss by which the weights are moved along the step, both ways."""
_DTYPES = (torch.float32, torch.float64)


def examine_step(
    examination: Examination, evidence: Evidence, packs: Sequence[Sequence[Sample]]
) -> None:
    """Takes one step on all packs, and one on each sequence alone."""
    subject = examination.subject
    if subject.step is None and subject.loss is None:
        return
    if examination.dtype not in _DTYPES:
        evidence.notes.append("step: not examined in this precision; examine in float32, too")
        return
    if subject.takes_weights:
        weights = iter(WEIGHTS)
        packs = [[replace(sample, weight=next(weights, 1.0)) for sample in pack] for pack in packs]
    samples = [sample for pack in packs for sample in pack]
    singles = [_step(examination, [[replace(sample, weight=1.0)]]) for sample in samples]
    whole = _step(examination, packs)
    products = _products(examination, [whole, *singles])
    size = float(products[0, 0])
    if not size > 0:
        evidence.notes.append("step: it changes nothing, so it is not examined")
        return
    shares = torch.linalg.lstsq(products[1:, 1:], products[1:, :1]).solution[:, 0]
    left = float(products[0, 0] - shares @ products[1:, 0]) / size
    losses = _losses(examination, packs)
    loss = _mean_loss(samples, losses, subject.reduction)
    scale = _scale(examination, whole, packs, size, loss)
    count = sum(int(sample.trained.sum()) for sample in samples)
    per_sequence = subject.reduction == "sequence"
    places = [(p, s) for p, pack in enumerate(packs) for s in range(len(pack))]
    replicas = [number for pack in whole.replicas for number in pack]
    own = StepEvidence(
        shares=tuple(
            SequenceShare(
                pack=pack,
                sequence=sequence,
                replica=replicas[index] if replicas else 0,
                num_trained=int(sample.trained.sum()),
                weight=sample.weight,
                share=float(shares[index])
                / (1 / len(samples) if per_sequence else int(sample.trained.sum()) / count)
                / sample.weight,
            )
            for index, (sample, (pack, sequence)) in enumerate(zip(samples, places))
        ),
        residual=math.sqrt(max(left, 0.0)),
        scale=1.0 if subject.has_further_losses else scale,
        norm=None if whole.norm is None else whole.norm / math.sqrt(size),
        loss=None if whole.loss is None else whole.loss / loss,
        loss_as=_explain_loss(examination, packs, whole.loss, count),
        unequal=_unequal_copies(examination, whole),
        num_copies=dict(subject.num_copies),
        balances=subject.balances,
        reduction=subject.reduction,
    )
    evidence.step = examination.probe.gather(own)[0]  # ranks must say the same


def _step(examination: Examination, packs: Sequence[Sequence[Sample]]) -> Step:
    subject = examination.subject
    torch.manual_seed(0)
    examination.probe.num_forwards += len(packs)
    examination.probe.num_backwards += len(packs)
    if subject.step is not None:
        return subject.step(packs)
    assert subject.loss is not None
    subject.model.zero_grad(set_to_none=True)
    loss = subject.loss(packs)
    loss.backward()
    change = {
        name: parameter.grad.detach().clone()
        for name, parameter in subject.model.named_parameters()
        if parameter.grad is not None
    }
    subject.model.zero_grad(set_to_none=True)
    return Step(change=change, loss=float(loss.detach()))


def _products(examination: Examination, steps: Sequence[Step]) -> Tensor:
    """Returns the products of each two steps' changes over all parameters, [steps, steps].

    A parameter of which ranks have copies counts once: its change is the same on each, to the bit.
    """
    own: dict[tuple[float, float, int], list[list[float]]] = {}
    for name, change in steps[0].change.items():
        vectors = torch.stack(
            [
                step.change[name].detach().double().flatten()
                if name in step.change
                else torch.zeros(change.numel(), dtype=torch.float64)
                for step in steps
            ]
        )
        table = vectors @ vectors.T
        key = float(table[0, 0]), float(vectors[0].sum()), change.numel()
        if key[0] > 0:
            own[key] = table.tolist()
    every = {
        key: table for of_rank in examination.probe.gather(own) for key, table in of_rank.items()
    }
    total = torch.zeros(len(steps), len(steps), dtype=torch.float64)
    for table in every.values():
        total += torch.tensor(table, dtype=torch.float64)
    return total


def _unequal_copies(examination: Examination, step: Step) -> tuple[str, ...]:
    """Returns parameters that ranks hold copies of, but change differently."""
    own = {
        parameter: (float(change.double().sum()), float(change.double().square().sum()))
        for name, parameter in step.copies.items()
        if (change := step.change.get(name)) is not None
    }
    found: dict[str, set[tuple[float, float]]] = {}
    for of_rank in examination.probe.gather(own):
        for parameter, key in of_rank.items():
            found.setdefault(parameter, set()).add(key)
    return tuple(sorted(parameter for parameter, keys in found.items() if len(keys) > 1))


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


def _mean_loss(samples: Sequence[Sample], losses: Sequence[Tensor], reduction: str) -> float:
    count = sum(int(sample.trained.sum()) for sample in samples)
    total = 0.0
    for sample, of_token in zip(samples, losses):
        own = sample.trained[1:]
        part = sample.weight * float(of_token[own].sum())
        total += part / (int(own.sum()) * len(samples) if reduction == "sequence" else count)
    return total


def _scale(
    examination: Examination,
    whole: Step,
    packs: Sequence[Sequence[Sample]],
    size: float,
    loss: float,
) -> float:
    """Returns the step's change relative to the gradient, by the distance at which it is nearest
    to 1: a clamp or a router's choice within one distance bends the loss, a wrong scale shows at
    each. One of two distances was too often bent: in gpt-oss, once in fifty runs.
    """
    slopes = [_slope(examination, whole, packs, step * loss / size) for step in _SLOPE_STEPS]
    return min(
        (size / slope if slope else math.inf for slope in slopes), key=lambda one: abs(one - 1)
    )


def _slope(
    examination: Examination, whole: Step, packs: Sequence[Sequence[Sample]], distance: float
) -> float:
    """Returns how fast the loss falls along the step's change."""
    samples = [sample for pack in packs for sample in pack]
    found = []
    for factor in (-distance, distance):
        _move(examination.subject, whole, factor)
        losses = _losses(examination, packs)
        _move(examination.subject, whole, -factor)
        found.append(_mean_loss(samples, losses, examination.subject.reduction))
    return (found[1] - found[0]) / (2 * distance)


@torch.no_grad()
def _move(subject: Subject, step: Step, factor: float) -> None:
    if subject.move is not None:
        subject.move(factor)
        return
    for name, parameter in subject.model.named_parameters():
        if name in step.change:
            parameter.add_(factor * step.change[name].to(parameter))


def _explain_loss(
    examination: Examination,
    packs: Sequence[Sequence[Sample]],
    reported: float | None,
    count: int,
) -> str:
    """Returns the mistake with which the loss is the reported one; "" for none or an unknown one.

    Each is tried: fused losses put out no logits whose gradients would tell.
    """
    if reported is None or examination.subject.reduction == "sequence":
        return ""
    samples = [sample for pack in packs for sample in pack]
    plain = _losses(examination, packs)
    weighted = [sample.weight * of_token for sample, of_token in zip(samples, plain)]
    trained = [of_token[sample.trained[1:]] for sample, of_token in zip(samples, weighted)]
    total = float(sum(part.sum() for part in trained))
    tried = {
        "": total / count,
        "prompt": float(torch.cat(weighted).mean()),
        "last": float(sum(part[:-1].sum() for part in trained)) / (count - len(samples)),
        "slots": total / sum(len(sample.tokens) for sample in samples),
        "sequence": sum(float(part.mean()) for part in trained) / len(samples),
    }
    for name, shift in (("0", 0), ("2", 2)):
        others = _losses(examination, packs, shift)
        kept = [
            sample.weight * of_token[sample.trained[1:][: len(of_token)]]
            if shift
            else sample.weight * of_token[1:][sample.trained[1:]]
            for sample, of_token in zip(samples, others)
        ]
        tried[name] = float(torch.cat(kept).mean())
    tolerance = 1e-3 * abs(total / count)
    return next((name for name, value in tried.items() if abs(value - reported) < tolerance), "?")
