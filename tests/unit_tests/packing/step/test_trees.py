"""Where paths of trees are trained apart, or trees in parts, and that it is said."""

from __future__ import annotations

import warnings
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from megatron.packing.batch.reading import read_samples
from megatron.packing.batch.samples import Samples
from megatron.packing.batch.tree_shapes import ShapedSamples
from megatron.packing.model.parts.delta_net import DeltaNet
from megatron.packing.step import trees
from tests.unit_tests.packing.batch.test_reading import TREE


def config_of(*mixers: Any) -> Any:
    return SimpleNamespace(layer_kinds=[SimpleNamespace(mixer=mixer) for mixer in mixers])


def test_recurrent_layers_keep_paths_apart() -> None:
    """A node would begin with the state of the node before it in the pack."""
    assert trees.why_paths_stay_apart(config_of(None, None)) == ""
    assert trees.why_paths_stay_apart(SimpleNamespace()) == ""
    assert "recurrent" in trees.why_paths_stay_apart(config_of(None, DeltaNet))


def test_attention_of_transformer_engine_keeps_paths_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would let each node attend to itself alone."""
    monkeypatch.setattr(trees, "transformer_engine_installed", lambda: True)
    reason = trees.why_paths_stay_apart(config_of(None))
    assert reason
    assert "Transformer Engine" not in reason, "the trainer hides its import-time notices"


def whole(samples: Samples) -> ShapedSamples:
    return ShapedSamples(samples, np.arange(samples.lengths.size))


def test_paths_apart_are_said() -> None:
    """A run would cost what it did, and its user not know why."""
    tree, plain = read_samples([TREE]), read_samples([{"tokens": [1, 2]}])
    with pytest.warns(UserWarning, match="trained path by path, shared prefixes each time: why"):
        trees.warn_of_trees(tree, whole(tree), "why")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trees.warn_of_trees(plain, whole(plain), "why")
        trees.warn_of_trees(tree, whole(tree), "")


def test_parts_of_trees_are_said() -> None:
    """A trunk is computed once per part: more tokens than `show` promised, and no word why."""
    samples = read_samples([TREE, TREE])
    with pytest.warns(UserWarning, match=r"trained in parts, .*--max-seqlen-per-dp-cp-rank"):
        trees.warn_of_trees(samples, ShapedSamples(samples, np.array([0, 1, 1])), "")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trees.warn_of_trees(samples, ShapedSamples(samples, np.array([0, 1])), "")
        trees.warn_of_trees(samples, ShapedSamples(samples, np.array([], np.int64)), "")
