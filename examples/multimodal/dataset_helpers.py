"""tensor. Samples of images and text, as a task encoder makes them for packing.

Four kinds of data: captions, questions about an image, pages where text and images alternate, and
questions about several images. A sample of any kind is a list of parts, text or image, of which
some are trained; that becomes one sequence, with a placeholder for each embedding that the tower
makes of an image.

    "a" [image of 8 x 16] "b"    ->    tokens     a  I  I  b  END
                                       time       0  1  1  3  4
                                       height     0  1  1  3  4
                                       width      0  1  2  3  4

Tokens are bytes here; a processor of a real model would take the place of `_encoded`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from megatron.blending.energon import (
    CaptioningSample,
    Cooker,
    CrudeSample,
    DefaultTaskEncoder,
    InterleavedSample,
    Sample,
    VQASample,
    basic_sample_keys,
    stateless,
)

IMAGE, END, VOCAB_SIZE = 256, 257, 264
PATCH, MERGE = 4, 2
"""Pixels along a patch's side; patches along the side of what becomes one embedding."""


@dataclass
class SeveralImagesSample(Sample):
    """A question about several images."""

    images: list[Tensor]
    question: str
    answer: str


class Part(NamedTuple):
    """A part of a sample: text, or the pixels of an image, [3, height, width]."""

    content: str | Tensor
    is_trained: bool = False


@stateless
def cook_page(record: CrudeSample) -> InterleavedSample:
    """Reads a page, whose JSON names its images by their parts: ["Look:", {"image": "0.png"}]."""
    sequence = [
        one if isinstance(one, str) else record[one["image"]] for one in record["json"]["sequence"]
    ]
    return InterleavedSample(**basic_sample_keys(record), sequence=sequence)


@stateless
def cook_several(record: CrudeSample) -> SeveralImagesSample:
    """Reads a question about several images."""
    asked = record["json"]
    return SeveralImagesSample(
        **basic_sample_keys(record),
        images=[record[name] for name in asked["images"]],
        question=asked["question"],
        answer=asked["answer"],
    )


class ImageTaskEncoder(DefaultTaskEncoder):
    """Encodes samples of all four kinds for packing: tokens, positions, pixels and their cost."""

    cookers = (
        Cooker(cook_page, has_subflavors={"kind": "page"}),
        Cooker(cook_several, has_subflavors={"kind": "several images"}),
    )

    @stateless
    def encode_sample(self, sample: Any) -> dict[str, Any]:
        """Returns the sample as packing takes it, with the key by which the loader restores it."""
        return {**basic_sample_keys(sample), **_encoded(parts_of(sample))}


def parts_of(sample: Any) -> list[Part]:
    """Returns the text and the images of a sample, in order."""
    if isinstance(sample, CaptioningSample):
        return [Part(sample.image), Part(sample.caption, True)]
    if isinstance(sample, VQASample):
        answer = (sample.answers or [""])[0]
        return [Part(sample.image), Part(sample.context), Part(answer, True)]
    if isinstance(sample, InterleavedSample):
        return [Part(one, isinstance(one, str)) for one in sample.sequence]
    if isinstance(sample, SeveralImagesSample):
        images = [Part(image) for image in sample.images]
        return [*images, Part(sample.question), Part(sample.answer, True)]
    raise TypeError(f"no parts are known of a {type(sample).__name__}")


def _encoded(parts: list[Part]) -> dict[str, Any]:
    tokens: list[int] = []
    trained: list[bool] = []
    positions: list[npt.NDArray[np.int64]] = []
    images: list[Tensor] = []
    start = 0
    for content, is_trained in (*parts, Part("", True)):
        if isinstance(content, str):
            its = [*content.encode(), *([END] if not content else [])]
            grid = np.tile(np.arange(len(its)), (3, 1))
        else:
            images.append(content)
            height, width = (side // (PATCH * MERGE) for side in content.shape[1:])
            its = [IMAGE] * (height * width)
            row, column = np.divmod(np.arange(len(its)), width)
            grid = np.stack((np.zeros_like(row), row, column))
        positions.append(grid + start)
        start += int(grid.max()) + 1
        tokens += its
        trained += [is_trained] * len(its)
    sample: dict[str, Any] = {
        "tokens": np.array(tokens),
        # A token counts where the one after it is trained: that is its label.
        "loss_mask": np.array([*trained[1:], False], np.float32),
        "position_ids": np.concatenate(positions, axis=1),
    }
    if images:
        patches = [image[0].numel() // PATCH**2 for image in images]
        sample |= {"payloads": {"pixels": images}, "costs": {"vision": patches}}
    return sample


def num_embeddings(image: Tensor) -> int:
    """Returns the embeddings that the tower makes of an image, and so its placeholders."""
    return image[0].numel() // (PATCH * MERGE) ** 2


BLANK = torch.zeros(3, PATCH * MERGE, PATCH * MERGE)
"""The smallest image, for packs that have none."""
