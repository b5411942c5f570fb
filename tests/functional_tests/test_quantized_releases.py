"""Look-alikes of releases that exist in fewer bits alone, whole: DeepSeek-V3 in fp8 blocks, and
Kimi K2, whose experts are int4 of compressed-tensors. Read, trained, and written with the bits that
transformers dequantizes them to.

Run by `make families`.
"""

from __future__ import annotations

import json
import os
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.functional_tests.hf_models import (
    read_folder,
    sequences_in_order,
    train_by_product,
    write_model,
)
from tests.functional_tests.ranks import run_ranks

BATCHES = [sequences_in_order(seed, (9, 40, 23)) for seed in (5, 6)]
SIZES = {
    "hidden_size": 256,
    "intermediate_size": 384,
    "moe_intermediate_size": 128,
    "qk_nope_head_dim": 8,
}
"""Weights of more than one block of 128 x 128, none of which is smaller than others: transformers
divides rows evenly.
"""
LAYOUTS = {
    "alone": (1, ""),
    "tp2-sp-ep2": (
        2,
        "--tensor-model-parallel-size 2 --sequence-parallel --expert-model-parallel-size 2",
    ),
    "pp2": (2, "--pipeline-model-parallel-size 2"),
}
FP8 = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": [128, 128],
}
INT4 = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "quantization_status": "compressed",
    "ignore": [
        "lm_head",
        "re:.*self_attn.*",
        "re:.*shared_experts.*",
        "re:.*mlp\\.(gate|up|down)_proj.*",
    ],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "input_activations": None,
            "output_activations": None,
            "weights": {
                "type": "int",
                "num_bits": 4,
                "group_size": 32,
                "strategy": "group",
                "symmetric": True,
                "dynamic": False,
                "actorder": None,
            },
        }
    },
}


def in_fp8(name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    """Returns a weight of random codes and scales, of blocks of 128 x 128."""
    blocks = [-(-size // 128) for size in tensor.shape]
    codes = torch.randn(tensor.shape).mul(50).to(torch.float8_e4m3fn)
    return {name: codes, f"{name}_scale_inv": torch.rand(blocks) / 300 + 1e-4}


def in_int4(name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    """Returns a weight of random numbers of 4 bits, eight to a word, and scales of 32 columns."""
    rows, columns = tensor.shape
    words = torch.randint(-(2**31), 2**31, (rows, columns // 8), dtype=torch.int32)
    return {
        f"{name}_packed": words,
        f"{name}_scale": (torch.rand(rows, columns // 32) / 30 + 1e-3).to(torch.bfloat16),
        f"{name}_shape": torch.tensor([rows, columns], dtype=torch.int32),
    }


def int4_values(tensors: dict[str, torch.Tensor], name: str) -> torch.Tensor:
    """Returns a weight's values by the definition of the format, in the type of its scales."""
    words, scales = tensors[f"{name}_packed"], tensors[f"{name}_scale"]
    numbers = (words.long()[..., None] >> torch.arange(0, 32, 4)) % 16 - 8
    values = numbers.flatten(1).double() * scales.double().repeat_interleave(32, 1)
    return values.to(scales.dtype)


def dequantize_by_transformers(folder: Path, target: Path) -> None:
    """Writes the folder as transformers loads it, in float32."""
    from transformers import AutoModelForCausalLM, CompressedTensorsConfig, FineGrainedFP8Config

    method = json.loads((folder / "config.json").read_text())["quantization_config"]["quant_method"]
    kind = FineGrainedFP8Config if method == "fp8" else CompressedTensorsConfig
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, quantization_config=kind(dequantize=True)
    )
    state = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    target.mkdir()
    save_file(state, target / "model.safetensors")


def stacked(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Returns tensors as transformers 5 holds them: the experts of a layer as one."""
    found = {name: tensor for name, tensor in tensors.items() if ".experts." not in name}
    layers = {name.split(".experts.")[0] for name in tensors.keys() - found.keys()}
    for layer in layers:
        count = len(
            {name.split(".")[5] for name in tensors if name.startswith(f"{layer}.experts.")}
        )
        gate, up, down = (
            torch.stack([tensors[f"{layer}.experts.{e}.{part}.weight"] for e in range(count)])
            for part in ("gate_proj", "up_proj", "down_proj")
        )
        found[f"{layer}.experts.gate_up_proj"] = torch.cat((gate, up), 1)
        found[f"{layer}.experts.down_proj"] = down
    return found


@pytest.mark.skipif(os.environ.get("FAMILIES") != "all", reason="FAMILIES=all runs it")
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("method", ["fp8", "int4"])
def test_a_release_in_fewer_bits_is_read_and_trained(tmp_path, method, layout):
    """These models have no folder before quantization. A scale of another block, or nibbles in
    another order, would train another model.
    """
    plain, quantized, dense = (tmp_path / name for name in ("plain", method, "dense"))
    run_ranks(write_model, 1, "deepseek-v3", plain, torch.bfloat16, None, SIZES)
    config = json.loads((plain / "config.json").read_text())
    tensors = read_folder(plain)
    part = "_proj" if method == "fp8" else ".mlp.experts."
    names = [name for name in tensors if part in name and name.endswith(".weight")]
    assert len(names) > 20
    for name in names:
        tensors |= (in_fp8 if method == "fp8" else in_int4)(name, tensors.pop(name))
    put(quantized, config | {"quantization_config": FP8 if method == "fp8" else INT4}, tensors)
    if method == "fp8" or find_spec("compressed_tensors"):
        run_ranks(dequantize_by_transformers, 1, quantized, tmp_path / "expected")
        expected = read_folder(tmp_path / "expected")
    else:
        values = {name: int4_values(tensors, name) for name in names}
        others = {n: t for n, t in tensors.items() if n.rpartition("_")[0] not in values}
        expected = {name: t.float() for name, t in stacked(values | others).items()}
    num_ranks, flags = LAYOUTS[layout]
    losses = []
    for folder in (quantized, dense):
        written = folder.with_name(f"{folder.name}-written")
        ranks = run_ranks(
            train_by_product, num_ranks, flags, folder, BATCHES, torch.float32, None, written, 1e-2
        )
        losses.append(ranks[0][0])
        if folder == quantized:
            found = read_folder(written)
            kept = json.loads((written / "config.json").read_text())
            assert "quantization_config" not in kept
            assert stacked(found).keys() == expected.keys()
            for name, tensor in stacked(found).items():
                assert torch.equal(tensor, expected[name]), name
            put(dense, config, found)
    assert losses[0] == losses[1]
    assert losses[0][0] != losses[0][1]


def put(folder: Path, config: dict[str, object], tensors: dict[str, torch.Tensor]) -> None:
    """Writes a folder of one file."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
