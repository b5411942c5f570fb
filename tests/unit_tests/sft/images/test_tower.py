"""Towers of transformers, and files that are not theirs."""

from pathlib import Path
from typing import Any

import pytest

from examples.tiny_images.make_data import PROCESSOR, TEXT, TOWER
from megatron.sft.images.tower import check_tensors, tower_config
from megatron.sft.images.vision import Vision, read_vision
from tests.unit_tests.sft.images.test_sizes import write

transformers: Any = pytest.importorskip("transformers")
pytestmark = pytest.mark.slow  # transformers takes seconds to import
PREFIX = "model.visual."


@pytest.fixture
def vision(tmp_path: Path) -> Vision:
    config = {"model_type": "qwen3_vl", "vision_config": TOWER, "text_config": TEXT}
    return read_vision(write(tmp_path, config, preprocessor_config=PROCESSOR), 1 << 20)


def test_files_of_another_tower_are_named(vision: Vision) -> None:
    """A tensor that is not read keeps random values."""
    import torch

    with torch.device("meta"):
        visual = transformers.AutoModel.from_config(tower_config(vision))
    shapes = {PREFIX + name: tuple(p.shape) for name, p in visual.named_parameters()}
    check_tensors("f", shapes | {"lm_head.weight": (8, 4)}, vision)
    name = f"{PREFIX}merger.linear_fc2.bias"
    with pytest.raises(ValueError, match=rf"^f holds {name} of shape \[5\], but .* says \[96\]"):
        check_tensors("f", shapes | {name: (5,)}, vision)
    del shapes[name]
    with pytest.raises(ValueError, match=f"^f lacks {name} of the vision tower"):
        check_tensors("f", shapes, vision)


def test_older_releases_are_named(vision: Vision, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transformers.AutoModel, "_model_mapping", {})
    with pytest.raises(ValueError, match="has the vision tower qwen3_vl_vision, as"):
        tower_config(vision)
