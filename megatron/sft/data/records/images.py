"""pure. Images of records: in which form they are given, and the place of each in the conversation.

    {"type": "image", "image" | "url" | "path" | "base64": ...}    a part of a message's content
    {"type": "image_url", "image_url": {"url": ...}}               OpenAI
    {"image": ...}                                                 Qwen; a part without a type
    {"type": "image"}, {"type": "image", "index": 0}               TRL; the image is in `images`
    "... <image> ..."                                              LLaVA, LLaMA-Factory, ms-swift;
                                                                   so is this one

`images` (or `image`) of the record is a list or one: paths, data: URLs, bytes, {bytes, path} as
datasets' Image has them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from megatron.packing.quoting import shown
from megatron.sft.data.records.values import SampleError, is_empty
from megatron.sft.images.source import ImageError, ImageSource, source_of_base64, source_of_text

COLUMNS = ("images", "image")
"""Keys of a record with its images."""
MARK = "<image>"
"""Place of an image in a text, in records that have images."""
_VALUES = ("image", "image_url", "url", "path", "base64", "bytes")
_TYPES = ("image", "image_url", "input_image")
_SUFFIXES = ("jpg", "jpeg", "png", "webp", "gif", "bmp", "tif", "tiff", "img")


class MessageImage(NamedTuple):
    """An image in a message."""

    at: int
    """Characters of the message's content before it."""
    source: ImageSource | int | None
    """The image; a number or None for one of the record's list, which is then taken in order."""


def is_image_part(part: Mapping[str, Any]) -> bool:
    """Returns whether a part of a message's content is an image."""
    kind = part.get("type")
    if kind is None:  # in a table each part has all keys
        return not (is_empty(part.get("image")) and is_empty(part.get("image_url")))
    return kind in _TYPES


def source_of_part(part: Mapping[str, Any], where: str) -> ImageSource | int | None:
    """Returns the image of a part, or where it stands in the record's list. Raises SampleError,
    which begins with `where`, for a form that is not known.
    """
    values = [(name, part[name]) for name in _VALUES if not is_empty(part.get(name))]
    if len(values) > 1 and {name for name, _ in values} != {"bytes", "path"}:
        raise SampleError(f"{where} has {' and '.join(name for name, _ in values)}; keep one")
    if not values:
        index = part.get("index")
        return index if isinstance(index, int) and not isinstance(index, bool) else None
    if len(values) == 2:
        return source_of(part, where)
    name, value = values[0]
    try:
        if name == "base64" and isinstance(value, str) and not value.startswith("data:"):
            return source_of_base64(value, where)
    except ImageError as fault:
        raise SampleError(str(fault)) from None
    return source_of(value, where)


def source_of(value: Any, where: str) -> ImageSource:
    """Returns the image of a value. Raises SampleError, which begins with `where`, for another."""
    try:
        if isinstance(value, str):
            return source_of_text(value, where)
        if isinstance(value, bytes):
            return ImageSource(where, content=value)
        if isinstance(value, Mapping):
            if isinstance(content := value.get("bytes"), bytes):
                name = value.get("path")
                return ImageSource(f"{where} {shown(name)}" if name else where, content=content)
            if isinstance(text := value.get("url") or value.get("path"), str):
                return source_of_text(text, where)
    except ImageError as fault:
        raise SampleError(str(fault)) from None
    raise SampleError(
        f"{where} must be an image: a path, data:image/...;base64, or bytes, but is {shown(value)}"
    )


def read_images(fields: Mapping[str, Any]) -> tuple[list[ImageSource], set[str]]:
    """Returns the images of a record beside its conversation, in order, and the keys that they are
    read from.

    Parts of an archive's sample that are images (jpg, 0.png) are found by their names; a record
    that names none has all of them, numbered ones in the order of their numbers.
    """
    parts = {
        name: ImageSource(f"part {name}", content=value)
        for name, value in fields.items()
        if isinstance(value, bytes) and name.rpartition(".")[2].lower() in _SUFFIXES
    }
    found = [name for name in COLUMNS if not is_empty(fields.get(name))]
    if len(found) > 1:
        raise SampleError("record has images and image; leave one out, as by none=image")
    if not found:
        # Archives are often sorted by name: 1.png, 10.png, 2.png
        if all(name.partition(".")[0].isdecimal() for name in parts):
            parts = dict(sorted(parts.items(), key=lambda part: int(part[0].partition(".")[0])))
        return list(parts.values()), set(parts)
    value = fields[found[0]]
    values = value if isinstance(value, list) else [value]
    images = [
        parts[one]
        if isinstance(one, str) and one in parts
        else source_of(one, f"{found[0]}[{number}]")
        for number, one in enumerate(values)
    ]
    return images, {*found, *parts}


def split_marks(content: str) -> tuple[str, list[MessageImage]]:
    """Returns a text without its marks, and the images whose places they are.

    "a <image> b" -> "a  b", an image at 2
    """
    pieces = content.split(MARK)
    places, length = [], 0
    for piece in pieces[:-1]:
        length += len(piece)
        places.append(MessageImage(length, None))
    return "".join(pieces), places


def filled(
    images: Sequence[MessageImage], listed: Sequence[ImageSource], used: set[int], where: str
) -> list[MessageImage]:
    """Returns the images of a message with their sources, those without one from the record's list.

    used: numbers of the images in the list that have a place; those of this message are added.
    """
    found = []
    for image in images:
        if not isinstance(image.source, ImageSource):
            # The first without a place: {1} -> 0, {0} -> 1, {0, 2} -> 1
            unused = min(set(range(len(used) + 1)) - used)
            number = unused if image.source is None else image.source
            if not 0 <= number < len(listed):
                raise SampleError(
                    f"{where} has a place for image {number}, but the record has {len(listed)} in "
                    "images; give each place its image"
                )
            used.add(number)
            image = image._replace(source=listed[number])
        found.append(image)
    return found
