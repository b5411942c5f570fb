"""Where paths of trees are trained apart, and that it is said."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from megatron.packing.batch.reading import read_samples
from megatron.packing.step import trees
from tests.unit_tests.packing.batch.test_reading import TREE


def config_of(*mixers: str) -> Any:
    return SimpleNamespace(layer_kinds=[SimpleNamespace(mixer=mixer) for mixer in mixers])


def test_recurrent_layers_keep_paths_apart() -> None:
    """A node would begin with the state of the node before it in the pack."""
    assert trees.why_paths_stay_apart(config_of("attention", "attention")) == ""
    assert trees.why_paths_stay_apart(SimpleNamespace()) == ""
    assert "recurrent" in trees.why_paths_stay_apart(config_of("attention", "delta"))


def test_attention_of_transformer_engine_keeps_paths_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would let each node attend to itself alone."""
    monkeypatch.setattr(trees, "transformer_engine_installed", lambda: True)
    reason = trees.why_paths_stay_apart(config_of("attention"))
    assert reason
    assert "Transformer Engine" not in reason, "the trainer hides its import-time notices"


def test_paths_apart_are_said() -> None:
    """A run would cost what it did, and its user not know why."""
    tree, plain = read_samples([TREE]), read_samples([{"tokens": [1, 2]}])
    with pytest.warns(UserWarning, match="trained path by path, shared prefixes each time: why"):
        trees.warn_of_paths_apart(tree, "why")
    trees.warn_of_paths_apart(plain, "why")  # a warning is an error in tests
    trees.warn_of_paths_apart(tree, "")
