"""Trees train as their paths do, each a sequence of its own: in any layout, whatever their shape.

`CHOSEN` is what each run does, and every layout of the matrix without multi-token prediction where
the environment says LAYOUTS=all (`make trees`).
"""

from __future__ import annotations

import os
from functools import lru_cache
from typing import Any
from unittest import mock

import pytest

from megatron.packing.step import settings
from tests.functional_tests.layouts import MATRIX, MECHANISM_LAYOUTS, MECHANISMS, MODELS, Layout
from tests.functional_tests.oracle import (
    EXACT,
    RankStep,
    Step,
    assemble,
    assert_same,
    differences,
    largest_difference,
    train_one_by_one,
    train_packed,
)
from tests.functional_tests.ranks import run_ranks
from tests.functional_tests.trees import KINDS, TreeSample, apart, batches_of_trees

pytestmark = pytest.mark.filterwarnings("ignore:some trees of sequences are trained in parts")
IS_ALL = os.environ.get("LAYOUTS") == "all"
NUM_STEPS = 3 if IS_ALL else 1
BATCHES = batches_of_trees(1, list(KINDS), NUM_STEPS)
WHOLE = "--max-seqlen-per-dp-cp-rank 256"
"""Room for the largest tree; without it trees of more than 64 tokens are cut."""
ALL = [layout for layout in MATRIX if not layout.model.startswith("further")]
FEW = [
    Layout(tensor=2, sequence=True, context=2, model="grouped"),
    Layout(pipeline=2, interleaved=True, data=2, model="tied", optimizer="sharded"),
    Layout(context=2, data=2, model="experts", scheduler="dp_balanced"),
]
CHOSEN = ALL if IS_ALL else FEW
FURTHER = {
    "recomputed": "--recompute-granularity full --recompute-method uniform "
    "--recompute-num-layers 1",
    "adapters": "--lora --lora-rank 4 --lora-modules-to-save embed_tokens lm_head",
    "cut": "",
}


@lru_cache(maxsize=8)
def reference(options: str) -> tuple[Step, ...]:
    return tuple(run_ranks(train_one_by_one, 1, options, apart(BATCHES))[0])


@pytest.mark.parametrize("layout", CHOSEN, ids=str)
def test_trees_train_like_their_paths(layout: Layout) -> None:
    """A key too many, a position off by padding, a count too few: losses would fall all the
    same.
    """
    # `empty` leaves a microbatch as it was loaded: the parts of a tree that is cut have no room.
    room = "" if layout.pipeline == 2 and layout.scheduler != "empty" else WHOLE
    steps = assemble(
        run_ranks(train_packed, layout.world_size, f"{layout.flags} {room} {layout.depth}", BATCHES)
    )
    expected = reference(f"{MODELS[layout.model]} {layout.depth}")
    print(f"| {layout} | {largest_difference(steps, expected):.1e} |")  # shown by make trees
    assert_same(steps, expected, relative=1e-12)


@pytest.mark.skipif(not IS_ALL, reason="make trees; every run has unit tests of each mechanism")
@pytest.mark.parametrize("model", MECHANISMS)
@pytest.mark.parametrize("layout", MECHANISM_LAYOUTS[1:5], ids=str)
def test_mechanisms_train_trees_like_their_paths(model: str, layout: Layout) -> None:
    """Windows and sinks count along the path; the state of a recurrent layer would begin where the
    node before in the pack ends.
    """
    arguments = MECHANISMS[model], apart(BATCHES), EXACT, True
    expected = run_ranks(train_one_by_one, 1, *arguments)[0]
    flags = f"{layout._replace(model=model).flags} {WHOLE}"
    steps = assemble(run_ranks(train_packed, layout.world_size, flags, BATCHES))
    print(f"| {model}, {layout} | {largest_difference(steps, expected):.1e} |")
    assert_same(steps, expected, relative=1e-12)


@pytest.mark.parametrize("further", FURTHER if IS_ALL else ["recomputed"])
def test_further_options_train_trees(further: str) -> None:
    """Recomputation reads the tree a second time, adapters change which weights have gradients."""
    layout = Layout(context=2, model="grouped")
    options = FURTHER[further]
    steps = assemble(run_ranks(train_packed, 2, f"{layout.flags} {WHOLE} {options}", BATCHES))
    assert_same(steps, reference(f"{MODELS['grouped']} {options}"), relative=1e-12)


def train_apart(*arguments: Any) -> list[RankStep]:
    """As where attention is Transformer Engine's, or a layer is recurrent."""
    with (
        mock.patch.object(settings, "why_paths_stay_apart", return_value="a reason"),
        pytest.warns(UserWarning, match="trained path by path, .* each time: a reason"),
    ):
        return train_packed(*arguments)


def test_paths_apart_train_the_same() -> None:
    """Where prefixes cannot be shared, a trunk's loss must not count once for each path."""
    flags = f"{Layout(model='grouped').flags} {WHOLE}"
    steps = assemble(run_ranks(train_apart, 1, flags, BATCHES))
    assert_same(steps, reference(MODELS["grouped"]), relative=1e-12)


@pytest.mark.parametrize("model", ["further"])
def test_what_does_not_work_is_refused(model: str) -> None:
    """The token after next differs by path: one of them would be trained for all, silently."""
    with pytest.raises(AssertionError, match="cannot be trained with multi-token prediction"):
        run_ranks(train_packed, 2, f"{Layout(data=2, model=model).flags} {WHOLE}", BATCHES)


def test_trees_are_not_their_paths_once_each() -> None:
    """The comparison would hold of anything if trees shared nothing, or weights did not matter."""
    tokens = [sum(len(one.fields()["tokens"]) for one in batch) for batch in BATCHES]
    paths = [sum(len(path.tokens) for path in batch) for batch in apart(BATCHES)]
    assert all(once < 0.6 * each for once, each in zip(tokens, paths))
    once = [[TreeSample(one.paths[:1]) for one in batch] for batch in BATCHES[:1]]
    (step,) = run_ranks(train_one_by_one, 1, MODELS["grouped"], apart(once))[0]
    assert max(differences(step, reference(MODELS["grouped"])[0]).values()) > 1e-2


def test_the_matrix_is_large() -> None:
    """A filter that became too strict would leave layouts untested without a sign."""
    assert len(ALL) >= 40
