"""Each HuggingFace family beside transformers: logits and gradients of packs, over two
tensor-parallel ranks; and what was read is written with equal bits.

FAMILIES=all runs each on one rank, too.
"""

from __future__ import annotations

import json
import os
import re
from multiprocessing import get_context
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from megatron.sft.commands.export import export
from megatron.sft.model.huggingface.families.registry import FAMILIES
from megatron.sft.model.huggingface.older_rope import with_older_rope
from megatron.sft.model.huggingface.quantized.mxfp4 import from_mxfp4
from tests.functional_tests.config_fields import VISION as TOWERS
from tests.functional_tests.family_cases import (
    ALONE,
    EXAMPLES,
    MORE_PEFT_CASES,
    MORE_STEPS,
    PEFT_CASES,
    STEPS,
    TEMPLATE_OF,
    WITH_EXPERTS,
)
from tests.functional_tests.forked_runs import train_forked
from tests.functional_tests.hf_models import (
    FAMILY_MODELS,
    MODELS,
    largest_apart,
    logits_of,
    read_folder,
    sequences_in_order,
    stack_experts,
    train_by_product,
    train_by_transformers,
    write_model,
)
from tests.functional_tests.ranks import run_ranks
from tests.functional_tests.test_hf_weights import CASES, assert_equal
from tests.unit_tests.sft.data.records.test_turns import STRUCTURES

BATCHES = [sequences_in_order(5, (9, 40, 23))]
TENSOR_PARALLEL = "--tensor-model-parallel-size 2 --sequence-parallel"
EXPERTS = "--expert-model-parallel-size 2 --moe-router-dtype fp64"
ALL = os.environ.get("FAMILIES") == "all"
LAYOUTS = ["alone", "tp2"] if ALL else ["tp2"]
RARE = {
    "gemma4",
    "gemma4-unified",
    "glm4-moe",
    "glm4-moe-lite",
    "mistral4",
    "deepseek-v2",
    "phi3-windows",
    "phi3-short",
    "qwen3-vl",
    "qwen2-windows",
    "qwen3.5-moe",
    "olmo2",
}
"""Others compute what these do."""


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", [name for name in FAMILY_MODELS if ALL or name not in RARE])
def test_it_computes_what_transformers_computes(tmp_path, record_property, name, layout):
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
    record_property("logits", largest_apart(found, expected.logits))
    for ours, theirs in zip(found, expected.logits, strict=True):
        assert (ours - theirs).abs().max() <= 1e-12 * theirs.abs().max()
    source = read_folder(folder)
    gradients = read_folder(tmp_path / "gradients")
    of_text = {key: g for key, g in expected.gradients.items() if "visual." not in key}
    trained = {key: gradients[key] for key in of_text}  # buffers have none
    record_property("gradients", largest_apart(trained, of_text))
    assert_equal(trained, of_text, 1e-12)
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
        *([("gemma4-moe", "gemma4", "model.language_model.", "lm_head.")] * ALL),
        *([("gemma4-unified", "gemma4_unified", "model.language_model.", "lm_head.")] * ALL),
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
    assert kept == with_older_rope(config)


@pytest.mark.skipif(not ALL, reason="FAMILIES=all runs it")
@pytest.mark.parametrize(("name", "outer"), [("gemma4-unified", "gemma4_unified")])
def test_a_whole_model_of_transformers_is_trained_on_text(tmp_path, name, outer):
    """Its parts for images and sounds are named and nested as transformers has them."""
    tower = {"tower": TOWERS[outer], "ids": {}, "rope": None}
    run_ranks(write_model, 1, name, tmp_path / "model", torch.float32, None, None, tower)
    options = (
        f"--pretrained-checkpoint {tmp_path}/model --mock-data --seq-length 64 --sequence-packing "
        "--train-iters 1 --global-batch-size 4 --lr 1e-2 --eval-iters 0 --log-interval 1 "
        f"--save-hf {tmp_path}/written"
    )
    status, output = train_forked(1, options.split())
    assert status == 0, output
    before, written = read_folder(tmp_path / "model"), read_folder(tmp_path / "written")
    assert written.keys() == before.keys()
    moved = {key for key, tensor in written.items() if not torch.equal(tensor, before[key])}
    text = {key for key in before if ".language_model." in key or key == "lm_head.weight"}
    assert len(before.keys() - text) > 1
    assert moved == {key for key in text if not key.endswith("layer_scalar")}
    configs = [
        json.loads((tmp_path / folder / "config.json").read_text())
        for folder in ("model", "written")
    ]
    assert configs[1] == with_older_rope(configs[0])


def test_stacked_experts_are_written_as_they_were(tmp_path):
    """Some releases hold the experts of a layer as one tensor, others one by one."""
    run_ranks(write_model, 1, "qwen3.5-moe", tmp_path / "stacked")
    tensors = stack_experts(tmp_path / "stacked")
    flags = "--expert-model-parallel-size 2"
    assert_equal(written_again(tmp_path / "stacked", flags, 2), tensors, 0.0)


def test_a_vision_model_with_all_keys_at_the_top_is_read(tmp_path):
    """As Qwen2.5-VL was released: losses as with `text_config`, and the tower is written."""
    nested, flat = tmp_path / "nested", tmp_path / "flat"
    run_ranks(write_model, 1, "qwen2.5-vl", nested)
    config = json.loads((nested / "config.json").read_text())
    text = config.pop("text_config")
    axes = {"type": "mrope", "mrope_section": [2, 1, 1]}
    theta = text.pop("rope_parameters")["rope_theta"]
    del text["model_type"]
    tensors = read_folder(nested)
    assert any(name.startswith("visual.") for name in tensors)
    put(flat, text | config | {"rope_scaling": axes, "rope_theta": theta}, tensors)
    losses = [
        run_ranks(
            *(train_by_product, 1, "", folder, BATCHES, torch.float32, None),
            folder.with_name(f"{folder.name}-written"),
        )[0][0]
        for folder in (nested, flat)
    ]
    assert losses[0] == losses[1]
    assert_equal(read_folder(tmp_path / "flat-written"), tensors, 0.0)


def test_experts_of_qwen3_vl_are_read_as_released_and_as_transformers_writes_them(tmp_path):
    """Released files have inputs in front of outputs, those of transformers 5 the reverse: read as
    the other, a square matrix would train another model.
    """
    plain, turned = tmp_path / "plain", tmp_path / "turned"
    run_ranks(write_model, 1, "qwen3-vl-moe", plain)
    tensors = read_folder(plain)
    for key in [key for key in tensors if ".mlp.experts." in key]:
        tensors[key] = tensors[key].transpose(1, 2).contiguous()
    put(turned, json.loads((plain / "config.json").read_text()), tensors)
    losses = []
    for folder in (plain, turned):
        ranks = run_ranks(
            *(train_by_product, 1, "", folder, BATCHES, torch.float32, None),
            folder.with_name(f"{folder.name}-written"),
        )
        losses.append(ranks[0][0])
    assert losses[0] == losses[1]
    assert_equal(read_folder(tmp_path / "turned-written"), tensors, 0.0)


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


def quantize(name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    """A weight in fp8: of attention with one scale, of others in blocks of 48 x 32."""
    num_rows, num_columns = tensor.shape
    blocks = (1, 1) if "attn" in name else (-(-num_rows // 48), -(-num_columns // 32))
    scales = torch.rand(blocks) / 100 + 1e-3
    scale = scales.reshape(()) if "attn" in name else scales
    codes = torch.randn(num_rows, num_columns).mul(50).to(torch.float8_e4m3fn)
    return {name: codes, f"{name}_scale_inv": scale}


def dequantized(tensors: dict[str, torch.Tensor], name: str) -> torch.Tensor:
    """The values of a weight by the definition of the format, in float64."""
    codes, scales = tensors[name].double(), tensors[f"{name}_scale_inv"].double()
    if scales.dim() == 2:
        spread = scales.repeat_interleave(48, 0).repeat_interleave(32, 1)
        scales = spread[: codes.shape[0], : codes.shape[1]]
    return (codes * scales).float()


@pytest.mark.parametrize(
    ("name", "flags"),
    [
        ("minimax-m2", f"{TENSOR_PARALLEL} {EXPERTS}"),
        *([("llama3", ""), ("qwen3-next", f"{TENSOR_PARALLEL} {EXPERTS}")] if ALL else []),
    ],
)
def test_fp8_is_read_as_the_values_that_it_stands_for(tmp_path, name, flags):
    """By ranks that read rows or columns within blocks. What is written has one type, also layers
    that are not trained (MiniMax's own that predict further tokens), and names no quantization.
    """
    run_ranks(write_model, 1, name, tmp_path / "plain")
    config = json.loads((tmp_path / "plain" / "config.json").read_text())
    tensors = read_folder(tmp_path / "plain")
    names = [key for key in tensors if key.endswith((".w1.weight", ".w2.weight", "_proj.weight"))]
    if name == "minimax-m2":
        names.append("model.layers.4.eh_proj.weight")
        tensors[names[-1]] = torch.empty(64, 128)
    for key in names:
        tensors |= quantize(key, tensors[key])
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [48, 32]}
    put(tmp_path / "fp8", config, tensors)
    written = written_again(tmp_path / "fp8", flags, 2 if flags else 1)
    assert written.keys() == {key for key in tensors if not key.endswith("_scale_inv")}
    for key, tensor in written.items():
        assert torch.equal(tensor, dequantized(tensors, key) if key in names else tensors[key])
    kept = json.loads((tmp_path / "fp8-written" / "config.json").read_text())
    assert "quantization_config" not in kept


PAGE = Path(__file__).parents[2] / "docs" / "reference" / "models.md"


def layouts_beside_transformers(kind: str) -> list[str]:
    """Those in which tests compare a family with transformers or peft."""
    found = [layout for model, layout in CASES if MODELS[model][0] == kind]
    adapted = [(model, layout) for model, layout, _, _ in (*PEFT_CASES, *MORE_PEFT_CASES)]
    for model, layout in (*STEPS, *MORE_STEPS, *adapted):
        if (MODELS | FAMILY_MODELS)[model][0] == kind:
            found.append(layout.lower())
    if any(one == kind for one, _ in FAMILY_MODELS.values()):
        has_experts = "experts" in repr([c for k, c in FAMILY_MODELS.values() if k == kind])
        found.append("tp2-sp-ep2" if has_experts else "tp2-sp")
    return found


def table() -> str:
    """Returns the table of docs/reference/models.md, from the cases of the tests."""
    axes = ("tp", "pp", "cp", "ep")
    lines = [
        "| `model_type` | models | within | logits, gradients | TP | PP | CP | EP | LoRA | "
        "template |",
        f"|{'---|' * 10}",
    ]
    for kind, family in FAMILIES.items():
        beside = layouts_beside_transformers(kind)
        cells = ["●"]
        for axis in axes:
            is_there = any(re.search(rf"\b{axis}[2-9]", layout) for layout in beside)
            cells.append("●" if is_there else "○" if kind not in ALONE else "")
        if kind not in WITH_EXPERTS:
            cells[-1] = "none"
        adapted = [model for model, *_ in (*PEFT_CASES, *MORE_PEFT_CASES)]
        has_peft = any((MODELS | FAMILY_MODELS)[model][0] == kind for model in adapted)
        cells.append("●" if has_peft else "○")
        structure = TEMPLATE_OF.get(kind)
        serves = structure is not None and STRUCTURES[structure] == "differ"
        cells.append("" if structure is None else "served" if serves else "all")
        within = " ".join(f"`{outer}`" for outer in family.within)
        lines.append(f"| {' | '.join((f'`{kind}`', EXAMPLES[kind], within, *cells))} |")
    return "\n".join(lines)


def test_the_page_says_what_was_run():
    """A table that is kept by hand lies after the next change."""
    assert table() in PAGE.read_text()


@pytest.mark.parametrize("name", ["glm4-moe-groups", *(["gpt-oss", "qwen3.5-moe"] * ALL)])
def test_a_checkpoint_is_exported_as_the_run_writes_it(tmp_path, name):
    """A router's bias is no parameter, so that a checkpoint could lack it, or an export."""
    run_ranks(write_model, 1, name, tmp_path / "model")
    options = (
        f"--pretrained-checkpoint {tmp_path}/model --mock-data --seq-length 64 --sequence-packing "
        "--train-iters 1 --global-batch-size 4 --lr 1e-2 --eval-iters 0 --log-interval 1 "
        f"--save {tmp_path}/checkpoints --save-hf {tmp_path}/written"
    )
    status, output = train_forked(1, options.split())
    assert status == 0, output
    # in a process of its own: threads of its groups would not live on in later forks of this one
    arguments = (tmp_path / "checkpoints", tmp_path / "exported", 10**9)
    process = get_context("fork").Process(target=export, args=arguments)
    process.start()
    process.join(60)
    assert process.exitcode == 0
    written = read_folder(tmp_path / "written")
    assert_equal(read_folder(tmp_path / "exported"), written, 0.0)
    before = read_folder(tmp_path / "model")
    moved = {key for key, tensor in written.items() if not torch.equal(tensor, before[key])}
    kept = {key for key in before if key.endswith("e_score_correction_bias")}
    assert moved == before.keys() - kept
