"""tensor. One optimizer step beside the sum of its sequences' own steps, and beside the loss.

Of parameters only sums of products are used, so that between ranks nothing else travels. Let g be
the change of a step of SGD, g_i that of a step on sequence i alone:

- g = sum a_i g_i by least squares: a_i says how much a sequence counts;
- the norm that the trainer reports is the root of g g;
- `step_scale` holds g to the gradient of the loss.

In bfloat16 each number is measured several times, with embeddings that differ by a rounding. Of two
repeats each product takes one factor from each: their roundings are independent, and add nothing to
it in the mean, while g g of one repeat has the square of its rounding in it. What the pairs of
repeats differ by is what rounding may do.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations
from typing import NamedTuple

import torch
from torch import Tensor

from megatron.packing.doctor.evidence import Evidence, SequenceShare, StepEvidence, StepNoise
from megatron.packing.doctor.experiments import Examination
from megatron.packing.doctor.step_scale import (
    Scale,
    explain_loss,
    measure_loss,
    measure_scale,
    products_of_steps,
)
from megatron.packing.doctor.subject import Sample, Step
from megatron.packing.doctor.unusable import Unusable, checked_loss, checked_step

WEIGHTS = (1.0, 0.5, 2.0, 1.25, 0.75)
"""Weights of the examined step's samples, in turn."""
_NUM_REPEATS = 4
"""Of a step in bfloat16: six pairs."""
_NOISE_MARGIN = 2
"""Times the largest distance of a pair from the mean of all, which is nearer to the truth."""


class _Fit(NamedTuple):
    """A step as the sum of its sequences' own."""

    shares: Tensor
    """1 for a sequence whose tokens count as in the declared mean, float64 [sequences]."""
    left: float
    """Square of the part that is no such sum, relative to the step's; below 0 by rounding."""


def examine_step(
    examination: Examination, evidence: Evidence, packs: Sequence[Sequence[Sample]]
) -> None:
    """Takes one step on all packs, and one on each sequence alone."""
    subject = examination.subject
    if subject.step is None and subject.loss is None:
        return
    if subject.takes_weights:
        weights = iter(WEIGHTS)
        packs = [[replace(sample, weight=next(weights, 1.0)) for sample in pack] for pack in packs]
    samples = [sample for pack in packs for sample in pack]
    is_coarse = examination.rounding > torch.finfo(torch.float32).eps
    repeats, whole = _take_steps(examination, packs, _NUM_REPEATS if is_coarse else 1)
    products = products_of_steps(examination, [*repeats, whole])
    size = float(products[-1, -1])
    if size == 0:
        evidence.notes.append("step: it changes nothing, so it is not examined")
        return
    _check_products(examination, products[1 : 1 + len(samples), 1 : 1 + len(samples)], size)
    count = sum(int(sample.trained.sum()) for sample in samples)
    declared = [
        sample.weight
        * (
            1 / len(samples)
            if subject.reduction == "sequence"
            else int(sample.trained.sum()) / count
        )
        for sample in samples
    ]
    fit, noise = _fit_repeats(products[:-1, :-1], torch.tensor(declared, dtype=torch.float64))
    if is_coarse:  # what rounds alike in all repeats, such as gradients once, is no spread of them
        noise = replace(noise, residual=max(noise.residual, examination.rounding))
    loss = None
    if examination.has_logits:
        loss = measure_loss(examination, packs, _NUM_REPEATS if is_coarse else 0)
    else:
        evidence.notes.append(
            "step: there are no logits beside which its scale and the reported loss could be held"
        )
    if is_coarse and not (noise.shares > 0 and (loss is None or loss.noise > 0)):
        evidence.notes.append(
            f"step: not examined in {evidence.dtype}, as its rounding could not be measured (the "
            "embeddings are not known); examine in float32, too"
        )
        return
    scale = (
        Scale(1.0, 0.0)
        if subject.has_further_losses or loss is None
        else measure_scale(examination, whole, packs, size, loss)
    )
    places = [(p, s) for p, pack in enumerate(packs) for s in range(len(pack))]
    replicas = [number for pack in whole.replicas for number in pack] or [0] * len(samples)
    own = StepEvidence(
        shares=tuple(
            SequenceShare(
                pack=pack,
                sequence=sequence,
                replica=replica,
                num_trained=int(sample.trained.sum()),
                weight=sample.weight,
                share=share,
            )
            for sample, (pack, sequence), replica, share in zip(
                samples, places, replicas, fit.shares.tolist()
            )
        ),
        residual=math.sqrt(max(fit.left, 0.0)),
        scale=scale.factor,
        norm=None if whole.norm is None else whole.norm / math.sqrt(size),
        loss=None if whole.loss is None or loss is None else whole.loss / loss.value,
        mistakes=()
        if whole.loss is None or loss is None
        else explain_loss(examination, packs, whole.loss, loss),
        unequal=_unequal_copies(examination, whole),
        num_copies=dict(subject.num_copies),
        balances=subject.balances,
        reduction=subject.reduction,
        noise=replace(noise, scale=scale.noise, loss=0.0 if loss is None else loss.noise),
    )
    evidence.step = examination.probe.gather(own)[0]  # ranks must say the same


def _check_products(examination: Examination, alone: Tensor, size: float) -> None:
    """Raises Unusable for steps that are not finite, or do not depend on what is trained.

    Args:
        examination: of the subject.
        alone: products of the steps on one sequence each.
        size: square of the step on all of them.
    """
    name = examination.subject.name
    if not (math.isfinite(size) and bool(alone.isfinite().all())):
        raise Unusable(
            f"{name}: gradients of a step are not finite; examine another precision, or a model "
            "with weights of megatron.packing.doctor.subject.draw_weights"
        )
    if len(alone) > 1 and bool((alone == alone[0, 0]).all()):
        raise Unusable(
            f"{name}: steps on different sequences are the same to the bit; let the loss or step "
            "depend on the tokens and labels of the samples that it is given"
        )


def _take_steps(
    examination: Examination, packs: Sequence[Sequence[Sample]], num_repeats: int
) -> tuple[list[Step], Step]:
    """Returns for each repeat a step on all packs and one on each sequence alone, and the last
    step, which is on all packs and has the subject's own embeddings.

    A single repeat has them, too.
    """
    samples = [sample for pack in packs for sample in pack]
    singles = [[[replace(sample, weight=1.0)]] for sample in samples]
    if num_repeats == 1:
        alone = [_step(examination, single) for single in singles]
        whole = _step(examination, packs)
        return [whole, *alone], whole
    steps = []
    for number in range(num_repeats):
        for place, work in enumerate([packs, *singles]):
            with examination.shaken(seed=100 * (number + 1) + place):
                steps.append(_step(examination, work))
    return steps, _step(examination, packs)


def _step(examination: Examination, packs: Sequence[Sequence[Sample]]) -> Step:
    subject = examination.subject
    torch.manual_seed(0)
    examination.probe.num_forwards += len(packs)
    examination.probe.num_backwards += len(packs)
    if subject.step is not None:
        return checked_step(subject, subject.step(packs))
    assert subject.loss is not None
    subject.model.zero_grad(set_to_none=True)
    loss = checked_loss(subject, subject.loss(packs))
    loss.backward()
    change = {
        name: parameter.grad.detach().clone()
        for name, parameter in subject.model.named_parameters()
        if parameter.grad is not None
    }
    subject.model.zero_grad(set_to_none=True)
    return Step(change=change, loss=float(loss.detach()))


def _fit_repeats(products: Tensor, declared: Tensor) -> tuple[_Fit, StepNoise]:
    """Returns the fit of all repeats together, and what pairs of them differ from it by.

    Args:
        products: of the steps of all repeats, each of which begins with the whole one.
        declared: share that each sequence should have in the whole one.
    """
    width = 1 + len(declared)
    blocks = products.reshape(len(products) // width, width, -1, width).transpose(1, 2)
    pairs = [(blocks[k, j] + blocks[j, k]) / 2 for k, j in combinations(range(len(blocks)), 2)]
    fit = _fit(torch.stack(pairs or [blocks[0, 0]]).mean(0), declared)
    of_pairs = [_fit(pair, declared) for pair in pairs]
    largest = float(fit.shares.abs().max())
    return fit, StepNoise(
        shares=_NOISE_MARGIN
        * max((float((one.shares - fit.shares).abs().max()) for one in of_pairs), default=0.0)
        / largest,
        residual=math.sqrt(
            _NOISE_MARGIN * max((abs(one.left - fit.left) for one in of_pairs), default=0.0)
        ),
    )


def _fit(products: Tensor, declared: Tensor) -> _Fit:
    shares = torch.linalg.lstsq(products[1:, 1:], products[1:, :1]).solution[:, 0]
    left = float(products[0, 0] - shares @ products[1:, 0]) / float(products[0, 0])
    return _Fit(shares / declared, left)


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
