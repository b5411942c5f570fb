"""Each HuggingFace family beside transformers: logits and gradients of packs, over two
tensor-parallel ranks; and what was read is written with equal bits.

FAMILIES=all runs each on one rank, too.
"""

from __future__ import annotations

import os

import pytest
import torch

from tests.functional_tests.hf_models import (
    FAMILY_MODELS,
    logits_of,
    read_folder,
    sequences_in_order,
    train_by_product,
    train_by_transformers,
    write_model,
)
from tests.functional_tests.ranks import run_ranks
from tests.functional_tests.test_hf_weights import assert_equal

BATCHES = [sequences_in_order(5, (9, 40, 23))]
TENSOR_PARALLEL = "--tensor-model-parallel-size 2 --sequence-parallel"
EXPERTS = "--expert-model-parallel-size 2 --moe-router-dtype fp64"
LAYOUTS = ["alone", "tp2"] if os.environ.get("FAMILIES") == "all" else ["tp2"]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", FAMILY_MODELS)
def test_it_computes_what_transformers_computes(tmp_path, name, layout):
    """Windows, norms and scales that are off by one, or missing, train another model, in silence.

    Every tensor of the model is random, as zeros and ones would hide mistakes.
    """
    folder = tmp_path / "model"
    run_ranks(write_model, 1, name, folder)
    expected = run_ranks(train_by_transformers, 1, folder, BATCHES, torch.float64)[0]
    has_experts = any("experts" in key for key in FAMILY_MODELS[name][1])
    flags = f"{TENSOR_PARALLEL} {EXPERTS if has_experts else ''}"
    if layout == "alone":
        flags = "--moe-router-dtype fp64" if has_experts else ""
    per_rank = run_ranks(
        train_by_product,
        1 if layout == "alone" else 2,
        flags,
        folder,
        BATCHES,
        torch.float64,
        tmp_path / "gradients",
        tmp_path / "weights",
    )
    assert per_rank[0][0] == pytest.approx(expected.losses, rel=1e-12)
    packs = [pack for _, first in per_rank for pack in first]
    found = logits_of(BATCHES[0], packs, expected.logits[0].shape[-1])
    for ours, theirs in zip(found, expected.logits, strict=True):
        assert (ours - theirs).abs().max() <= 1e-12 * theirs.abs().max()
    source = read_folder(folder)
    gradients = read_folder(tmp_path / "gradients")
    trained = {key: gradients[key] for key in expected.gradients}  # buffers have none
    assert_equal(trained, expected.gradients, 1e-12)
    written = read_folder(tmp_path / "weights")
    assert_equal(written, {key: tensor.double() for key, tensor in source.items()}, 0.0)
