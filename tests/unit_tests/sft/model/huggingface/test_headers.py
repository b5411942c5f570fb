"""Headers of safetensors files, damaged and not."""

import json
import struct

import pytest

from megatron.sft.model.huggingface.headers import read_header

SINGLE = "model.safetensors"


def test_a_pointer_of_git_lfs_is_named(tmp_path):
    """A clone without git lfs has them in place of the weights."""
    (tmp_path / SINGLE).write_text("version https://git-lfs.github.com/spec/v1\nsize 12\n")
    with pytest.raises(ValueError, match="git lfs pull"):
        read_header(tmp_path / SINGLE)


def test_a_header_with_metadata_that_is_no_text_is_refused(tmp_path):
    """safetensors itself opens no such file, with a traceback of every rank."""
    entry = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}
    text = json.dumps({"__metadata__": {"format": {"pt": 1}}, "a": entry}).encode()
    (tmp_path / SINGLE).write_bytes(struct.pack("<Q", len(text)) + text + bytes(4))
    with pytest.raises(ValueError, match="copy it again"):
        read_header(tmp_path / SINGLE)


@pytest.mark.parametrize(
    ("shape", "offsets"),
    [
        ([2, 4], [0, 16]),  # less than its shape takes
        ([4], [16, 32]),  # over the other one
        ([4], [40, 56]),  # a gap before it
        ([2**40, 2**40], [32, 48]),  # more numbers than there could be
        ([4], [32.0, 48.0]),
    ],
)
def test_headers_that_overlap_or_overflow_are_refused(tmp_path, shape, offsets):
    """Weights of another tensor would be read for this one's, or a traceback would follow."""
    header = {"a": {"dtype": "F32", "shape": [8], "data_offsets": [0, 32]}}
    header["b"] = {"dtype": "F32", "shape": shape, "data_offsets": offsets}
    text = json.dumps(header).encode()
    content = struct.pack("<Q", len(text)) + text + bytes(max(32, int(offsets[1])))
    (tmp_path / SINGLE).write_bytes(content)
    with pytest.raises(ValueError, match=r"model\.safetensors must .*; copy it again"):
        read_header(tmp_path / SINGLE)
