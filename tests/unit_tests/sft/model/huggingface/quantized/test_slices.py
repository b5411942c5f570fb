"""Quantized folders, read beside transformers' own dequantization."""

import json

import pytest
import torch
from safetensors.torch import save_file

from megatron.sft.model.huggingface.folder import fingerprint, open_folder
from megatron.sft.model.huggingface.quantized.pairs import describe
from megatron.sft.model.huggingface.quantized.slices import OpenFiles

NAME = "model.layers.0.mlp.up_proj.weight"
FP8, KIMI = {"quant_method": "fp8"}, {"quant_method": "compressed-tensors", "config_groups": {}}


def folder_of(path, quantization, tensors):
    (path / "config.json").write_text(
        json.dumps({"model_type": "llama", "quantization_config": quantization})
    )
    save_file(tensors, path / "model.safetensors")
    return open_folder(path)


def codes(*shape):
    return torch.randn(shape).mul_(50).to(torch.float8_e4m3fn)


def dequantized_by_transformers(codes, scales, dtype):
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    return Fp8Dequantize(None)._dequantize_one(codes, scales, dtype)


FOLDERS = {
    "blocks": ((256, 384), torch.rand(2, 3), "F8_E4M3 by 128 x 128"),
    "scalar": ((5, 16), torch.rand((), dtype=torch.bfloat16), "F8_E4M3 by tensor"),
    "exponents": (
        (4, 64),
        torch.randint(100, 130, (4, 2), dtype=torch.uint8),
        "F8_E4M3 by 1 x 32",
    ),
    "experts": ((3, 128, 256), torch.rand(3, 1, 2), "F8_E4M3 by 128 x 128"),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("kind", FOLDERS)
def test_fp8_is_what_transformers_reads(tmp_path, kind, dtype):
    """Other bits are another model than the one that is served. All files are read by tensor-
    parallel ranks, too, which take rectangles.
    """
    shape, scales, described = FOLDERS[kind]
    tensors = {
        NAME: codes(*shape),
        f"{NAME}_scale_inv": scales,
        NAME.replace("weight", "activation_scale"): torch.ones(()),
        "model.norm.weight": torch.randn(8),
    }
    folder = folder_of(tmp_path, FP8, tensors)
    assert folder.tensors.keys() == {NAME, "model.norm.weight"}
    stored = folder.tensors[NAME]
    assert (stored.shape, describe(stored)) == (shape, described)
    expected = dequantized_by_transformers(tensors[NAME], scales, dtype)
    held = OpenFiles().slice_of(stored, dtype)
    assert torch.equal(held[:], expected)
    if len(shape) == 2:
        assert torch.equal(held[1:4, 3:9], expected[1:4, 3:9])
    else:
        assert torch.equal(held[1:2], expected[1:2])
    plain = OpenFiles().slice_of(folder.tensors["model.norm.weight"], dtype)
    assert torch.equal(plain[:], tensors["model.norm.weight"])


@pytest.mark.parametrize("scale", ["_scale", "_scale_inv"])
def test_the_last_blocks_may_be_smaller(tmp_path, scale):
    """By the definition of the format, in float64. transformers 5.24 takes 192 rows with 2 scales
    for blocks of 96 rows, unlike the kernels that multiply in blocks of 128.
    """
    tensors = {NAME: codes(192, 160), NAME + scale: torch.rand(2, 2)}
    stored = folder_of(tmp_path, FP8, tensors).tensors[NAME]
    rows, columns = torch.arange(192) // 128, torch.arange(160) // 128
    exact = tensors[NAME].double() * tensors[NAME + scale].double()[rows][:, columns]
    assert torch.equal(OpenFiles().slice_of(stored, torch.float32)[:], exact.float())


def test_int4_of_compressed_tensors(tmp_path):
    """By the definition of the format, in float64: groups of 32 columns share a scale, and the
    product is rounded to its type.
    """
    numbers = torch.randint(-8, 8, (6, 96))
    words = ((numbers + 8).view(6, 12, 8) << torch.arange(0, 32, 4)).sum(-1)
    scales = torch.rand(6, 3).to(torch.bfloat16)
    tensors = {
        f"{NAME}_packed": torch.where(words < 2**31, words, words - 2**32).to(torch.int32),
        f"{NAME}_scale": scales,
        f"{NAME}_shape": torch.tensor([6, 96]),
    }
    folder = folder_of(tmp_path, KIMI, tensors)
    assert folder.tensors.keys() == {NAME}
    stored = folder.tensors[NAME]
    assert (stored.shape, describe(stored)) == ((6, 96), "INT4 by 1 x 32")
    exact = numbers.double() * scales.double().repeat_interleave(32, 1)
    held = OpenFiles().slice_of(stored, torch.float32)
    assert torch.equal(held[:], exact.to(torch.bfloat16).float())
    assert torch.equal(held[2:5, 44:70], exact.to(torch.bfloat16).float()[2:5, 44:70])


@pytest.mark.parametrize(
    ("scales", "words"),
    [
        (torch.rand(3, 1), r"\[256, 384\] in blocks of \[128, 128\] .*_scale_inv.*\[3, 1\]"),
        (torch.rand(256), "do not belong together"),
        (torch.ones(2, 3, dtype=torch.int32), "type I32"),
    ],
)
def test_scales_of_other_shapes_are_refused(tmp_path, scales, words):
    """They would be stretched over the wrong rows."""
    with pytest.raises(ValueError, match=words):
        folder_of(tmp_path, FP8, {NAME: codes(256, 384), f"{NAME}_scale_inv": scales})


def test_scales_are_joined_only_where_config_json_says_so(tmp_path):
    """transformers ignores scales that config.json says nothing of, and reads bare codes."""
    tensors = {NAME: codes(8, 8), f"{NAME}_scale_inv": torch.rand(1, 1)}
    known, unknown = (folder_of(tmp_path, config, tensors) for config in (FP8, None))
    assert known.tensors.keys() == {NAME}
    assert unknown.tensors.keys() == tensors.keys()
    assert fingerprint(known) != fingerprint(unknown)
