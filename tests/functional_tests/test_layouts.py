"""Any parallel layout and any packing give the same loss and gradients as each sequence alone in one process."""

from __future__ import annotations

from functools import lru_cache

import pytest

from tests.functional_tests.oracle import (
    Step,
    assemble,
    assert_same,
    options,
    sequences,
    train_one_by_one,
    train_packed,
)
from tests.functional_tests.ranks import run_ranks

LENGTHS = ((40, 3, 17, 64, 1, 25, 8, 33), (5, 64, 12, 9, 30, 2, 47, 21), (64, 64, 7, 7, 19, 50, 3, 11))
ROPE = "--position-embedding-type rope --swiglu --normalization RMSNorm --untie-embeddings-and-output-weights"
GROUPED = ROPE + " --group-query-attention --num-query-groups 2 --disable-bias-linear"
EXPERTS = ROPE + " --num-experts 4 --moe-router-topk 2"
TENSOR = "--tensor-model-parallel-size 2"
PIPELINE = "--pipeline-model-parallel-size 2"
CONTEXT = "--context-parallel-size 2"

# name: (number of processes, layout)
LAYOUTS = {
    "single": (1, ""),
    "tp2": (2, TENSOR),
    "tp2-sp": (2, TENSOR + " --sequence-parallel"),
    "pp2": (2, PIPELINE),
    "pp4": (4, "--pipeline-model-parallel-size 4"),
    "pp2-interleaved": (2, PIPELINE + " --num-layers-per-virtual-pipeline-stage 1"),
    "cp2": (2, CONTEXT),
    "dp2": (2, ""),
    "dp2-cp2": (4, CONTEXT),
    "tp2-pp2": (4, TENSOR + " " + PIPELINE),
    "dp2-distributed-optimizer": (2, "--use-distributed-optimizer"),
    "dp2-overlapped": (2, "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"),
}


@lru_cache(maxsize=8)
def reference(model: str) -> tuple[Step, ...]:
    batches = [sequences(step, lengths) for step, lengths in enumerate(LENGTHS)]
    return tuple(run_ranks(train_one_by_one, 1, options(model, batches, 1), batches)[0])


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("model", ["", GROUPED], ids=["learned", "rope-gqa-swiglu"])
def test_layout_trains_like_each_sequence_alone(layout: str, model: str) -> None:
    """A wrong group, shard, mask or scale would train on, only worse: nothing else notices."""
    world_size, flags = LAYOUTS[layout]
    batches = [sequences(step, lengths) for step, lengths in enumerate(LENGTHS)]
    steps = assemble(run_ranks(train_packed, world_size, f"{model} {flags} --sequence-packing", batches))
    assert_same(steps, reference(model), relative=1e-12)
