"""tensor. The examination: all experiments in order, then the decision table."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from megatron.packing.doctor.autopsy import draw_step, examine_loss
from megatron.packing.doctor.decisions.decision_table import ROWS
from megatron.packing.doctor.decisions.step_rows import hidden_faults
from megatron.packing.doctor.evidence import Evidence
from megatron.packing.doctor.experiments import Examination
from megatron.packing.doctor.locate import (
    EXPERT_ULPS,
    class_of,
    declared_windows,
    describe,
    every_layer_name,
    find_birth,
    find_birth_of_padding,
    find_layers,
    measure_reach,
)
from megatron.packing.doctor.module_kinds import kind_of
from megatron.packing.doctor.probe import Probe
from megatron.packing.doctor.report import Diagnosis, Finding
from megatron.packing.doctor.step import examine_step
from megatron.packing.doctor.subject import LENGTHS, Subject
from megatron.packing.doctor.unusable import check_places, check_windows


def examine(subject: Subject, lengths: Sequence[int] = LENGTHS) -> Diagnosis:
    """Examines a subject, and names what it finds.

    Costs some 15 forward passes and 4 backward passes of tiny packs where nothing is wrong, and
    two of one layer for each layer; some 60 more, of one module, where something crosses.

    Args:
        subject: a trainer and its model.
        lengths: tokens of the sequences in the doctor's pack; at least three, of a prime sum.

    Returns:
        the findings, and the evidence for them.

    Raises:
        ValueError: if packs have fewer than three sequences.
        Unusable: if the subject does not do what it says, so that a verdict would mean nothing.
    """
    if len(lengths) < 3 or min(lengths) < 4:
        raise ValueError(
            f"lengths {list(lengths)}: the doctor needs at least three sequences of at least 4 "
            "tokens"
        )
    probe = Probe(subject)
    notes = list(subject.notes)
    if not subject.model.training:
        notes.append("mode: the model is in eval(); call model.train(), as in training")
    evidence = Evidence(
        subject=subject.name,
        lengths=tuple(lengths),
        reduction=subject.reduction,
        notes=notes,
    )
    examination = Examination(probe, lengths)
    check_places(subject, examination.pack)
    if windows := declared_windows(probe):
        of_ranks = probe.gather(every_layer_name(subject.model))
        check_windows(subject, [*windows], [name for names in of_ranks for name in names])
    examination.repeat(evidence)
    if evidence.not_finite:
        examination.check_finite_alone(evidence)
        evidence.notes.append("all else: nothing is seen behind NaN; examine again without it")
        return _diagnose(examination, evidence)
    if evidence.keeps_state():
        evidence.notes.append("all else: runs depend on those before; examine again without that")
        return _diagnose(examination, evidence)
    is_random = evidence.repeat.unseeded > 8 * evidence.repeat.difference
    with without_dropout(subject.model, is_random):
        if is_random:
            first = evidence.repeat
            examination.repeat(evidence)
            still = evidence.repeat.unseeded > 8 * evidence.repeat.difference
            evidence.repeat = first
            if still:
                evidence.notes.append(
                    "packed and alone, places: not compared, as something random is left with "
                    "dropout at 0; set it to 0 in the model's configuration"
                )
                _examine_logits(examination, evidence, only_equal_shapes=True)
                return _diagnose(examination, evidence)
        _examine_logits(examination, evidence)
    return _diagnose(examination, evidence)


def _examine_logits(
    examination: Examination, evidence: Evidence, *, only_equal_shapes: bool = False
) -> None:
    subject = examination.subject
    examination.set_tolerance(evidence)
    examination.check_repeats(evidence)
    examination.influence(evidence)
    if not subject.is_causal:
        evidence.early = [0.0] * len(evidence.early)
    examination.padding(evidence)
    if _is_rounding_by_padding(examination, evidence):
        evidence.rounding = evidence.padding or 0.0
    if not only_equal_shapes:
        examination.alone(evidence)
        examination.moved(evidence)
    if is_rounding_of_experts(examination, evidence):
        evidence.exact = max(evidence.across, *evidence.early)
    name = find_birth(examination, evidence)
    if name:
        evidence.mixing = describe(examination, evidence, name)
    if evidence.crossings:
        find_layers(examination, evidence)
    elif not only_equal_shapes and (subject.windows or evidence.differs_alone()):
        measure_reach(examination, evidence)
    examination.backward(evidence)
    examine_loss(examination, evidence)
    if not only_equal_shapes:
        examine_step(examination, evidence, draw_step(subject))
        if evidence.step is not None and (hidden := hidden_faults(evidence.step)):
            evidence.notes.append(
                f"step: {evidence.dtype} rounds more than these would change, so that they cannot "
                f"be told from a sound one: {', '.join(hidden)}; examine in float32, too"
            )


def is_rounding_of_experts(examination: Examination, evidence: Evidence) -> bool:
    """Returns whether what crosses is how the products of experts round: by their number of rows,
    which is another where tokens are routed otherwise.
    """
    largest = max(evidence.across, *evidence.early)
    if not 0 < largest <= EXPERT_ULPS * torch.finfo(examination.dtype).eps:
        return False
    name = find_birth(examination, evidence)
    return name is not None and kind_of(name, class_of(examination.probe, name)) == "experts"


def _is_rounding_by_padding(examination: Examination, evidence: Evidence) -> bool:
    """Returns whether what padding changes is how the products of experts round: other padding is
    routed otherwise, so that experts have other numbers of rows.
    """
    if not evidence.sees_padding():
        return False
    if not (evidence.padding or 0.0) <= EXPERT_ULPS * torch.finfo(examination.dtype).eps:
        return False
    name = find_birth_of_padding(examination, evidence)
    return name is not None and kind_of(name, class_of(examination.probe, name)) == "experts"


def _diagnose(examination: Examination, evidence: Evidence) -> Diagnosis:
    evidence.num_forwards = examination.probe.num_forwards
    evidence.num_backwards = examination.probe.num_backwards
    return Diagnosis(evidence=evidence, findings=tuple(name_findings(evidence)))


def name_findings(evidence: Evidence) -> Iterator[Finding]:
    """Yields what the decision table finds, one fault for each property at most.

    Faults of the loss beside one another are all told, as one does not hide another.
    """
    named = set()
    for row in ROWS:
        if row.is_fault and row.property in named and row.property != "labels":
            continue
        if row.property == "crossing" and "crossing" in named:
            continue
        if row.applies(evidence):
            named.add(row.property)
            yield Finding(
                name=row.name,
                property=row.property,
                text=row.text(evidence),
                mend=row.mend,
                threads=row.threads,
                is_fault=row.is_fault,
            )


@contextmanager
def without_dropout(model: nn.Module, is_needed: bool) -> Iterator[None]:
    """Sets the probability of all dropout modules to 0 within the block."""
    dropouts = [module for module in model.modules() if isinstance(module, nn.Dropout)] * is_needed
    before = [dropout.p for dropout in dropouts]
    for dropout in dropouts:
        dropout.p = 0.0
    try:
        yield
    finally:
        for dropout, p in zip(dropouts, before):
            dropout.p = p
