"""Kinds of quantization, by the config.json of releases."""

import pytest

from megatron.sft.model.huggingface.quantized.methods import (
    Method,
    read_method,
    without_quantization,
)

KIMI_WEIGHTS = {
    "actorder": None,
    "block_structure": None,
    "group_size": 32,
    "num_bits": 4,
    "strategy": "group",
    "symmetric": True,
    "type": "int",
}
KIMI = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "config_groups": {"group_0": {"targets": ["Linear"], "weights": KIMI_WEIGHTS}},
    "ignore": ["lm_head", "re:.*self_attn.*"],
    "quantization_status": "compressed",
}
"""As Kimi K2 Thinking has it."""
MINISTRAL = {
    "quant_method": "fp8",
    "activation_scheme": "static",
    "weight_block_size": None,
    "modules_to_not_convert": ["model.vision_tower", "lm_head"],
}


def kimi(**weights):
    known = KIMI_WEIGHTS | weights
    return KIMI | {"config_groups": {"group_0": {"targets": ["Linear"], "weights": known}}}


@pytest.mark.parametrize(
    ("quantization", "method"),
    [
        ({"quant_method": "fp8"}, Method("fp8", (128, 128))),
        ({"quant_method": "fp8", "weight_block_size": [128, 64]}, Method("fp8", (128, 64))),
        (MINISTRAL, Method("fp8")),
        ({"quant_method": "mxfp4"}, Method("mxfp4")),
        (KIMI, Method("compressed-tensors")),
        (
            kimi(type="float", num_bits=8, strategy="block", block_structure=[128, 128])
            | {"format": "float-quantized"},
            Method("compressed-tensors", (128, 128)),
        ),
    ],
)
def test_kinds_that_are_read(quantization, method):
    """At the top, where wrappers of vision models have it, and in text_config, as Kimi K2.5."""
    assert read_method({"quantization_config": quantization}) == method
    inner = {"model_type": "mistral3", "text_config": {"quantization_config": quantization}}
    assert read_method(inner) == method
    assert read_method({"quantization_config": None, "text_config": None}) is None


@pytest.mark.parametrize(
    ("quantization", "words"),
    [
        ({"quant_method": "gptq", "bits": 4}, "of GPTQ,"),
        ({"quant_method": "awq"}, "of AWQ,"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "of bitsandbytes,"),
        ({"load_in_8bit": True}, "of bitsandbytes,"),
        ({"quant_method": "modelopt"}, "of NVIDIA ModelOpt,"),
        ({"quant_method": "new"}, "quant_method 'new'"),
        ({"quant_method": ["fp8"]}, "quant_method \\['fp8'\\]"),
        (KIMI | {"format": "nvfp4-pack-quantized"}, "format 'nvfp4-pack-quantized'"),
        (kimi(num_bits=8), "type 'int' with num_bits 8"),
        (kimi(symmetric=False), "zero points"),
        (kimi(actorder="group"), "reordered columns"),
        (KIMI | {"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparsity_config"),
        (KIMI | {"transform_config": {"config_groups": {"R1": {}}}}, "transform_config"),
        (KIMI | {"config_groups": []}, "config_groups are no mapping"),
        ({"quant_method": "fp8", "weight_block_size": [128]}, r"weight_block_size \[128\]"),
        ({"quant_method": "fp8", "weight_block_size": [0, 1]}, "two positive integers"),
    ],
)
def test_other_kinds_are_refused_by_name(quantization, words):
    """Their codes would be read as weights of another meaning."""
    with pytest.raises(ValueError, match=rf"model/config\.json has .*{words}.*(give|copy)"):
        read_method({"quantization_config": quantization}, "model/config.json")


def test_a_written_config_says_nothing_of_quantization():
    """Servers would look for scales that the written folder does not have."""
    text = {"model_type": "ministral3", "quantization_config": MINISTRAL}
    config = {"quantization_config": MINISTRAL, "text_config": text, "dtype": "float16"}
    assert without_quantization(config) == {
        "text_config": {"model_type": "ministral3", "dtype": "bfloat16"},
        "dtype": "float16",
    }
    assert without_quantization({"quantization_config": KIMI}) == {"dtype": "bfloat16"}
    plain = {"model_type": "llama", "text_config": {"model_type": "llama"}}
    assert without_quantization(plain) == plain
