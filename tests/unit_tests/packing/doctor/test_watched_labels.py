"""Labels behind losses without logits are read by watching the loss."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from megatron.packing.doctor.examine import examine
from megatron.packing.doctor.subject import Subject, draw_weights
from tests.unit_tests.packing.doctor.test_unusable import VOCABULARY, Mean


def fused(fault, dtype=torch.float32):
    """A subject that puts out hidden states, with a fused loss of `fault`."""
    model = Mean().train()
    draw_weights(model)
    model.to(dtype)

    def loss(packs):
        total, count = torch.zeros(()), 0
        for pack in packs:
            masks = [sample.trained for sample in pack]
            if fault in ("across", "not shifted", "rolled"):
                masks = [sample.mask() for sample in pack]
            if fault == "prompts":
                masks = [torch.arange(len(mask)) > 0 for mask in masks]
            if fault == "last lost":
                masks = [mask & (torch.arange(len(mask)) < len(mask) - 1) for mask in masks]
            labels = torch.cat([s.tokens.where(mask, -100) for s, mask in zip(pack, masks)])
            shift = {"not shifted": 0, "shifted twice": 2}.get(fault, 1)
            labels = F.pad(labels[shift:], (0, shift), value=-100)
            h = torch.cat(model.hidden([sample.tokens for sample in pack]))
            # Without the module that puts out logits.
            logits = F.linear(h, model.head.weight, model.head.bias).float()
            total = total + F.cross_entropy(logits, labels, reduction="sum")
            count += int((labels >= 0).sum())
        balance = h.float().square().mean() if fault == "balanced" else 0.0  # of each token
        return total / count + balance

    return Subject(
        name=fault,
        model=model,
        vocab_size=VOCABULARY,
        logits=lambda sequences, fill: model.hidden(sequences),
        loss=loss,
    )


@pytest.mark.parametrize(
    ("fault", "dtype", "names"),
    [
        ("sound", torch.float32, []),
        ("across", torch.float32, ["label across a border"]),
        ("balanced", torch.float32, []),  # by a gradient at each token
        ("prompts", torch.bfloat16, ["prompt is trained"]),
        ("last lost", torch.float64, ["target is lost"]),
        ("not shifted", torch.float32, ["labels are not shifted"]),
        ("shifted twice", torch.float32, ["labels are not shifted"]),
    ],
)
def test_faults_are_named(fault, dtype, names):
    """Liger's and TRL's losses put out no logits, whose gradients would show the labels."""
    diagnosis = examine(fused(fault, dtype))
    assert [finding.name for finding in diagnosis.faults] == names
    assert "labels were watched" in " ".join(diagnosis.evidence.notes)
