"""pure. Decodes images to tensors, arrays or PIL images. It needs Pillow, and torch for tensors."""

import io
from importlib import import_module

import numpy as np

# Name -> (what it becomes, whether its values are floats, Pillow's name of its channels).
IMAGE_MODES: dict[str, tuple[str, bool, str]] = {
    **{
        f"{kind}{c}{8 if is_8 else ''}": (kind, not is_8, c.upper())
        for kind in ("", "torch")
        for c in ("l", "rgb", "rgba")
        for is_8 in (True, False)
    },
    **{f"pil{c}": ("pil", False, c.upper()) for c in ("l", "rgb", "rgba")},
    "torch": ("torch", True, "RGB"),
    "pil": ("pil", False, "RGB"),
}


def decode_image(content: bytes, mode: str) -> object:
    """Decodes as one of IMAGE_MODES: "torchrgb" is a float32 tensor of shape [3, height, width] in
    [0, 1].
    """
    kind, is_float, channels = IMAGE_MODES[mode]
    with import_module("PIL.Image").open(io.BytesIO(content)) as image:
        converted = image.convert(channels)
    if kind == "pil":
        return converted
    pixels = np.asarray(converted)
    if is_float:
        pixels = pixels.astype(np.float32) / np.float32(255)
    if kind != "torch":
        return pixels
    planes = pixels if pixels.ndim == 2 else pixels.transpose(2, 0, 1)
    return import_module("torch").from_numpy(np.array(planes, order="C"))
