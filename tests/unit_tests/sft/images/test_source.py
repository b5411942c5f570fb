"""Images of records: their sizes by headers, their pixels, and files that are damaged."""

import base64
import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron.sft.images.source import (
    ImageError,
    ImageSize,
    ImageSource,
    pixels_of,
    size_of,
    source_of_text,
)

Image = pytest.importorskip("PIL.Image")


def encoded(image: Any, kind: str = "png", **options: Any) -> ImageSource:
    content = io.BytesIO()
    image.save(content, kind, **options)
    return ImageSource("images[0]", content=content.getvalue())


@pytest.mark.parametrize("kind", ["png", "jpeg", "webp", "tiff"])
def test_a_turned_picture_is_as_wide_as_it_is_shown(kind: str) -> None:
    """By the header alone it has other tokens than by its pixels."""
    exif = Image.Exif()
    exif[0x0112] = 6
    source = encoded(Image.new("RGB", (80, 40)), kind, exif=exif)
    assert size_of(source) == ImageSize(80, 40)
    assert pixels_of(source).shape == (80, 40, 3)


def test_an_orientation_behind_the_pixels_counts() -> None:
    """Pillow finds it only once it has read the pixels."""
    exif = Image.Exif()
    exif[0x0112] = 8
    content = encoded(Image.new("RGB", (80, 40)), exif=exif).content
    start = content.index(b"eXIf") - 4
    length = int.from_bytes(content[start : start + 4], "big") + 12
    chunk, rest = content[start : start + length], content[:start] + content[start + length :]
    end = rest.index(b"IEND") - 4
    moved = ImageSource("late", content=rest[:end] + chunk + rest[end:])
    assert size_of(moved) == ImageSize(80, 40)
    assert pixels_of(moved).shape == (80, 40, 3)


def test_what_is_transparent_is_white() -> None:
    """On black, as Pillow's own conversion puts it, drawings of black lines vanish."""
    for mode, colour in (("RGBA", (0, 0, 0, 0)), ("LA", (0, 0))):
        assert (pixels_of(encoded(Image.new(mode, (4, 4), colour))) == 255).all()
    palette = Image.new("P", (4, 4))
    assert (pixels_of(encoded(palette, transparency=0)) == 255).all()


def test_pixels_are_resized() -> None:
    pixels = pixels_of(encoded(Image.new("L", (30, 20), 7)), ImageSize(64, 32))
    assert pixels.shape == (64, 32, 3)
    assert pixels.dtype == np.uint8
    assert (pixels == 7).all()


def test_damaged_files_are_named(tmp_path: Path) -> None:
    """A batch that dies without the name of a file costs a day."""
    noise = np.random.default_rng(0).integers(0, 256, (90, 90, 3), dtype=np.uint8)
    whole = encoded(Image.fromarray(noise), "jpeg").content
    half = ImageSource("images[1]", content=whole[: len(whole) // 2])
    assert size_of(half) == ImageSize(90, 90)
    with pytest.raises(ImageError, match=r"^images\[1\] cannot be read: .*truncated"):
        pixels_of(half)
    with pytest.raises(ImageError, match=r"^a cannot be read: it is no image that Pillow knows"):
        size_of(ImageSource("a", content=b"<html>"))
    with pytest.raises(ImageError, match=r"^a: there is no file .*/x.png"):
        size_of(ImageSource("a", path="x.png").within(str(tmp_path)))


def test_texts_of_images(tmp_path: Path) -> None:
    source = encoded(Image.new("RGB", (8, 8)))
    url = "data:image/png;base64," + base64.b64encode(source.content).decode()
    assert source_of_text(url, "image").content == source.content
    assert source_of_text("file:///a/b%20c.png", "image").within("/c").path == "/a/b c.png"
    assert source_of_text("/a/b%20c.png", "image").path == "/a/b%20c.png"
    assert source_of_text("b.png", "image").within("/c").path == "/c/b.png"
    for text, fault in (
        ("s3://a/b.png", "is not read from a server; download it"),
        ("data:image/png,abc", "must be data:image/...;base64"),
        ("data:image/png;base64,!", "must be base64, but is not"),
    ):
        with pytest.raises(ImageError, match=fault):
            source_of_text(text, "image")
