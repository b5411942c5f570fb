"""pure. Size of an image -> patches, tokens and FLOPs.

1080 x 1920 pixels, patches of 16, merged 2 x 2    ->    1088 x 1920, 68 x 120 patches, 2040 tokens
"""

from __future__ import annotations

import math
from typing import NamedTuple

from megatron.packing.scheduling.payload_cost import PayloadCost
from megatron.sft.images.source import ImageSize
from megatron.sft.images.vision import Vision
from megatron.sft.options.parallel import ParallelConfig

PATCHES = "patches"
"""Kind of the costs of a sample's images: patches of each."""
_MOST_ASPECT = 200
_MULTIPLY_ADD = 2


class Grid(NamedTuple):
    """An image in tokens: rows and columns of merged patches."""

    rows: int
    columns: int

    @property
    def num_tokens(self) -> int:
        """Placeholders of the image."""
        return self.rows * self.columns


def resized(size: ImageSize, vision: Vision) -> ImageSize:
    """Returns the size that an image is resized to: sides are multiples of a token's, the area is
    within the limits, and the aspect is kept as well as these allow.

    Raises ValueError if one side is more than 200 times the other.
    """
    unit = vision.patch_size * vision.merge_size
    height, width = size
    if max(size) > _MOST_ASPECT * min(size):
        raise ValueError(
            f"is {height} x {width} pixels, but one side must be at most {_MOST_ASPECT} times the "
            "other"
        )
    # Python's round takes halves to even numbers, as transformers does.
    rounded = ImageSize(round(height / unit) * unit, round(width / unit) * unit)
    area = rounded.height * rounded.width
    if area > vision.max_pixels:
        factor = math.sqrt(height * width / vision.max_pixels)
        return ImageSize(
            *(max(unit, math.floor(side / factor / unit) * unit) for side in (height, width))
        )
    if area < vision.min_pixels:
        factor = math.sqrt(vision.min_pixels / (height * width))
        return ImageSize(*(math.ceil(side * factor / unit) * unit for side in (height, width)))
    return rounded


def grid_of(size: ImageSize, vision: Vision) -> Grid:
    """Returns the tokens of an image of a size that `resized` gave."""
    unit = vision.patch_size * vision.merge_size
    return Grid(size.height // unit, size.width // unit)


def num_ranks_of_image(parallel: ParallelConfig) -> int:
    """Returns the ranks of a data-parallel replica that encode an image, or wait for the one that
    does.
    """
    # Tensor-parallel ranks share images with sequence parallel alone; other stages wait.
    repeated = 1 if parallel.sequence_parallel else parallel.tensor_model_parallel_size
    return repeated * parallel.pipeline_model_parallel_size


def tower_cost(
    vision: Vision, *, trains_tower: bool, trains_projector: bool, num_ranks: int = 1
) -> PayloadCost:
    """Returns the FLOPs of an image by its number of patches.

    num_ranks: ranks of a data-parallel replica that encode the image as well, or wait for the one
        that does.
    """
    tower = vision.tower
    hidden, merged = tower["hidden_size"], tower["hidden_size"] * vision.merge_size**2
    patch = tower["in_channels"] * tower["temporal_patch_size"] * vision.patch_size**2
    # A product is computed again for the gradient of its input, and once more for that of its
    # weight: of the patches, which are the data, only the latter.
    embedding = patch * hidden * (2 if trains_tower else 1)
    passes = 3 if trains_tower else 1
    num_products = 3 if vision.family.is_gated else 2
    layer = 4 * hidden**2 + num_products * hidden * tower["intermediate_size"]
    first, second = merged * merged, merged * tower["out_hidden_size"]
    trained = trains_tower or trains_projector
    of_projector = (
        first * (1 + trains_projector + trains_tower) + second * (1 + trains_projector + trained)
    ) / vision.merge_size**2
    linear = embedding + passes * tower["depth"] * layer
    linear += of_projector * (1 + vision.num_deepstack)
    pairs = _MULTIPLY_ADD * num_ranks * passes * 2 * hidden  # scores, values; no pair is masked
    # Windows at the edges of an image are smaller, so that this is a little more than they take.
    num_windowed, window = vision.windows
    return PayloadCost(
        linear=float(_MULTIPLY_ADD * linear * num_ranks),
        quadratic=float(pairs * (tower["depth"] - num_windowed)),
        windows=((window, float(pairs * num_windowed)),) if num_windowed else (),
    )
