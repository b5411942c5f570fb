"""pure. Puts the images of a chat into its tokens: a placeholder for each row that the tower makes
of an image.

    one placeholder per image, by the chat template    <s> <img>             </s> what is it
    as many as the image has tokens                    <s> <img> <img> <img> </s> what is it

Invariants:
- A chat has exactly one run of placeholders per image, in the turn of the image and in the order of
  the images. A template that leaves an image out, and text that spells a placeholder, are errors.
- Placeholders and the tokens around them are never trained.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from megatron.packing.quoting import shown
from megatron.sft.data.records.content import Content, Conversation, messages_of, said_in
from megatron.sft.data.records.messages import Message
from megatron.sft.data.records.values import SampleError
from megatron.sft.images.positions import axis_positions
from megatron.sft.images.sizes import Grid, grid_of, resized
from megatron.sft.images.source import ImageError, ImageSize, ImageSource, pixels_of, size_of
from megatron.sft.images.urls import ImageCache
from megatron.sft.images.vision import Vision


class SizedImage(NamedTuple):
    """An image, and the size that its pixels are resized to."""

    source: ImageSource
    size: ImageSize


class SampleImages(NamedTuple):
    """The images of a sample of L tokens, in order."""

    images: tuple[SizedImage, ...]
    positions: npt.NDArray[np.int32]
    """[3, L]: positions along time, height and width."""
    starts: tuple[int, ...]
    """Place of the first placeholder of each image."""
    num_patches: npt.NDArray[np.int64]
    """[images]: patches that the tower encodes."""
    num_tokens: npt.NDArray[np.int64]
    """[images]: placeholders."""

    def named(self, record: str) -> SampleImages:
        """Returns the same images with `record` in their names, for messages."""
        return self._replace(
            images=tuple(
                SizedImage(one.source._replace(name=f"{record}: {one.source.name}"), one.size)
                for one in self.images
            )
        )


class Expanded(NamedTuple):
    """Tokens of a chat with all placeholders, N of them."""

    ids: npt.NDArray[np.int32]
    weights: npt.NDArray[np.float32]
    starts: tuple[int, ...]
    """Place of the first placeholder of each image."""


@dataclass(frozen=True)
class ImageChats:
    """Puts images into chats, for one model and its tokenizer."""

    vision: Vision
    literals: tuple[str, ...]
    """Texts of `vision.reserved_tokens`."""
    folder: str = ""
    """Folder of relative paths."""
    cache: ImageCache | None = None
    """Folder of images of URLs; None if they are errors."""
    decodes: bool = False
    """Whether pixels are read with the record, to find damaged files before they are scheduled."""

    def within(self, folder: str) -> ImageChats:
        """Returns the same for records whose relative paths are taken from `folder`; a folder that
        is set already stays.
        """
        return self if self.folder else replace(self, folder=folder)

    def sized(self, messages: Sequence[Message]) -> list[SizedImage]:
        """Returns the images of messages in order, with their sizes by their headers.

        Raises SampleError for an image that cannot be read.
        """
        found = []
        for image in (image for message in messages for image in message.images):
            assert isinstance(image.source, ImageSource)
            try:
                source = self._located(image.source)
                size = size_of(source)
                try:
                    size = resized(size, self.vision)
                except ValueError as fault:
                    raise ImageError(f"{source.name} {fault}") from None
                if self.decodes:
                    pixels_of(source)
            except ImageError as fault:
                raise SampleError(str(fault)) from None
            found.append(SizedImage(source, size))
        return found

    def _located(self, source: ImageSource) -> ImageSource:
        """Returns an image with the path of its file, if it has one."""
        if not source.url:
            return source.within(self.folder)
        if self.cache is None:
            raise ImageError(
                f"{source.name} is not fetched; pass --image-url-cache FOLDER to fetch images of "
                "URLs, or download it and give its path"
            )
        return self.cache.located(source)

    def check_texts(self, content: Content) -> None:
        """Raises SampleError for text that spells a token of images."""
        texts = said_in(content)
        messages = messages_of(content)
        texts += [json.dumps(one.fields, ensure_ascii=False, default=str) for one in messages]
        if isinstance(content, Conversation) and content.tools:
            texts.append(json.dumps(content.tools, ensure_ascii=False, default=str))
        for literal in self.literals:
            if any(literal in text for text in texts):
                raise SampleError(
                    f"text holds {shown(literal)}, which the model would read as an image; "
                    "remove it"
                )

    def check_ids(self, ids: npt.NDArray[np.integer]) -> None:
        """Raises SampleError for ids of a sample without images that have a token of images."""
        if np.isin(ids, self.vision.reserved_tokens).any():
            raise SampleError(
                f"tokens hold one of {' '.join(self.literals)}, but no image belongs to them; "
                "give the images, in a conversation"
            )

    @property
    def placeholder(self) -> str:
        """Text that a template writes for each image."""
        return dict(zip(self.vision.reserved_tokens, self.literals)).get(
            self.vision.image_token, ""
        )

    def expand(
        self,
        ids: npt.NDArray[np.int32],
        weights: npt.NDArray[np.float32],
        grids: Sequence[Grid],
    ) -> Expanded:
        """Returns ids [n] and weights [n] with a placeholder for each token of each image.

        Raises SampleError if the template wrote another number of placeholders than images.
        """
        is_image = ids == self.vision.image_token
        if (num_written := int(is_image.sum())) != len(grids):
            raise SampleError(
                f"the chat template writes {num_written} placeholders for {len(grids)} images; "
                "many templates leave out those of system prompts and answers, so move them to a "
                "turn of the user"
            )
        repeats = np.ones(len(ids), np.int64)
        repeats[is_image] = [grid.num_tokens for grid in grids]
        # a b i c, an image of 3 tokens -> repeats 1 1 3 1, ends 1 2 5 6: it begins at 5 - 3
        starts = (np.cumsum(repeats) - repeats)[is_image]
        trained = np.where(np.isin(ids, self.vision.reserved_tokens), np.float32(0), weights)
        return Expanded(
            np.repeat(ids, repeats), np.repeat(trained, repeats), tuple(starts.tolist())
        )

    def placed(
        self, num_tokens: int, images: Sequence[SizedImage], starts: Sequence[int]
    ) -> SampleImages | None:
        """Returns the images of a sample of `num_tokens`; None if one reaches beyond its end."""
        grids = [self.grid(image) for image in images]
        if starts and starts[-1] + grids[-1].num_tokens > num_tokens:
            return None
        counts = np.array([grid.num_tokens for grid in grids], np.int64)
        return SampleImages(
            images=tuple(images),
            positions=axis_positions(num_tokens, starts, grids),
            starts=tuple(starts),
            num_patches=counts * self.vision.merge_size**2,
            num_tokens=counts,
        )

    def grid(self, image: SizedImage) -> Grid:
        """Returns the tokens of an image."""
        return grid_of(image.size, self.vision)
