"""Runs with --lora: checkpoints of adapters alone, continued to the bit and in another layout,
beside one base only.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint import FileSystemReader

from megatron.sft.agreement import AgreedError
from megatron.sft.arguments.parse import parse_config
from megatron.sft.data.datasets import build_datasets
from megatron.sft.distributed import process_groups
from megatron.sft.environment import world_from_environment
from megatron.sft.model.checkpoints.folder import TRACKER
from megatron.sft.model.huggingface.pretrained import open_pretrained
from megatron.sft.report.run_folder import prepare_output
from megatron.sft.training.stop import StopSignals
from megatron.sft.training.train import Trainer
from tests.functional_tests.hf_models import read_folder, write_model
from tests.functional_tests.ranks import run_ranks
from tests.functional_tests.test_hf_run import COMMON

SHARED = "--use-distributed-optimizer --expert-model-parallel-size 2"
FIRST = f"{SHARED} --tensor-model-parallel-size 2 --sequence-parallel"
LORA = "--lora --lora-rank 2 --lora-modules-to-save lm_head"


def train(
    num_processes: int, path: Path, run: str, rest: str, base: str = "base", lora: str = LORA
) -> str:
    """A run of three steps, which continues `run` if it is there; what it is refused for, if it
    is."""
    text = (
        f"{COMMON} --pretrained-checkpoint {path / base} --mock-data --train-iters 3 --lr 1e-2 "
        f"--adam-eps 1e-3 --run-dir {path / run} "  # a smaller one would divide rounding by itself
        f"--lr-decay-style constant --save {path / run} --load {path / run} --save-hf "
        f"{path / run}-adapter --num-workers 0 {lora} {rest}"
    )
    with socket.socket() as kept:  # from others, until rank 0 listens there
        kept.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        kept.bind(("localhost", 0))
        return run_ranks(_train, num_processes, text, kept.getsockname()[1])[0]


def _train(text: str, port: int) -> str:
    dist.barrier()  # or a rank that is still connecting finds the connection closed
    dist.destroy_process_group()
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT=str(port))
    rank, world_size = world_from_environment()
    config = parse_config(text.split(), world_size)
    refused = ""
    try:
        prepare_output(config.output)
        with process_groups(config) as device:
            datasets = build_datasets(config)
            pretrained = open_pretrained(config, datasets.vocab_size)
            assert config.output.run_dir is not None
            Trainer(config, datasets, device, Path(config.output.run_dir), pretrained).train(
                StopSignals()
            )
    except AgreedError as failure:
        refused = str(failure)
        dist.destroy_process_group()
    store = dist.FileStore(f"{config.output.save}.store", world_size)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=world_size
    )  # as whoever started us left it
    return refused


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`base`, a model; `run`, checkpoints of two and of three steps; `run-adapter`, what it wrote
    at the end; `steady`, a model in which float32's rounding does not grow.

    In `base` it grows a hundredfold a step: 2e-7 in the first product moved the loss of the fourth
    step by 0.07. So layouts are compared after one step from a checkpoint.
    """
    path = tmp_path_factory.mktemp("lora")
    run_ranks(write_model, 1, "qwen2-moe", path / "steady", torch.bfloat16)
    run_ranks(write_model, 1, "qwen3.5-moe", path / "base", torch.bfloat16)
    assert train(2, path, "run", f"{FIRST} --save-interval 2") == ""
    return path


@pytest.mark.parametrize(("layout", "apart"), [(FIRST, 0.0), (SHARED, 1e-5)])
def test_it_continues_to_the_bit_and_in_another_layout(
    folder: Path, layout: str, apart: float
) -> None:
    """A shard of an adapter that is saved as a replica, or an expert's under another's name, is
    lost on the way.
    """
    whole = read_folder(folder / "run-adapter")
    for name in ("experts.7.gate_proj", "in_proj_qkv", "in_proj_a", "linear_attn.out_proj"):
        assert any(f"{name}.lora_B" in found for found in whole)
    assert all(tensor.abs().max() > 0 for tensor in whole.values())
    run = f"continued-{apart}"
    shutil.copytree(folder / "run", folder / run)
    shutil.rmtree(folder / run / "iter_0000003")
    (folder / run / TRACKER).write_text("2")
    assert train(2, folder, run, layout) == ""
    found = read_folder(folder / f"{run}-adapter")
    assert found.keys() == whole.keys()
    for name, tensor in whole.items():
        assert (found[name] - tensor).abs().max() <= apart, name


@pytest.mark.parametrize("lora", [f"{LORA} embed_tokens"], ids=["and modules"])
def test_adapters_of_weights_in_bfloat16_continue(folder: Path, lora: str) -> None:
    """They are float32, which not every optimizer of megatron-core can save beside bfloat16."""
    run = f"half-{len(lora)}"
    two_steps = "--bf16 --train-iters 2"
    assert train(1, folder, run, f"{two_steps} --save-interval 1", lora=lora) == ""
    whole = read_folder(folder / f"{run}-adapter")
    shutil.rmtree(folder / run / "iter_0000002")
    (folder / run / TRACKER).write_text("1")
    shutil.rmtree(folder / f"{run}-adapter")
    assert train(1, folder, run, two_steps, lora=lora) == ""
    found = read_folder(folder / f"{run}-adapter")
    assert all(torch.equal(found[name], tensor) for name, tensor in whole.items())


def test_the_norm_of_gradients_is_that_of_one_process(folder: Path) -> None:
    """A shard that is taken for a copy is not counted: gradients are clipped too little, which no
    gradient shows.
    """
    norms = []
    for num_processes, layout in ((1, ""), (2, FIRST)):
        run = f"norm-{num_processes}"
        rest = f"{layout} --train-iters 1"
        assert train(num_processes, folder, run, rest, "steady") == ""
        steps = [
            json.loads(line) for line in (folder / run / "metrics.jsonl").read_text().splitlines()
        ]
        norms += [step["grad_norm"] for step in steps if step.get("grad_norm")]
    assert norms == [pytest.approx(norms[0], rel=1e-5)] * 2


def test_a_checkpoint_holds_adapters_only(folder: Path) -> None:
    """Were frozen weights saved too, each checkpoint would be as large as the model."""
    adapter = sum(tensor.numel() for tensor in read_folder(folder / "run-adapter").values())
    metadata = FileSystemReader(folder / "run" / "iter_0000003").read_metadata().state_dict_metadata
    sizes = {name: entry.size.numel() for name, entry in metadata.items() if hasattr(entry, "size")}
    of_optimizer = sum(size for name, size in sizes.items() if "optimizer" in name)
    vocabulary_padding = 6 * 64
    assert sum(sizes.values()) - of_optimizer == adapter + vocabulary_padding
    assert of_optimizer == 3 * (adapter + vocabulary_padding)


def test_another_base_is_refused(folder: Path) -> None:
    """Adapters beside other weights than those that they were trained beside compute nonsense."""
    shutil.copytree(folder / "base", folder / "other")
    file = sorted((folder / "other").glob("*.safetensors"))[0]
    save_file(
        {name: tensor + 1 for name, tensor in load_file(file).items()}, file, {"format": "pt"}
    )
    assert f"the base model was {folder / 'base'}, is {folder / 'other'})" in train(
        1, folder, "run", f"--save-hf {folder / 'never'}", "other"
    )
