"""The loss and the figures of reward models beside their definition with Python's floats."""

from __future__ import annotations

import math

import pytest
import torch

from megatron.sft.model.forward import Asked
from megatron.sft.options.preference import PreferenceConfig
from megatron.sft.training.preference.rewards import RewardPairs

SCORES = [0.5, -1.25, 2.0, 0.75, -0.5]
# Records at positions 7 and 3; of the first the rejected answer stands before the chosen one.
FIELDS = {
    "path_position": [7, 7, 3, 3, 3],
    "path_rank": [1, 0, 0, 1, 2],
    "path_weight": [1.0, 1.0, 0.5, 0.5, 0.5],
    "path_margin": [0.25, 0.0, 0.0, 0.0, 1.0],
    "path_source": [0, 0, 1, 1, 1],
}
PAIRS = [(-1.25, 0.5, 0.25, 1.0), (2.0, 0.75, 0.0, 0.5), (2.0, -0.5, 1.0, 0.5)]
"""Chosen, rejected, margin, weight."""


@pytest.mark.parametrize("centred", [0.0, 0.1])
def test_pairs_are_compared_within_their_records(centred: float) -> None:
    """A partner of another record, a margin with the wrong sign, or chosen answers that count as
    pairs would train something else, while the loss falls all the same.
    """
    options = PreferenceConfig(loss="reward", center_rewards_coefficient=centred)
    extra = {name: torch.tensor(values) for name, values in FIELDS.items()}
    scores = torch.tensor(SCORES, dtype=torch.float64, requires_grad=True)
    objective = RewardPairs(options)
    total, log = objective._loss_of_pairs(extra, scores, Asked(num_sources=2))
    expected = [
        weight * (math.log1p(math.exp(-(c - r - margin))) + centred * (c + r) ** 2)
        for c, r, margin, weight in PAIRS
    ]
    assert total.item() == pytest.approx(sum(expected), rel=1e-14)
    total.backward()
    assert scores.grad is not None
    c, r, margin, _ = PAIRS[0]
    slope = -1 / (1 + math.exp(c - r - margin))
    assert scores.grad[1].item() == pytest.approx(slope + 2 * centred * (c + r), rel=1e-13)
    assert log["source losses"][1].tolist() == [1, 2]
    sums = dict(zip(objective.sums, log["sums"].tolist()))
    sums |= dict(zip(objective.maxima, log["maxima"].tolist()))
    assert objective.figures(sums) == {
        "accuracy": 2 / 3,
        "margin": pytest.approx((-1.75 + 1.25 + 2.5) / 3),
        "mean_reward": pytest.approx((-0.75 + 2.75 + 1.5) / 6),
        "min_reward": -1.25,
        "max_reward": 2.0,
        "pairs": 3.0,
    }
