"""Adapters train alike in any layout: as autograd trains weights that have them in, each sequence
alone.
"""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

import pytest
import torch

from tests.functional_tests.hf_models import sequences_in_order, train_by_product, write_model
from tests.functional_tests.layouts import Layout
from tests.functional_tests.oracle import (
    EXACT,
    Step,
    assemble,
    assert_same,
    sequences,
    train_one_by_one,
    train_packed,
)
from tests.functional_tests.ranks import run_ranks

BATCHES = [
    sequences(step, lengths)
    for step, lengths in enumerate([(40, 3, 17, 64, 1, 25, 8, 33), (5, 64, 12, 9, 30)])
]
LORA = "--lora --lora-rank 3 --lora-alpha 5"
RECOMPUTE = "--recompute-granularity full --recompute-method block --recompute-num-layers 1"
UNEVEN = "--decoder-last-pipeline-num-layers 1"
CASES = [
    (Layout(tensor=2, sequence=True, data=2, model="grouped", optimizer="overlapped"), LORA),
    (
        Layout(tensor=2, pipeline=2, interleaved=True, model="learned"),
        f"{LORA} --lora-target-modules q_proj v_proj up_proj",
    ),
    (
        Layout(pipeline=2, context=2, model="tied", optimizer="sharded"),
        f"{LORA} --lora-rslora --lora-modules-to-save embed_tokens {UNEVEN}",
    ),
    (Layout(tensor=2, sequence=True, model="experts", optimizer="sharded"), LORA),
    (
        Layout(data=2, model="experts"),
        f"{LORA} --lora-target-modules k_proj o_proj gate_proj down_proj --lora-modules-to-save "
        "lm_head",
    ),
    (  # of fused gates and values gates alone
        Layout(tensor=4, sequence=True, model="grouped"),
        f"{LORA} --lora-target-modules q_proj k_proj v_proj gate_proj down_proj {RECOMPUTE}",
    ),
    (Layout(tensor=2, sequence=True, context=2, model="qwen3.5", optimizer="sharded"), LORA),
]


@lru_cache
def reference(flags: str) -> tuple[Step, ...]:
    has_own_layers = "--linear-attention-freq" in flags
    return tuple(run_ranks(train_one_by_one, 1, flags, BATCHES, EXACT, has_own_layers)[0])


@pytest.mark.parametrize(("layout", "lora"), CASES, ids=str)
def test_adapters_train_like_merged_weights(layout: Layout, lora: str) -> None:
    """A sum over the wrong ranks, or rows of the wrong module, trains on, only worse; and no frozen
    bit changes.
    """
    steps = assemble(run_ranks(train_packed, layout.world_size, f"{layout.flags} {lora}", BATCHES))
    one = layout._replace(
        tensor=1,
        sequence=False,
        pipeline=1,
        interleaved=False,
        context=1,
        data=1,
        optimizer="plain",
    )
    same = f"{one.flags} {lora}".replace(RECOMPUTE, "").replace(UNEVEN, "")
    assert_same(steps, reference(same), relative=1e-12)


@pytest.mark.parametrize("flags", ["--bf16", "--tensor-model-parallel-size 2 --sequence-parallel"])
def test_the_first_loss_is_the_base_models_to_the_bit(tmp_path: Path, flags: str) -> None:
    """B is zero, and so is all that an adapter adds; the losses after that are others."""
    run_ranks(write_model, 1, "llama3", tmp_path / "base")
    batches = [sequences_in_order(step, (40, 12, 17, 64)) for step in (5, 6)]
    size = 2 if "size 2" in flags else 1
    (plain, _), (adapted, _) = (
        run_ranks(train_by_product, size, flags + lora, tmp_path / "base", batches, torch.float32)[
            -1
        ]
        for lora in ("", " --lora")
    )
    assert plain[0] == adapted[0]
    assert plain[1] != adapted[1]
