"""Images as energon's users know them; shapes, types and values were compared with energon 7.4.1's,
for all modes.
"""

import io

import numpy as np
import pytest

from megatron.blending.energon._encoding.decode import SampleDecoder, decode_part
from megatron.blending.energon._media.images import IMAGE_MODES

PIXELS = np.array([[[0, 51, 255], [255, 0, 0]]], np.uint8)


@pytest.fixture(scope="module")
def png():
    image = pytest.importorskip("PIL.Image")
    file = io.BytesIO()
    image.fromarray(PIXELS).save(file, "PNG")
    return file.getvalue()


def test_default_is_a_float_tensor_of_channels_first(png):
    """A model that was trained on values in [0, 1] would be shown bytes, or channels for
    columns."""
    torch = pytest.importorskip("torch")
    image = decode_part("png", png)
    assert image.dtype == torch.float32
    assert image.shape == (3, 1, 2)
    torch.testing.assert_close(image[:, 0, 0], torch.tensor([0.0, 0.2, 1.0]))


@pytest.mark.parametrize(
    ("mode", "kind", "shape"),
    [
        ("rgb8", np.uint8, (1, 2, 3)),
        ("rgb", np.float32, (1, 2, 3)),
        ("l8", np.uint8, (1, 2)),
        ("rgba8", np.uint8, (1, 2, 4)),
        ("torchrgb8", "torch.uint8", (3, 1, 2)),
        ("torchl", "torch.float32", (1, 2)),
        ("torchrgba", "torch.float32", (4, 1, 2)),
    ],
)
def test_modes(png, mode, kind, shape):
    """`decoder = SampleDecoder(image_decode=...)` of a task encoder."""
    image = SampleDecoder(image_decode=mode)("a.PNG", png)
    assert (str(image.dtype), tuple(image.shape)) == (
        str(np.dtype(kind)) if not isinstance(kind, str) else kind,
        shape,
    )
    if mode == "rgb8":
        np.testing.assert_array_equal(image, PIXELS)


def test_pillow_modes(png):
    """Transforms of torchvision and others take these."""
    assert SampleDecoder(image_decode="pilrgb")("png", png).getpixel((0, 0)) == (0, 51, 255)
    assert SampleDecoder(image_decode="pill")("png", png).mode == "L"


def test_every_mode_decodes(png):
    """A name in the table that nothing stands behind."""
    pytest.importorskip("torch")
    assert len(IMAGE_MODES) == 17
    for mode in IMAGE_MODES:
        assert SampleDecoder(image_decode=mode)("png", png) is not None
