"""Steps of AdamW take a model of a HuggingFace folder where a plain loop of transformers takes
it."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from examples.benchmarks.hf_perturbed import grown, largest_so_far
from examples.benchmarks.hf_training import batches, bfloat16_errors, largest, layout_of
from tests.functional_tests.family_cases import MORE_STEPS, STEPS
from tests.functional_tests.hf_models import train_by_product, train_by_transformers, write_model
from tests.functional_tests.ranks import run_ranks

ALL = os.environ.get("FAMILIES") == "all"
DATA = batches(20 if ALL else 4)


@pytest.fixture
def folder(tmp_path: Path, model: str) -> Path:
    run_ranks(write_model, 1, model, tmp_path / model)
    return tmp_path / model


@pytest.mark.parametrize(
    ("model", "layout"),
    [*STEPS, *MORE_STEPS * ALL],
)
def test_losses_of_many_steps(
    folder: Path, record_property: Callable[[str, float], None], model: str, layout: str
) -> None:
    """A parameter that is not decayed, or whose gradient is summed twice, shows from the second
    step on.
    """
    (theirs,) = run_ranks(train_by_transformers, 1, folder, DATA, torch.float64)
    world_size, flags = layout_of(layout, model)
    ranks = run_ranks(train_by_product, world_size, flags, folder, DATA, torch.float64)
    assert theirs.losses[-1] < theirs.losses[0] - 0.5
    record_property("losses", max(largest(losses, theirs.losses) for losses, _ in ranks))
    for losses, _ in ranks:
        assert largest(losses, theirs.losses) <= 1e-10


@pytest.mark.parametrize("model", ["qwen3-moe", *(["gemma", "llama3", "qwen3"] if ALL else [])])
def test_bfloat16_is_as_exact_as_that_of_transformers(folder: Path, model: str) -> None:
    """A cast in the wrong place costs digits that nobody misses in float64."""
    theirs, ours = bfloat16_errors(folder, DATA)
    assert 0 < ours <= 1.3 * theirs


@pytest.mark.skipif(not ALL, reason="make families runs it")
def test_what_grows_is_rounding() -> None:
    """Qwen3.5-MoE takes runs apart that begin 1e-15 from one another: ten steps lose seven digits.
    A mistake would be larger than what transformers differs by from itself.
    """
    perturbed, ours = grown("qwen3.5-moe", ["TP2"], DATA, 1e-15)
    assert perturbed[-1] > 1e-6, "nothing grows: compare losses to 1e-10 instead"
    for found, bound in zip(ours, largest_so_far(perturbed), strict=True):
        assert found <= 10 * bound
