"""Sizes, tokens, positions and FLOPs of images, by values that transformers gives."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron.sft.images.positions import axis_positions
from megatron.sft.images.sizes import Grid, grid_of, resized, tower_cost
from megatron.sft.images.source import ImageSize
from megatron.sft.images.vision import Vision, check_stages, read_vision

PROCESSOR = {
    "image_processor_type": "Qwen2VLImageProcessorFast",
    "size": {"shortest_edge": 65536, "longest_edge": 16777216},
    "patch_size": 16,
    "merge_size": 2,
    "temporal_patch_size": 2,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
}
CONFIG = {"model_type": "qwen3_vl", "vision_config": {"depth": 27}, "text_config": {}}
LARGE = 1 << 24


def write(folder: Path, config: dict[str, Any], **files: Any) -> Path:
    (folder / "config.json").write_text(json.dumps(config))
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


@pytest.fixture
def vision(tmp_path: Path) -> Vision:
    return read_vision(write(tmp_path, CONFIG, preprocessor_config=PROCESSOR), LARGE)


@pytest.mark.parametrize(
    ("height", "width", "tokens"),
    [(480, 640, 300), (1080, 1920, 2040), (1, 1, 64), (6000, 8000, 16170), (3, 200, 66)],
)
def test_tokens_of_an_image(vision: Vision, height: int, width: int, tokens: int) -> None:
    """One token more or less than the tower makes ends the run, or trains on another image."""
    size = resized(ImageSize(height, width), vision)
    assert grid_of(size, vision).num_tokens == tokens
    assert not size.height % 32
    assert not size.width % 32


def test_a_line_is_no_image(vision: Vision) -> None:
    with pytest.raises(ValueError, match="one side must be at most 200 times the other"):
        resized(ImageSize(1, 201), vision)


def test_an_option_lowers_the_limit(tmp_path: Path) -> None:
    """A single released image may have 16,384 tokens."""
    folder = write(tmp_path, CONFIG, processor_config={"image_processor": PROCESSOR})
    vision = read_vision(folder, 1 << 20)
    size = resized(ImageSize(6000, 8000), vision)
    assert size == ImageSize(864, 1152)
    assert size.height * size.width <= 1 << 20


@pytest.mark.parametrize(
    ("config", "processor", "fault"),
    [
        (CONFIG | {"model_type": "gemma3"}, PROCESSOR, "has model_type 'gemma3'; drop --images"),
        (CONFIG, {}, "has none in preprocessor_config.json or processor_config.json"),
        (CONFIG, PROCESSOR | {"resample": 2}, "has resample 2, but only 3 is supported"),
        (CONFIG, PROCESSOR | {"patch_size": 14}, "has patch_size 14, but .* has 16"),
        (CONFIG, PROCESSOR | {"size": {"height": 3}}, "must have min_pixels and max_pixels"),
        (CONFIG, PROCESSOR | {"image_mean": [0.5]}, "must have three numbers in image_mean"),
        (
            CONFIG,
            PROCESSOR | {"image_processor_type": "SiglipImageProcessor"},
            "only Qwen2VLImageProcessor is supported",
        ),
        (CONFIG, PROCESSOR | {"min_pixels": 1 << 25}, "--image-max-pixels 16777216 must be at"),
    ],
)
def test_other_folders_are_refused(
    tmp_path: Path, config: dict[str, Any], processor: dict[str, Any], fault: str
) -> None:
    """Pixels that are scaled otherwise than the model knows train on, only worse."""
    with pytest.raises(ValueError, match=fault):
        read_vision(write(tmp_path, config, preprocessor_config=processor), LARGE)


def test_layers_that_add_features_are_on_the_first_stage(vision: Vision) -> None:
    """Features of other stages would be lost in silence."""
    check_stages(vision, [3, 5])
    with pytest.raises(ValueError, match=r"needs 3 layers on the first .*, but it has 2"):
        check_stages(vision, [2, 6])


def test_older_files_of_qwen2_5(tmp_path: Path) -> None:
    """All keys are at the top, and a tower of windows costs less than one without."""
    config = {
        "model_type": "qwen2_5_vl",
        "rope_scaling": {"type": "mrope", "mrope_section": [2, 1, 1]},
        "vision_config": {"in_chans": 3, "spatial_patch_size": 14},
    }
    processor = PROCESSOR | {"patch_size": 14, "min_pixels": 3136, "max_pixels": 1 << 23}
    vision = read_vision(write(tmp_path, config, preprocessor_config=processor), LARGE)
    assert vision.sections == (2, 1, 1)
    assert vision.windows == (28, 64)
    assert resized(ImageSize(480, 640), vision) == ImageSize(476, 644)
    cost = tower_cost(vision, trains_tower=False, trains_projector=False)
    assert cost.quadratic == 4 * 2 * 2 * 1280
    assert cost.windows == ((64, 28 * 2 * 2 * 1280),)


@pytest.mark.parametrize(
    ("is_interleaved", "axes"), [(True, [0, 1, 2, 0, 1, 2, 0]), (False, [0, 0, 0, 1, 1, 2, 2])]
)
def test_channels_turn_by_their_axis(is_interleaved: bool, axes: list[int]) -> None:
    """The channels of another order look alike for text, which has one position on all axes."""
    torch = pytest.importorskip("torch")
    from megatron.sft.images.rotary import AxisRotary

    rotary = AxisRotary(torch.ones(7), (3, 2, 2), is_interleaved=is_interleaved)
    angles = rotary(torch.tensor([[[0]], [[1]], [[2]]]))
    assert angles.flatten().tolist() == axes * 2


def test_positions_restart_behind_the_longer_side() -> None:
    positions = axis_positions(10, [2], [Grid(2, 3)])
    assert positions.tolist() == [
        [0, 1, 2, 2, 2, 2, 2, 2, 5, 6],
        [0, 1, 2, 2, 2, 3, 3, 3, 5, 6],
        [0, 1, 2, 3, 4, 2, 3, 4, 5, 6],
    ]
    assert axis_positions(3, [], []).tolist() == [[0, 1, 2]] * 3


@pytest.mark.slow
@pytest.mark.parametrize(("trains_tower", "trains_projector"), [(False, False), (True, True)])
def test_flops_are_those_that_torch_counts(
    vision: Vision, trains_tower: bool, trains_projector: bool
) -> None:
    """A tower that is counted wrong by a half makes packs uneven by its share."""
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.utils.flop_counter import FlopCounterMode

    from megatron.sft.images.tower import VisionTower

    tower = dict(vision.tower) | {
        "depth": 3,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_heads": 4,
        "out_hidden_size": 48,
        "deepstack_visual_indexes": [0, 1],
    }
    small = Vision(**{**vars(vision), "tower": tower})
    module = VisionTower(small).requires_grad_(trains_tower)
    # Of attention in one kernel torch counts nothing on a CPU.
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        rows = module([torch.zeros(256, 192, 3, dtype=torch.uint8)])
        if trains_tower:
            rows.sum().backward()
    cost = tower_cost(small, trains_tower=trains_tower, trains_projector=trains_projector)
    counted = counter.get_total_flops()
    assert cost(np.array([16 * 12]))[0] == pytest.approx(counted, rel=1e-9)
