"""tensor. Labels and weights of each token of a step, from the gradient at the logits alone.

A cross entropy with weight w has the gradient w (p - onehot(label)): its only negative entry is
the label, and -g[label] / (1 - p[label]) the weight. No code of the trainer is read, no label of
its batch seen.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from megatron.packing.doctor.evidence import Evidence, LossEvidence, TokenLoss
from megatron.packing.doctor.experiments import Examination
from megatron.packing.doctor.probe import as_rows, hooked
from megatron.packing.doctor.subject import LENGTHS, Sample, Subject, draw_pack
from megatron.packing.doctor.unusable import checked_loss
from megatron.packing.doctor.watched_labels import watch_labels

_MOST_CERTAIN = 0.9
"""Probability of a label above which its weight is lost in rounding."""
_TOLERANCE = {torch.bfloat16: 6 * 2**-8, torch.float16: 6 * 2**-11}
_DEFAULT_TOLERANCE = 1e-3
_FORM_TOLERANCE = 20
"""Times the tolerance of weights, for the whole row beside a cross entropy's gradient."""
_MOST_BENT = 0.04
PACKS = (LENGTHS, (19, 7))
"""Lengths in the packs of the examined step: packs of unlike numbers of tokens and sequences."""


def draw_step(subject: Subject) -> list[list[Sample]]:
    """Returns the packs of the examined step. A third of each sequence is a prompt, but of the
    second: what runs over its borders meets trained tokens there.
    """
    packs = []
    for seed, lengths in enumerate(PACKS):
        pack = []
        for index, tokens in enumerate(draw_pack(subject.vocab_size, lengths, seed=10 + seed)):
            has_prompt = subject.masks_prompts and index != 1
            prompt = max(1, len(tokens) // 3) if has_prompt else 1
            pack.append(Sample(tokens=tokens, trained=torch.arange(len(tokens)) >= prompt))
        packs.append(pack)
    return packs


def examine_loss(examination: Examination, evidence: Evidence) -> None:
    """Runs one step backward, and reads the gradients at the head's outputs."""
    subject = examination.subject
    if subject.loss is None:
        return
    packs = draw_step(subject)
    runs = [] if subject.head is None else _head_gradients(examination, subject.head, packs)
    if len(runs) != len(packs):  # of fused losses
        if watched := watch_labels(examination, evidence, packs[0]):
            evidence.loss = LossEvidence(
                tokens=watched,
                num_slots=(subject.slots([sample.tokens for sample in packs[0]]),),
                others=_loss_of_one(examination, evidence),
            )
        return
    tolerance = _TOLERANCE.get(examination.dtype, _DEFAULT_TOLERANCE)
    tokens: list[TokenLoss] = []
    padding, all_slots, largest_error = 0, [], 0.0
    for number, (pack, (logits, gradient)) in enumerate(zip(packs, runs)):
        sequences = [sample.tokens for sample in pack]
        slots = subject.slots(sequences)
        all_slots.append(slots)
        by_row, gradients = as_rows(logits, slots), as_rows(gradient, slots)
        if by_row is None or gradients is None:
            evidence.notes.append("loss: the head's output has no rows of the packed stream")
            return
        rows = [places.to(by_row.device) for places in subject.rows(sequences)]
        used = torch.zeros(slots, dtype=torch.bool, device=by_row.device)
        for index, (sample, places) in enumerate(zip(pack, rows)):
            used[places] = True
            found, error = _read_rows(by_row[places], gradients[places])
            largest_error = max(largest_error, error)
            tokens += [
                TokenLoss(
                    pack=number,
                    sequence=index,
                    position=position,
                    label=label,
                    weight=weight,
                    expected=_expected(sample, position),
                )
                for position, (label, weight) in enumerate(found)
            ]
        padding += int(gradients[~used].any(1).sum())
    evidence.loss = LossEvidence(
        tokens=tuple(tokens),
        padding_trained=padding,
        num_slots=tuple(all_slots),
        is_cross_entropy=largest_error <= _FORM_TOLERANCE * tolerance,
        # Logits that are capped behind the head bend each weight about as much as the form.
        tolerance=max(tolerance, min(2 * largest_error, _MOST_BENT)),
        others=_loss_of_one(examination, evidence),
    )


def _expected(sample: Sample, position: int) -> int | None:
    following = position + 1
    if following < len(sample.tokens) and bool(sample.trained[following]):
        return int(sample.tokens[following])
    return None


def _head_gradients(
    examination: Examination, head: nn.Module, packs: Sequence[Sequence[Sample]]
) -> list[tuple[Tensor, Tensor]]:
    """Returns logits and their gradients for each run of the head."""
    outputs: list[Tensor] = []

    def keep(_: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        logits = output[0] if isinstance(output, tuple) else output
        if isinstance(logits, Tensor) and logits.requires_grad:
            logits.retain_grad()
            outputs.append(logits)

    torch.manual_seed(0)
    examination.probe.num_forwards += len(packs)
    examination.probe.num_backwards += 1
    assert examination.subject.loss is not None
    with hooked(head, keep):
        loss = checked_loss(examination.subject, examination.subject.loss(packs))
    loss.backward()
    pairs = [(logits.detach(), logits.grad) for logits in outputs if logits.grad is not None]
    examination.subject.model.zero_grad(set_to_none=True)
    return pairs


def _read_rows(
    logits: Tensor, gradients: Tensor
) -> tuple[list[tuple[int | None, float | None]], float]:
    """Returns label and weight of each row, and how far rows are from a cross entropy's, relative
    to the label's entry.
    """
    found: list[tuple[int | None, float | None]] = []
    largest = 0.0
    probabilities = logits.double().softmax(1)
    for p, g in zip(probabilities, gradients.double()):
        if not bool(g.any()):
            found.append((None, None))
            continue
        label = int(g.argmin())
        certain = float(p[label])
        weight = float(-g[label]) / (1 - certain) if certain < _MOST_CERTAIN else None
        if weight is not None:
            form = p.clone()
            form[label] -= 1
            error = float((g - weight * form).abs().max())
            largest = max(largest, error / abs(float(g[label])))
        found.append((label, weight))
    return found, largest


def _loss_of_one(examination: Examination, evidence: Evidence) -> float:
    """Returns how the loss of the middle sequence alone reaches the embeddings of the others."""
    subject = examination.subject
    embedding = subject.embeds()
    if embedding is None or subject.loss is None or not subject.masks_prompts:
        return 0.0
    middle = len(examination.pack) // 2
    pack = [
        Sample(
            tokens=tokens,
            trained=(torch.arange(len(tokens)) > 0) & torch.tensor(index == middle),
        )
        for index, tokens in enumerate(examination.pack)
    ]
    outputs: list[Tensor] = []

    def keep(_: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        if not isinstance(output, Tensor) or not output.requires_grad:
            return None
        output.retain_grad()
        outputs.append(output)
        return output * 1

    torch.manual_seed(0)
    examination.probe.num_forwards += 1
    examination.probe.num_backwards += 1
    with hooked(embedding, keep):
        checked_loss(subject, subject.loss([pack]), is_trained=False).backward()
    subject.model.zero_grad(set_to_none=True)
    if not outputs or outputs[0].grad is None:
        return 0.0
    gradients = examination.by_sequence(outputs[0].grad)
    if gradients is None or not float(own := gradients[middle].abs().max()):
        return 0.0
    return max(
        float(gradient.abs().max()) for index, gradient in enumerate(gradients) if index != middle
    ) / float(own)
