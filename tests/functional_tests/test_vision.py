"""Chats with images beside transformers, each alone: logits, losses and gradients of tower,
projector and language model.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from tests.functional_tests.hf_models import (
    largest_apart,
    logits_of,
    read_folder,
    train_by_transformers,
)
from tests.functional_tests.ranks import run_ranks
from tests.functional_tests.test_hf_weights import assert_equal
from tests.functional_tests.vision import chats, train_images, write_vision_model

BATCHES = [chats(5)]
TRAINED = "--images --tower-lr 1e-3 --projector-lr 1e-3"
_TP = "--tensor-model-parallel-size 2"
_SP, _PP, _CP = (
    f"{_TP} --sequence-parallel",
    "--pipeline-model-parallel-size 2",
    "--context-parallel-size 2",
)
_RECOMPUTED = "--recompute-granularity full"
ALL_LAYOUTS = {
    "alone": (1, ""),
    "dp2": (2, ""),
    "dp2-sharded": (2, "--use-distributed-optimizer"),
    "tp2": (2, _TP),
    "tp2-sp": (2, _SP),
    "pp2": (2, _PP),
    "cp2": (2, _CP),
    "recomputed": (1, _RECOMPUTED),
    "tp2-sp-recomputed": (2, f"{_SP} {_RECOMPUTED}"),
    "pp2-recomputed": (2, f"{_PP} {_RECOMPUTED}"),
    "cp2-recomputed": (2, f"{_CP} {_RECOMPUTED}"),
    "dp2-pp2": (4, _PP),
    "dp2-cp2": (4, _CP),
    "dp2-tp2-sp": (4, _SP),
    "tp2-sp-pp2": (4, f"{_SP} {_PP}"),
    "tp2-sp-cp2": (4, f"{_SP} {_CP}"),
    "pp2-cp2": (4, f"{_PP} {_CP}"),
}
LAYOUTS = (
    ALL_LAYOUTS if os.environ.get("LAYOUTS") == "all" else {"tp2-sp-cp2": ALL_LAYOUTS["tp2-sp-cp2"]}
)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", ["qwen3-vl"])
def test_it_computes_what_transformers_computes(
    tmp_path: Path, record_property: object, name: str, layout: str
) -> None:
    """Features that are not added, positions that run on through a pack, rows of another image:
    each trains on with nearly the same loss.
    """
    folder = tmp_path / "model"
    run_ranks(write_vision_model, 1, name, folder)
    expected = run_ranks(train_by_transformers, 1, folder, BATCHES, torch.float64)[0]
    world_size, flags = LAYOUTS[layout]
    per_rank = run_ranks(
        train_images,
        world_size,
        f"{TRAINED} {flags}",
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
    gradients = read_folder(tmp_path / "gradients")
    print(largest_apart(found, expected.logits), largest_apart(gradients, expected.gradients))
    assert_equal(gradients, expected.gradients, 1e-12)
    source = read_folder(folder)
    written = read_folder(tmp_path / "weights")
    assert_equal(written, {key: tensor.double() for key, tensor in source.items()}, 0.0)
