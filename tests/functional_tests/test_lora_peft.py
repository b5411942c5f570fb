"""PEFT's adapters in and out: what peft and transformers train, the product trains, and peft reads
what it writes.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from examples.benchmarks.hf_perturbed import perturb
from examples.benchmarks.hf_training import batches, flags_of_router, largest
from megatron.sft.model.huggingface.families.registry import FAMILIES
from megatron.sft.model.lora.names import CONVERTED
from tests.functional_tests.family_cases import GROWING_PEFT_CASE, MORE_PEFT_CASES, PEFT_CASES
from tests.functional_tests.hf_models import (
    largest_apart,
    logits_of,
    read_folder,
    sequences_in_order,
    stack_experts,
    train_by_product,
    train_by_transformers,
    write_model,
    write_peft,
)
from tests.functional_tests.ranks import run_ranks
from tests.functional_tests.test_hf_weights import LAYOUTS, assert_equal

pytest.importorskip("peft")
ALL = os.environ.get("FAMILIES") == "all"
BATCHES = [sequences_in_order(5, (40, 12, 17, 64, 9, 25, 8, 33)), *batches(19)]


@pytest.mark.parametrize(
    ("model", "layout", "num_steps", "options"),
    [*PEFT_CASES, *MORE_PEFT_CASES * ALL],
)
def test_steps_beside_peft(
    tmp_path: Path,
    record_property: Callable[[str, float], None],
    model: str,
    layout: str,
    num_steps: int,
    options: dict[str, Any],
) -> None:
    """A module's rows or rank taken for another's pass every check of shapes; so does a merge with
    the wrong scale.
    """
    base, source, ours, merged, gradients = (
        tmp_path / name for name in ("base", "source", "ours", "merged", "gradients")
    )
    run_ranks(write_model, 1, model, base)
    if model == "qwen3.5-moe":
        stack_experts(base)
    run_ranks(write_peft, 1, base, source, {"r": 3, "lora_alpha": 5, **options})
    world_size, flags = LAYOUTS[layout]
    per_rank = run_ranks(
        train_by_product,
        world_size,
        f"{flags} --lora --lora-adapter {source}{flags_of_router(model)}",
        base,
        BATCHES[:num_steps],
        torch.float64,
        gradients,
        ours,
    )
    assert_equal(
        read_folder(ours), {n: tensor.double() for n, tensor in read_folder(source).items()}, 0.0
    )
    (theirs,) = run_ranks(
        train_by_transformers, 1, base, BATCHES[:num_steps], torch.float64, 1e-3, ours
    )
    expected_gradients = dict(theirs.gradients)
    if "ensure_weight_tying" in options:  # one weight, which is written by both names
        head, embedding = (
            "base_model.model.lm_head.weight",
            "base_model.model.model.embed_tokens.weight",
        )
        expected_gradients[head] = expected_gradients[embedding]
    found_gradients = read_folder(gradients)
    record_property("gradients", largest_apart(found_gradients, expected_gradients))
    assert_equal(found_gradients, expected_gradients, 1e-12)
    assert num_steps < 20 or theirs.losses[-1] < theirs.losses[0] - 0.2
    for losses, _ in per_rank:
        assert largest(losses, theirs.losses) <= 1e-10
    record_property("losses", max(largest(losses, theirs.losses) for losses, _ in per_rank))
    packs = [pack for _, first in per_rank for pack in first]
    (whole,) = run_ranks(train_by_transformers, 1, merged, BATCHES[:1], torch.float64)
    for expected, of_merged, found in zip(
        theirs.logits,
        whole.logits,
        logits_of(BATCHES[0], packs, theirs.logits[0].shape[-1]),
        strict=True,
    ):
        assert (found - expected).abs().max() <= 1e-12 * expected.abs().max()
        assert (of_merged - expected).abs().max() <= 1e-12 * expected.abs().max()
    told = json.loads((ours / "adapter_config.json").read_text())
    assert told["target_modules"] == sorted(
        json.loads((source / "adapter_config.json").read_text())["target_modules"]
    )


def test_families_that_peft_converts_are_known() -> None:
    """Of them peft takes adapters of one kind of MLP alone; the others are written, and lost."""
    from peft.utils.transformers_weight_conversion import (
        _MODEL_TO_CONVERSION_PATTERN,
        _MOE_FUSED_TARGETS,
    )

    converted = {
        name for name in FAMILIES if _MODEL_TO_CONVERSION_PATTERN.get(name) in _MOE_FUSED_TARGETS
    }
    assert converted == CONVERTED


@pytest.mark.skipif(not ALL, reason="make families runs it")
def test_what_exceeds_the_promise_is_rounding(
    tmp_path: Path, record_property: Callable[[str, float], None]
) -> None:
    """Gradients of this model differ from peft's by more than 1e-12. A mistake would exceed what
    peft's own move by when weights of the base move by one rounding.
    """
    model, options = GROWING_PEFT_CASE
    base, source, found_in = tmp_path / "base", tmp_path / "source", tmp_path / "gradients"
    run_ranks(write_model, 1, model, base)
    run_ranks(write_peft, 1, base, source, {"r": 3, "lora_alpha": 5, **options})
    flags = f"{LAYOUTS['tp2-sp'][1]} --lora --lora-adapter {source}"
    run_ranks(train_by_product, 2, flags, base, BATCHES[:1], torch.float64, found_in)
    arguments = (BATCHES[:1], torch.float64, 1e-3, source)
    expected = run_ranks(train_by_transformers, 1, base, *arguments)[0].gradients
    moved = []
    for seed in range(4):
        other = tmp_path / f"base{seed}"
        shutil.copytree(base, other)
        perturb(other, torch.finfo(torch.float64).eps, seed)
        gradients = run_ranks(train_by_transformers, 1, other, *arguments)[0].gradients
        moved.append(largest_apart(gradients, expected))
    assert max(moved) > 1e-12, "nothing grows: compare to 1e-12 instead"
    found = largest_apart(read_folder(found_in), expected)
    record_property("gradients", found)
    record_property("peft's own, a rounding of the weights apart", max(moved))
    assert found <= max(moved)
