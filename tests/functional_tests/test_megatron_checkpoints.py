"""Weights travel between this trainer and Megatron-LM by checkpoints in megatron-core's format,
under the same keys.
"""

from __future__ import annotations

import re
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.utils import unwrap_model

from megatron.sft.model.build import build_model, build_transformer_config, padded_vocab_size
from megatron.sft.model.checkpoints.checksums import file_names, sum_of, write_checksums
from megatron.sft.model.checkpoints.content import METADATA
from megatron.sft.model.checkpoints.folder import TRACKER
from megatron.sft.model.huggingface.pretrained import open_pretrained
from megatron.sft.options.config import SFTConfig
from tests.functional_tests.layouts import MODELS
from tests.functional_tests.oracle import (
    CPU,
    EXACT,
    VOCAB_SIZE,
    _prepare,
    _set_weights,
    options,
    sequences,
)
from tests.functional_tests.ranks import run_ranks

SHAPES = {
    "grouped": MODELS["grouped"],
    "tied": MODELS["tied"] + " --swiglu",
    "experts": MODELS["experts"],
}
LAYOUTS = {
    "one process": (1, ""),
    "tp2-sp": (
        2,
        "--tensor-model-parallel-size 2 --sequence-parallel --expert-model-parallel-size {experts}",
    ),
    "pp2-interleaved": (
        2,
        "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1",
    ),
    "pp2-uneven": (2, "--pipeline-model-parallel-size 2 --decoder-first-pipeline-num-layers 1"),
}


def prepared(flags: str) -> SFTConfig:
    config = options(flags, [sequences(0, (4, 4))], dist.get_world_size())
    _prepare(config)
    return config


def megatrons_own_model(config: SFTConfig) -> Any:
    """A GPTModel as Megatron-LM builds it."""
    transformer_config = build_transformer_config(config, CPU, params_dtype=torch.float64)
    spec = get_gpt_decoder_block_spec(
        transformer_config,
        use_transformer_engine=False,
        normalization=transformer_config.normalization,
    )
    return GPTModel(
        transformer_config,
        spec,
        padded_vocab_size(VOCAB_SIZE, config),
        config.model.seq_length,
        share_embeddings_and_output_weights=not config.model.untie_embeddings_and_output_weights,
        position_embedding_type=config.model.position_embedding_type,
    )


def save_as_megatron_lm(flags: str, folder: Path, tracked: str) -> None:
    """With options beside the weights, which are an object that nobody should unpickle."""
    gpt = megatrons_own_model(prepared(flags))
    _set_weights([gpt], EXACT)
    path = folder / ("release" if tracked == "release" else f"iter_{int(tracked):07d}")
    path.mkdir(parents=True)
    state = {"model": gpt.sharded_state_dict(), "args": Namespace(hidden_size=1), "iteration": 7}
    dist_checkpointing.save(state, str(path))
    (folder / TRACKER).write_text(tracked)


def chunks_from(flags: str, folder: Path) -> list[Any]:
    config = prepared(f"{flags} --pretrained-checkpoint {folder}")
    pretrained = open_pretrained(config, VOCAB_SIZE)
    transformer_config = build_transformer_config(config, CPU, params_dtype=torch.float64)
    return [
        unwrap_model(chunk)
        for chunk in build_model(config, transformer_config, VOCAB_SIZE, CPU, pretrained)
    ]


def num_other_weights(flags: str, folder: Path) -> tuple[int, list[str]]:
    """How many parameters this rank holds, and which are not those that were saved."""
    chunks = chunks_from(flags, folder)
    found = [
        (name, p.detach().clone(), p) for chunk in chunks for name, p in chunk.named_parameters()
    ]
    _set_weights(chunks, EXACT)
    return len(found), [name for name, before, p in found if not torch.equal(before, p.detach())]


@pytest.mark.parametrize("shape", SHAPES)
def test_a_run_starts_from_weights_of_megatron_lm(tmp_path: Path, shape: str) -> None:
    """In any layout; what is beside the weights is not looked at."""
    run_ranks(
        save_as_megatron_lm, 1, SHAPES[shape], tmp_path, "release" if shape == "tied" else "7"
    )
    for num_ranks, flags in LAYOUTS.values():
        layout = flags.format(experts=2 if shape == "experts" else 1)
        for number, others in run_ranks(
            num_other_weights, num_ranks, f"{SHAPES[shape]} {layout}", tmp_path
        ):
            assert number > 3
            assert others == []


def told(flags: str, folder: Path) -> str:
    with pytest.raises(ValueError) as failure:  # noqa: PT011
        chunks_from(flags, folder)
    return str(failure.value)


def test_weights_of_another_model_are_named(tmp_path: Path) -> None:
    run_ranks(save_as_megatron_lm, 1, SHAPES["grouped"], tmp_path, "7")
    others = {
        "--ffn-hidden-size 24": r"mlp.linear_fc1.weight is \[4, 96, 32\] there, "
        r"but \[4, 48, 32\] here",
        "--num-layers 8": r"is \[4, .*\] there, but \[8, .*\] here",
        "--qk-layernorm": "it has no .*layernorm.weight",
        "--lora": "--lora needs a HuggingFace folder",
    }
    for flags, expected in others.items():
        (text,) = run_ranks(told, 1, f"{SHAPES['grouped']} {flags}", tmp_path)
        assert re.search(expected, text), text


def save_as_this_trainer(flags: str, folder: Path) -> None:
    config = prepared(flags)
    transformer_config = build_transformer_config(config, CPU, params_dtype=torch.float64)
    chunks = [
        unwrap_model(chunk) for chunk in build_model(config, transformer_config, VOCAB_SIZE, CPU)
    ]
    _set_weights(chunks, EXACT)
    if dist.get_rank() == 0:
        folder.mkdir()
    dist.barrier()
    parts = {
        f"model{number}": chunk.sharded_state_dict(metadata=METADATA)
        for number, chunk in enumerate(chunks)
    }
    dist_checkpointing.save(parts, str(folder))


def load_as_megatron_lm(flags: str, folder: Path) -> list[str]:
    gpt = megatrons_own_model(prepared(flags))
    state = dist_checkpointing.load({"model": gpt.sharded_state_dict()}, str(folder))
    gpt.load_state_dict(state["model"])
    found = {name: p.detach().clone() for name, p in gpt.named_parameters()}
    _set_weights([gpt], EXACT)
    return [name for name, p in gpt.named_parameters() if not torch.equal(found[name], p.detach())]


@pytest.mark.parametrize("shape", SHAPES)
def test_megatron_core_reads_what_this_trainer_saves(tmp_path: Path, shape: str) -> None:
    num_ranks, flags = LAYOUTS["pp2-interleaved" if shape == "tied" else "tp2-sp"]
    layout = flags.format(experts=2 if shape == "experts" else 1)
    run_ranks(save_as_this_trainer, num_ranks, f"{SHAPES[shape]} {layout}", tmp_path / "saved")
    assert run_ranks(load_as_megatron_lm, 1, SHAPES[shape], tmp_path / "saved") == [[]]


@pytest.mark.parametrize("has_checksums", [True, False])
def test_damaged_files_are_named_and_not_trained_from(tmp_path: Path, has_checksums: bool) -> None:
    """Flipped bits would train on as if nothing were; without checksums at least a file cut off is
    noticed.
    """
    run_ranks(save_as_megatron_lm, 1, SHAPES["grouped"], tmp_path, "7")
    path = tmp_path / "iter_0000007"
    if has_checksums:
        write_checksums(path, {name: sum_of(path / name) for name in file_names(path)})
    file = max(path.glob("*.distcp"), key=lambda each: each.stat().st_size)
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content if has_checksums else content[: len(content) // 2])
    (text,) = run_ranks(told, 1, SHAPES["grouped"], tmp_path)
    assert (f"{file} is damaged" if has_checksums else f"{file} has ") in text
    assert text.endswith("pass another --pretrained-checkpoint")
