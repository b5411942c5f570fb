"""The learning rate by step, as the options say: a schedule that is off by a warmup trains, only
worse.
"""

from types import SimpleNamespace
from typing import Any

import pytest

from megatron.sft.model.optimizer import build_scheduler
from tests.unit_tests.sft.command_line import parse


def rates(arguments: str) -> list[float]:
    """Of ten steps of 16 samples."""
    group: dict[str, Any] = {"lr": 0.0, "weight_decay": 0.0}
    scheduler = build_scheduler(
        parse(f"--lr 1.0 {arguments}"), SimpleNamespace(param_groups=[group])
    )  # type: ignore[arg-type]
    found = []
    for _ in range(10):
        found.append(group["lr"])
        scheduler.step(increment=16)
    return found


def test_warmup_by_steps_and_by_share_are_one() -> None:
    """A share is of the steps of decay."""
    assert rates("--lr-warmup-fraction 0.4") == rates("--lr-warmup-iters 4")
    assert rates("--lr-warmup-fraction 0.4")[:5] == pytest.approx([0, 0.25, 0.5, 0.75, 1])


def test_less_than_a_step_is_no_warmup() -> None:
    """With all defaults a run of one step trained at 0, and one of two in the second alone."""
    assert rates("--lr-warmup-fraction 0.09") == rates("")
    assert rates("--lr-warmup-fraction 0.1") == rates("--lr-warmup-iters 1")


def test_wsd_stays_until_it_falls() -> None:
    """Recipes of Megatron-LM have it."""
    found = rates("--lr-decay-style WSD --lr-wsd-decay-iters 4 --lr-wsd-decay-style linear")
    assert found == pytest.approx([1, 1, 1, 1, 1, 1, 1, 0.75, 0.5, 0.25])
