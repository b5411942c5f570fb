"""Each HuggingFace family beside transformers: logits and gradients of packs, over two
tensor-parallel ranks; and what was read is written with equal bits.

FAMILIES=all runs each on one rank, too.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from megatron.sft.model.huggingface.mxfp4 import from_mxfp4
from tests.functional_tests.hf_models import (
    FAMILY_MODELS,
    logits_of,
    read_folder,
    sequences_in_order,
    train_by_product,
    train_by_transformers,
    write_model,
)
from tests.functional_tests.ranks import run_ranks
from tests.functional_tests.test_hf_weights import assert_equal

BATCHES = [sequences_in_order(5, (9, 40, 23))]
TENSOR_PARALLEL = "--tensor-model-parallel-size 2 --sequence-parallel"
EXPERTS = "--expert-model-parallel-size 2 --moe-router-dtype fp64"
LAYOUTS = ["alone", "tp2"] if os.environ.get("FAMILIES") == "all" else ["tp2"]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", FAMILY_MODELS)
def test_it_computes_what_transformers_computes(tmp_path, name, layout):
    """Windows, norms and scales that are off by one, or missing, train another model, in silence.

    Every tensor of the model is random, as zeros and ones would hide mistakes.
    """
    folder = tmp_path / "model"
    run_ranks(write_model, 1, name, folder)
    expected = run_ranks(train_by_transformers, 1, folder, BATCHES, torch.float64)[0]
    has_experts = any("experts" in key for key in FAMILY_MODELS[name][1])
    flags = f"{TENSOR_PARALLEL} {EXPERTS if has_experts else ''}"
    if layout == "alone":
        flags = "--moe-router-dtype fp64" if has_experts else ""
    per_rank = run_ranks(
        train_by_product,
        1 if layout == "alone" else 2,
        flags,
        folder,
        BATCHES,
        torch.float64,
        tmp_path / "gradients",
        tmp_path / "weights",
    )
    assert per_rank[0][0] == pytest.approx(expected.losses, rel=1e-12)
    packs = [pack for _, first in per_rank for pack in first]
    found = logits_of(BATCHES[0], packs, expected.logits[0].shape[-1])
    for ours, theirs in zip(found, expected.logits, strict=True):
        assert (ours - theirs).abs().max() <= 1e-12 * theirs.abs().max()
    source = read_folder(folder)
    gradients = read_folder(tmp_path / "gradients")
    trained = {key: gradients[key] for key in expected.gradients}  # buffers have none
    assert_equal(trained, expected.gradients, 1e-12)
    written = read_folder(tmp_path / "weights")
    assert_equal(written, {key: tensor.double() for key, tensor in source.items()}, 0.0)


def put(folder: Path, config: dict[str, object], tensors: dict[str, torch.Tensor]) -> None:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    save_file(
        {name: tensor.contiguous() for name, tensor in tensors.items()},
        folder / "model.safetensors",
    )


def written_again(folder: Path, flags: str = "", world_size: int = 1) -> dict[str, torch.Tensor]:
    """What the product writes of what it has read, in float32."""
    target = folder.with_name(f"{folder.name}-written")
    run_ranks(train_by_product, world_size, flags, folder, BATCHES, torch.float32, None, target)
    return read_folder(target)


@pytest.mark.parametrize(
    ("name", "outer", "body", "head"),
    [
        ("qwen3.5", "qwen3_5", "model.language_model.", "lm_head."),
        ("gemma3", "gemma3", "language_model.model.", "language_model.lm_head."),
    ],
)
def test_what_is_no_language_model_is_carried_through(tmp_path, name, outer, body, head):
    """Without its vision tower and the layers that predict further tokens, a folder is not that
    model any more.
    """
    run_ranks(write_model, 1, name, tmp_path / "text")
    text = json.loads((tmp_path / "text" / "config.json").read_text())
    tied = text.pop("tie_word_embeddings")
    tensors = {
        key.replace("lm_head.", head) if key.startswith("lm_head.") else body + key[6:]: tensor
        for key, tensor in read_folder(tmp_path / "text").items()
    }
    tensors["model.visual.proj.weight"] = torch.randn(3, 5).to(torch.bfloat16)
    if outer == "qwen3_5":
        tensors["mtp.fc.weight"] = torch.arange(7, dtype=torch.uint8)
    config = {
        "model_type": outer,
        "text_config": text,
        "tie_word_embeddings": tied,
        "vision_config": {"depth": 1},
        "dtype": "float32",
    }
    put(tmp_path / "whole", config, tensors)
    written = written_again(tmp_path / "whole")
    assert written.keys() == tensors.keys()
    assert all(
        torch.equal(tensor, written[key]) and tensor.dtype == written[key].dtype
        for key, tensor in tensors.items()
    )
    kept = json.loads((tmp_path / "whole-written" / "config.json").read_text())
    assert kept == config


def test_mxfp4_is_read_as_the_values_that_it_stands_for(tmp_path):
    """Released gpt-oss folders hold experts in four bits; over two expert-parallel ranks each reads
    its own, and the first writes all of them.
    """
    run_ranks(write_model, 1, "gpt-oss", tmp_path / "plain")
    config = json.loads((tmp_path / "plain" / "config.json").read_text())
    tensors = read_folder(tmp_path / "plain")
    quantized, expected = dict(tensors), dict(tensors)
    for key in [key for key in tensors if key.endswith(("gate_up_proj", "down_proj"))]:
        experts, columns, rows = tensors[key].shape
        blocks = torch.randint(0, 256, (experts, rows, columns // 32, 16), dtype=torch.uint8)
        scales = torch.randint(120, 128, blocks.shape[:-1], dtype=torch.uint8)
        del quantized[key]
        quantized |= {f"{key}_blocks": blocks, f"{key}_scales": scales}
        expected[key] = from_mxfp4(blocks, scales).transpose(1, 2).float()
    config["quantization_config"] = {"quant_method": "mxfp4"}
    put(tmp_path / "mxfp4", config, quantized)
    written = written_again(tmp_path / "mxfp4", "--expert-model-parallel-size 2", 2)
    assert_equal(written, expected, 0.0)
    kept = json.loads((tmp_path / "mxfp4-written" / "config.json").read_text())
    assert "quantization_config" not in kept
