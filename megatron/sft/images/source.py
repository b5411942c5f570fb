"""pure. One image of a record: where its bytes are, its size by its header, and its pixels.

Pixels are those that transformers hands to an image processor: turned as EXIF says, in RGB, what is
transparent put on white. Needs Pillow.
"""

from __future__ import annotations

import base64
import binascii
import io
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple
from urllib.parse import unquote

import numpy as np
import numpy.typing as npt

from megatron.packing.quoting import shown

_ORIENTATION = 0x0112
_QUARTER_TURNS = (5, 6, 7, 8)
"""EXIF orientations that exchange height and width."""
_TEXT_CHUNKS = (b"eXIf", b"iTXt", b"tEXt", b"zTXt")
"""Chunks of a PNG that may hold an orientation; Pillow reads those behind the pixels only with the
pixels.
"""
_PNG_BEGIN = 8
_SHOWN, _SHOWN_OF_DATA = 160, 40
"""Most characters of a path or URL in messages, and of a data: URL."""


class ImageError(ValueError):
    """An image that cannot be read; the message begins with its name."""


class ImageSource(NamedTuple):
    """An image as a record has it."""

    name: str
    """Place in the record and short form of its content, for messages: images[0] 'a.png'."""
    path: str = ""
    """File; empty for bytes."""
    content: bytes = b""
    """Encoded image, as in a file."""
    url: str = ""
    """Address on a server; `urls` then finds its path."""

    def within(self, folder: str) -> ImageSource:
        """Returns the same image with a relative path taken from `folder`."""
        return self._replace(path=str(Path(folder) / self.path)) if self.path else self


class ImageSize(NamedTuple):
    """Pixels of an image, as it is shown."""

    height: int
    width: int


def source_of_text(text: str, name: str) -> ImageSource:
    """Returns the image of a path or a URL: data:, file:, http: or https:.

    Raises ImageError for other URLs, which are not read.
    """
    is_data = text.startswith("data:")
    name = f"{name} {shown(text[: _SHOWN_OF_DATA if is_data else _SHOWN])}"
    if is_data:
        head, comma, data = text.partition(",")
        if not comma or not head.endswith(";base64"):
            raise ImageError(f"{name} must be data:image/...;base64,... to be read")
        return source_of_base64(data, name)
    if text.lower().startswith(("http://", "https://")):
        return ImageSource(name, url=text)
    if "://" in text and not text.startswith("file://"):
        raise ImageError(f"{name} is not read from a server; download it, and give its path")
    is_file = text.startswith("file://")
    return ImageSource(name, path=unquote(text.removeprefix("file://")) if is_file else text)


def source_of_base64(text: str, name: str) -> ImageSource:
    """Returns the image of base64 text. Raises ImageError if it is none."""
    try:
        return ImageSource(name, content=base64.b64decode(text, validate=True))
    except (binascii.Error, ValueError):
        raise ImageError(f"{name} must be base64, but is not") from None


def size_of(source: ImageSource) -> ImageSize:
    """Returns the size of an image, by its header alone. Raises ImageError if it has none."""
    with _opened(source) as (image, stream):
        turned = _orientation(image, stream) in _QUARTER_TURNS
        if turned and image.format == "TIFF":  # Pillow turns it itself, some releases when loading
            image.load()
            turned = False
        width, height = image.size
        return ImageSize(width, height) if turned else ImageSize(height, width)


def pixels_of(source: ImageSource, size: ImageSize | None = None) -> npt.NDArray[np.uint8]:
    """Returns the pixels of an image, uint8 [height, width, 3], resized to `size` by bicubic
    interpolation if given. Raises ImageError for a damaged file.
    """
    from PIL import Image, ImageOps

    with _opened(source) as (image, _):
        upright: Any = ImageOps.exif_transpose(image)
        if "A" in upright.getbands() or upright.info.get("transparency") is not None:
            upright = upright.convert("RGBA")
            white = Image.new("RGBA", upright.size, (255, 255, 255, 255))
            upright = Image.alpha_composite(white, upright)
        upright = upright.convert("RGB")
        if size is not None and upright.size != (size.width, size.height):
            upright = upright.resize((size.width, size.height), Image.Resampling.BICUBIC)
        return np.array(upright)


@contextmanager
def _opened(source: ImageSource) -> Iterator[tuple[Any, BinaryIO]]:
    """Yields Pillow's image, whose pixels are read when they are asked for, and its stream."""
    from PIL import Image

    try:
        with (
            open(source.path, "rb") if source.path else io.BytesIO(source.content) as stream,
            Image.open(stream) as image,
        ):
            yield image, stream
    except FileNotFoundError:
        raise ImageError(f"{source.name}: there is no file {source.path}") from None
    # Pillow's plug-ins raise errors of any kind on damaged files.
    except Exception as error:
        fault = str(error) or type(error).__name__
        if "cannot identify image file" in fault:
            fault = "it is no image that Pillow knows"
        raise ImageError(f"{source.name} cannot be read: {fault:.200}") from None


def _orientation(image: Any, stream: BinaryIO) -> int:
    from PIL import Image

    if image.format == "PNG" and "exif" not in image.info and not _has_late_text(stream):
        # Pillow would read all pixels, to see what follows them.
        return int(Image.Image.getexif(image).get(_ORIENTATION, 1))
    return int(image.getexif().get(_ORIENTATION, 1))


def _has_late_text(stream: BinaryIO) -> bool:
    """Returns whether a PNG has chunks of text or EXIF behind its first pixels. The position of the
    stream is kept.
    """
    before, is_late = stream.tell(), False
    try:
        stream.seek(_PNG_BEGIN)
        while len(head := stream.read(8)) == 8:
            length, kind = struct.unpack(">I4s", head)
            if is_late and kind in _TEXT_CHUNKS:
                return True
            is_late = is_late or kind == b"IDAT"
            stream.seek(length + 4, io.SEEK_CUR)  # its content and checksum
        return False
    finally:
        stream.seek(before)
