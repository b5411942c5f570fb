"""Images that an estimate of memory assumes."""

from pathlib import Path

from megatron.sft.fit.estimate import largest_images
from megatron.sft.images.vision import read_vision
from tests.unit_tests.sft.images.test_sizes import CONFIG, PROCESSOR, write


def test_images_fill_their_share(tmp_path: Path) -> None:
    """An image is within a sequence, so that short sequences have small ones."""
    vision = read_vision(write(tmp_path, CONFIG, preprocessor_config=PROCESSOR), 256 * 256)
    assert vision.most_tokens == 64
    large, small, smaller = ((side, side) for side in (256, 96, 64))
    assert largest_images((160, 12), vision, 1.0) == (large, large, small)
    assert largest_images((160, 12), vision, 0.5) == (large, smaller)
    assert largest_images((160,), vision, 0.0) == ()
