"""A HuggingFace folder read in any layout computes what transformers computes, and is written back
to the bit.
"""

from __future__ import annotations

import os
from functools import lru_cache
from pathlib import Path

import pytest
import torch

from tests.functional_tests.hf_models import (
    MODELS,
    Trained,
    largest_apart,
    logits_of,
    read_folder,
    sequences_in_order,
    train_by_product,
    train_by_transformers,
    write_model,
)
from tests.functional_tests.ranks import run_ranks

ALL = os.environ.get("FAMILIES") == "all"
BATCHES = [sequences_in_order(5, (40, 12, 17, 64, 9, 25, 8, 33))]
LAYOUTS = {
    "tp2-sp": (2, "--tensor-model-parallel-size 2 --sequence-parallel"),
    "pp2": (2, "--pipeline-model-parallel-size 2"),
    "pp2-uneven": (2, "--pipeline-model-parallel-size 2 --decoder-last-pipeline-num-layers 1"),
    "tp4-sp-two-groups": (4, "--tensor-model-parallel-size 4 --sequence-parallel"),
    "tp2-pp2": (4, "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2"),
    "pp2-interleaved": (
        2,
        "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1",
    ),
    "cp2-dp2": (4, "--context-parallel-size 2 --use-distributed-optimizer"),
    "ep2": (2, "--expert-model-parallel-size 2"),
    "tp2-pp2-ep2-sp": (
        4,
        "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 "
        "--expert-model-parallel-size 2 --sequence-parallel",
    ),
    "tp2-ep4-dp2-sp": (
        4,
        "--tensor-model-parallel-size 2 --expert-model-parallel-size 4 --sequence-parallel",
    ),
}
CUT = [
    ("llama3", "pp2-uneven"),
    ("llama-linear-biases", "tp2-sp"),
    ("qwen2", "tp4-sp-two-groups"),
    ("qwen3", "tp4-sp-two-groups"),
    ("llama2", "tp2-pp2"),
    ("gemma", "tp2-pp2"),
    ("qwen3", "pp2-interleaved"),
    ("qwen2-yarn-tied", "cp2-dp2"),
    ("qwen3-moe", "ep2"),
    ("mixtral", "tp2-pp2-ep2-sp"),
    ("qwen2-moe", "tp2-ep4-dp2-sp"),
]
IS_CUT = {model for model, layout in CUT if layout != "cp2-dp2"}
CASES = [(model, "") for model in MODELS] + CUT
# A model that is right where it is cut is right whole.
CHOSEN = [(model, layout) for model, layout in CASES if ALL or layout or model not in IS_CUT]


@pytest.fixture(scope="session")
def folders(tmp_path_factory):
    """A function from a model's name to its folder."""

    @lru_cache
    def folder(name: str) -> Path:
        path = tmp_path_factory.mktemp("models") / name
        run_ranks(write_model, 1, name, path)
        return path

    return folder


@pytest.fixture(scope="session")
def transformers(folders):
    """A function from a model's name to what transformers makes of `BATCHES` in float64."""

    @lru_cache
    def train(name: str) -> Trained:
        return run_ranks(train_by_transformers, 1, folders(name), BATCHES, torch.float64)[0]

    return train


@pytest.mark.parametrize(("model", "layout"), CHOSEN)
def test_it_computes_what_transformers_computes(
    folders, transformers, tmp_path, record_property, model, layout
):
    """A wrong cut of a matrix passes every check of shapes and trains to garbage.

    Logits, loss and gradients agree in float64, relative to the largest of each tensor; and what
    was read is written with equal bits.
    """
    world_size, flags = LAYOUTS[layout] if layout else (1, "")
    paths = (tmp_path / "gradients", tmp_path / "weights")
    is_sharded = "--use-distributed-optimizer" in flags
    per_rank = run_ranks(
        train_by_product,
        world_size,
        flags,
        folders(model),
        BATCHES,
        torch.float64,
        None if is_sharded else paths[0],
        paths[1],
    )
    expected = transformers(model)
    for losses, _ in per_rank:
        assert losses[0] == pytest.approx(expected.losses[0], rel=1e-12)
    if "--context-parallel-size" not in flags:
        packs = [pack for _, first in per_rank for pack in first]
        logits = logits_of(BATCHES[0], packs, wanted_size(expected))
        record_property("logits", largest_apart(logits, expected.logits))
        for found, wanted in zip(logits, expected.logits, strict=True):
            assert (found - wanted).abs().max() <= 1e-12 * wanted.abs().max()
    if not is_sharded:
        gradients = read_folder(paths[0])
        record_property("gradients", largest_apart(gradients, expected.gradients))
        assert_equal(gradients, expected.gradients, 1e-12)
    source = read_folder(folders(model))
    assert_equal(
        read_folder(paths[1]), {name: tensor.double() for name, tensor in source.items()}, 0.0
    )


def wanted_size(trained: Trained) -> int:
    return trained.logits[0].shape[-1]


def assert_equal(
    found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], relative: float
) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        wanted = expected[name]
        assert tensor.shape == wanted.shape, name
        difference = (tensor - wanted).abs().max().item()
        assert difference <= relative * max(wanted.abs().max().item(), 1e-6), (
            f"{name} differs by {difference:.1e}"
        )
