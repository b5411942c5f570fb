"""Options of preference tuning: what is not computed is refused, and what others write is said."""

from __future__ import annotations

from typing import Any

import pytest

from megatron.sft.options.preference import PreferenceConfig


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"loss_type": ("sigmoid,sft",)}, "several stand side by side: --loss-type sigmoid sft"),
        ({"loss_type": ("['ipo', 'sft']",)}, "several stand side by side: --loss-type ipo sft"),
        ({"loss_type": ("aot",)}, "it sorts the pairs of a microbatch"),
        ({"loss_type": ("sft",)}, "alone it is --loss sft"),
        ({"loss_type": ("ipo",), "loss_weights": (float("nan"),)}, "--loss-weights must be finite"),
        ({"loss_type": ("ipo",), "loss_weights": (-1.0,)}, "--loss-weights must be finite numbers"),
        ({"f_alpha_divergence_coef": float("nan")}, "must be a finite number"),
        ({"loss": "kto", "reference_file": "x"}, "no log-probabilities of the answers to other"),
        ({"loss": "orpo", "reference_file": "x"}, "--loss orpo has no reference"),
    ],
)
def test_what_a_loss_does_not_take_is_refused(options: dict[str, Any], said: str) -> None:
    """A weight that is no number trains a loss that is none; other options would be ignored."""
    with pytest.raises(ValueError, match=said):
        PreferenceConfig(**{"loss": "dpo", **options})


@pytest.mark.parametrize(
    ("options", "count"),
    [
        ({"loss": "sft"}, 0),
        ({"loss": "dpo"}, 1),
        ({"loss": "dpo", "reference_file": "x"}, 0),
        ({"loss": "orpo"}, 0),
        ({"loss": "reward"}, 0),
        ({"loss": "kto"}, 2),
        ({"loss": "kto", "loss_type": ("apo_zero_unpaired",)}, 1),
    ],
)
def test_forward_passes_beside_those_of_training(options: dict[str, Any], count: int) -> None:
    """Speed, predicted times and plans count them."""
    assert PreferenceConfig(**options).num_forward_passes == count
