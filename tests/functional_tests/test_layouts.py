"""Any parallel layout and any packing give the same loss and gradients as each sequence alone in
one process.
"""

from __future__ import annotations

import math
from functools import lru_cache

import pytest
import torch

from tests.functional_tests.layouts import (
    CHOSEN,
    COVERING,
    FEW,
    MATRIX,
    MECHANISM_CASES,
    MECHANISMS,
    MODELS,
    UNEVEN,
    Layout,
    Uneven,
)
from tests.functional_tests.oracle import (
    EXACT,
    RankStep,
    Step,
    assemble,
    assert_same,
    sequences,
    train_one_by_one,
    train_packed,
)
from tests.functional_tests.pieces import Piece, Place
from tests.functional_tests.ranks import run_ranks

# Eight have each form on the wire, and nine divide evenly over three ranks alone. The second step
# starts from weights and moments that the first made; a third was seen to show nothing more.
LENGTHS = ((40, 3, 17, 64, 1, 25, 8, 33, 11), (64, 5, 64, 12, 30, 2, 21, 13, 13))
BATCHES = [sequences(step, lengths) for step, lengths in enumerate(LENGTHS)]


@lru_cache(maxsize=16)
def reference(model: str, depth: str) -> tuple[Step, ...]:
    return tuple(run_ranks(train_one_by_one, 1, f"{MODELS[model]} {depth}", BATCHES)[0])


@pytest.mark.parametrize("layout", CHOSEN, ids=str)
def test_layout_trains_like_each_sequence_alone(layout: Layout) -> None:
    """A wrong group, shard, mask or scale would train on, only worse: nothing else notices."""
    flags = f"{layout.flags} {layout.depth}"
    steps = assemble(run_ranks(train_packed, layout.world_size, flags, BATCHES))
    assert_same(steps, reference(layout.model, layout.depth), relative=1e-12)


RECOMPUTED = {
    "gemma": "layernorm mlp",
    "olmo": "core_attn mlp",
    "gpt-oss": "core_attn layernorm moe",
    "minimax": "core_attn moe",
    "qwen3.5": "core_attn layernorm shared_experts",
    "deepseek": "core_attn layernorm mlp",
}


@lru_cache(maxsize=8)
def reference_of_mechanism(model: str) -> tuple[Step, ...]:
    arguments = MECHANISMS[model], BATCHES, EXACT, True
    return tuple(run_ranks(train_one_by_one, 1, *arguments)[0])


@pytest.mark.parametrize(("layout", "model"), MECHANISM_CASES, ids=str)
def test_mechanisms_train_like_each_sequence_alone(model: str, layout: Layout) -> None:
    """Windows, states and positions must be those of a sequence wherever its tokens are; what is
    cut over ranks must be put together again. With pipelines layers are recomputed, else parts.
    """
    flags = layout._replace(model=model).flags
    if layout.pipeline > 1:
        flags += " --recompute-granularity full"
    else:
        flags += f" --recompute-granularity selective --recompute-modules {RECOMPUTED[model]}"
    steps = assemble(run_ranks(train_packed, layout.world_size, flags, BATCHES))
    assert_same(steps, reference_of_mechanism(model), relative=1e-12)


NUM_UNEVEN = len(UNEVEN) if CHOSEN is MATRIX else 2 if CHOSEN is FEW else 4


@pytest.mark.parametrize("case", UNEVEN[:NUM_UNEVEN], ids=str)
def test_stages_of_unequal_depth_train_like_each_sequence_alone(case: Uneven) -> None:
    """A layer that is built twice or never, or with the window of another, trains on."""
    model = f"{(MODELS | MECHANISMS)[case.model]} --num-layers {case.num_layers}"
    has_own_layers = case.model in MECHANISMS
    (reference,) = run_ranks(train_one_by_one, 1, model, BATCHES, EXACT, has_own_layers)
    flags = f"{model} {case.flags}"
    steps = assemble(run_ranks(train_packed, case.num_stages, flags, BATCHES))
    assert_same(steps, reference, relative=1e-12)


@pytest.mark.parametrize(
    ("starts", "message"),
    [((0, 3), "element 2 not once"), ((0, 1), "element 1 not once"), ((0,), "end after 2")],
)
def test_shards_that_leave_or_repeat_elements_fail(starts: tuple[int, ...], message: str) -> None:
    """Elements that no rank reduced would be compared with nothing."""
    place = Place(dim=None, index=0, count=1)
    pieces = [Piece(place, (2, 2), torch.ones(2), start, sharers=(0, 1)) for start in starts]
    with pytest.raises(AssertionError, match=message):
        assemble([[RankStep(0.0, {"weight": piece}, {})] for piece in pieces])


def test_the_distributed_optimizer_shares_gradients_out() -> None:
    """Were each rank said to hold all of its gradients, ranks would be compared with themselves."""
    ranks = run_ranks(
        train_packed, 2, Layout(data=2, model="experts", optimizer="overlapped").flags, BATCHES[:1]
    )
    pieces = [rank[0].gradients for rank in ranks]
    dense = [name for name in pieces[0] if "experts" not in name]
    held = [sum(rank[name].values.numel() for name in dense) for rank in pieces]
    assert min(held) > 0
    assert sum(held) == sum(math.prod(pieces[0][name].shape) for name in dense)


def test_the_matrix_is_as_large_as_promised() -> None:
    """A filter that became too strict would leave layouts untested without a sign."""
    assert len(MATRIX) >= 80
    assert {layout.world_size for layout in MATRIX} >= {1, 2, 3, 4, 6, 8, 9, 12, 16}
    assert set(COVERING) <= set(MATRIX)
    assert {layout.model for layout in FEW} == set(MODELS)
