"""tensor. transformers' own vision tower, on a list of images of a pack."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron.packing.device import to_device
from megatron.sft.images.vision import Vision

_NOT_OF_TOWER = ("model_type", "dtype", "torch_dtype", "transformers_version", "architectures")


def tower_config(vision: Vision) -> Any:
    """Returns transformers' config of a tower. Raises ValueError for a release without it."""
    import transformers

    kind = vision.family.tower_type
    options = {key: value for key, value in vision.tower.items() if key not in _NOT_OF_TOWER}
    try:
        config = transformers.AutoConfig.for_model(kind, **options)
    except ValueError:  # an unknown kind
        config = None
    if type(config) not in transformers.AutoModel._model_mapping:
        raise ValueError(
            f"--images needs a transformers that has the vision tower {kind}, as 5.24 does, but "
            f"{transformers.__version__} has none; do pip install -U transformers"
        )
    return config


def check_tensors(where: object, shapes: Mapping[str, Sequence[int]], vision: Vision) -> None:
    """Raises ValueError if files lack tensors of a tower, or have them in other shapes.

    Args:
        where: folder of the files, for messages.
        shapes: of all tensors in the files.
    """
    from transformers import AutoModel

    with torch.device("meta"):
        visual: Any = AutoModel.from_config(tower_config(vision))
    for name, parameter in visual.named_parameters():
        tensor, expected = vision.family.prefix + name, list(parameter.shape)
        if tensor not in shapes:
            raise ValueError(
                f"{where} lacks {tensor} of the vision tower in its config.json; download all of "
                "its files"
            )
        if list(shapes[tensor]) != expected:
            raise ValueError(
                f"{where} holds {tensor} of shape {list(shapes[tensor])}, but vision_config of its "
                f"config.json says {expected}; one of the two is of another model"
            )


Grids = tuple[int, int, int]
"""An image: its frames, and patches in a column and in a row."""


def grid_inputs(grids: Sequence[Grids], visual: Any) -> dict[str, Any]:
    """Returns what a tower computes of the grids alone, on the host: transformers reads them from
    the device, in each layer again. {} of a transformers that takes none of it.
    """
    # Later releases of transformers 5 have it, and take its results.
    if find_spec("transformers.vision_utils") is None:
        return {}
    vision_utils: Any = import_module("transformers.vision_utils")
    if not hasattr(vision_utils, "get_vision_interpolation_indices_and_weights"):
        return {}
    table = torch.tensor(grids)
    lengths = [rows * columns for frames, rows, columns in grids for _ in range(frames)]
    found: dict[str, Any] = {
        "position_ids": vision_utils.get_vision_position_ids(table, visual.spatial_merge_size),
        # Arrays of numpy, which are cut into lengths in each layer.
        "cu_seqlens": np.cumsum([0, *lengths]),
    }
    if hasattr(visual, "window_size"):
        found["window_index"], windows = vision_utils.get_vision_window_index(
            table, visual.spatial_merge_size, visual.window_size, visual.patch_size
        )
        return found | {"cu_window_seqlens": windows.numpy()}
    indices, weights = vision_utils.get_vision_interpolation_indices_and_weights(
        table,
        visual.num_grid_per_side,
        mode=visual.interpolation_mode,
        align_corners=visual.interpolation_align_corners,
        spatial_merge_size=visual.spatial_merge_size,
    )
    return found | {"interp_indices": indices, "interp_weights": weights}


class ImageProcessor:
    """Pixels to what a tower reads, as transformers' image processor makes it."""

    def __init__(self, vision: Vision) -> None:
        self._vision = vision
        # float32 [3, 256]: the value of each byte in each channel, rounded as image processors do.
        levels = (np.arange(256) * (1 / 255)).astype(np.float32)
        mean, std = (np.array(one, np.float32)[:, None] for one in (vision.mean, vision.std))
        self._values = torch.from_numpy((levels - mean) / std)

    def __call__(self, images: Sequence[Tensor]) -> tuple[Tensor, list[Grids]]:
        """Returns the patches of all images, float32 [patches, channels * frames * side * side],
        and the grid of each image.

        Args:
            images: uint8 [height, width, 3], of sizes that `sizes.resized` gives.
        """
        self._values = self._values.to(images[0].device)
        patches = torch.cat([self._patches(image) for image in images])
        size = self._vision.patch_size
        return patches, [(1, image.shape[0] // size, image.shape[1] // size) for image in images]

    def _patches(self, image: Tensor) -> Tensor:
        """Returns the patches of an image. Those of a block that is merged follow one another. An
        image is a frame that stays.
        """
        values = torch.stack(
            [table[image[..., channel].long()] for channel, table in enumerate(self._values)]
        )
        side, merge = self._vision.patch_size, self._vision.merge_size
        frames = int(self._vision.tower["temporal_patch_size"])
        rows, columns = image.shape[0] // (side * merge), image.shape[1] // (side * merge)
        # channel, block row, row in it, pixel row, block column, column in it, pixel column
        blocks = values.view(3, rows, merge, side, columns, merge, side)
        blocks = blocks.permute(1, 4, 2, 5, 0, 3, 6).unsqueeze(5)
        repeated = blocks.expand(*blocks.shape[:5], frames, side, side)
        return repeated.reshape(rows * columns * merge**2, -1)


class VisionTower(torch.nn.Module):
    """Images to rows of the language model: the tower, its projector, and features for DeepStack
    beside each row.
    """

    def __init__(self, vision: Vision) -> None:
        """Builds the modules with random weights; the global random state is kept."""
        super().__init__()
        from transformers import AutoModel

        config = tower_config(vision)
        with torch.random.fork_rng(devices=[]):
            self.visual: Any = AutoModel.from_config(config, attn_implementation="sdpa")
        _keep_float32(self.visual)
        self._processor = ImageProcessor(vision)

    def forward(self, images: Sequence[Tensor]) -> Tensor:
        """Returns the rows of all images, [n, h * (1 + features of DeepStack)].

        Args:
            images: uint8 [height, width, 3], of sizes that `sizes.resized` gives.
        """
        patches, grids = self._processor(images)
        inputs = {
            name: to_device(value, patches.device) if isinstance(value, Tensor) else value
            for name, value in grid_inputs(grids, self.visual).items()
        }
        table = torch.tensor(grids, device=patches.device)
        out = self.visual(patches.to(self.visual.dtype), grid_thw=table, **inputs, return_dict=True)
        features = getattr(out, "deepstack_features", None) or ()
        return torch.cat((out.pooler_output, *features), -1)


def _keep_float32(module: torch.nn.Module) -> None:
    """Makes plain tensors of buffers that no file has: of rotary frequencies, which Float16Module
    would round, and which the tower takes to its device itself.
    """
    for part in module.modules():
        for name in list(part._non_persistent_buffers_set):
            value = part._buffers.pop(name)
            part._non_persistent_buffers_set.discard(name)
            plain = None if value is None else value.detach().clone()
            object.__setattr__(part, name, plain)
