"""Runs with --loss dpo: an adapter of supervised fine-tuning is continued, and the run continues in
another layout with the reference that it began with.
"""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from tests.functional_tests.forked_runs import train_forked
from tests.functional_tests.test_hf_run import write_tokenizer
from tests.functional_tests.test_run import steps_of

TENSOR = "--tensor-model-parallel-size 2 --sequence-parallel"
PIPELINE = "--pipeline-model-parallel-size 2"


def train(folder: Path, run: str, rest: str) -> dict[int, dict[str, Any]]:
    """Three steps of DPO upon the adapter in `folder`, on two processes; returns them by number."""
    status, output = train_forked(
        2,
        f"--pretrained-checkpoint {folder / 'base'} "
        f"--lora --lora-adapter {folder / 'adapter'} --data-path {folder / 'pairs.jsonl'} "
        f"--loss dpo --train-iters 3 --global-batch-size 4 --seq-length 64 --lr 1e-2 "
        f"--adam-eps 1e-3 --lr-decay-style constant --eval-iters 0 --num-workers 0 "
        f"--run-dir {folder / run} --save {folder / run} --load {folder / run} {rest}".split(),
    )
    assert status == 0, output
    return steps_of(folder / run)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`base`, a model; `adapter`, one that changes it; `pairs.jsonl`; `run`, a run with TP 2."""
    pytest.importorskip("transformers")
    path = tmp_path_factory.mktemp("preference")
    write_base(path / "base")
    write_tokenizer(path / "base")
    write_adapter(path / "adapter")
    random = np.random.default_rng(1)
    with (path / "pairs.jsonl").open("w") as file:
        for _ in range(12):
            texts = ["".join(random.choice(list("abcdef"), size)) for size in (9, 5, 7)]
            print(json.dumps(dict(zip(("prompt", "chosen", "rejected"), texts))), file=file)
    train(path, "run", f"{TENSOR} --save-interval 2")
    return path


HIDDEN, WIDE, ROWS, RANK = 32, 48, 296, 2
MODULES = {
    **{f"self_attn.{name}_proj": (HIDDEN, HIDDEN) for name in "qkvo"},
    **{f"mlp.{name}_proj": (WIDE, HIDDEN) for name in ("gate", "up")},
    "mlp.down_proj": (HIDDEN, WIDE),
}


def write_base(folder: Path) -> None:
    """Writes a Llama of two layers with random weights, as transformers does."""
    folder.mkdir()
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": ROWS,
        "hidden_size": HIDDEN,
        "intermediate_size": WIDE,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "max_position_embeddings": 64,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
    }
    (folder / "config.json").write_text(json.dumps(config))
    sizes = {"model.embed_tokens": (ROWS, HIDDEN), "lm_head": (ROWS, HIDDEN)}
    sizes |= {f"model.layers.{n}.{name}": size for n in range(2) for name, size in MODULES.items()}
    norms = ["model.norm"]
    norms += [
        f"model.layers.{n}.{name}_layernorm"
        for n in range(2)
        for name in ("input", "post_attention")
    ]
    torch.manual_seed(1)
    tensors = {f"{name}.weight": torch.randn(size) * 0.2 for name, size in sizes.items()}
    tensors |= {f"{name}.weight": torch.ones(HIDDEN) for name in norms}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def write_adapter(folder: Path) -> None:
    """Writes an adapter whose B is not zero, as peft does."""
    folder.mkdir()
    targets = [name.rpartition(".")[2] for name in MODULES]
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": 4, "target_modules": targets}
    (folder / "adapter_config.json").write_text(json.dumps({**config, "bias": "none"}))
    tensors = {}
    for n in range(2):
        for name, (rows, columns) in MODULES.items():
            start = f"base_model.model.model.layers.{n}.{name}"
            tensors[f"{start}.lora_A.weight"] = torch.randn(RANK, columns) * 0.1
            tensors[f"{start}.lora_B.weight"] = torch.randn(rows, RANK) * 0.1
    save_file(tensors, folder / "adapter_model.safetensors", {"format": "pt"})


def test_an_adapter_is_its_own_reference(folder: Path) -> None:
    """With the base for a reference, the first margins would be what supervised fine-tuning has
    learned, and a run that continues would have them once more.
    """
    steps = steps_of(folder / "run")
    first = steps[1]["figures"]
    assert steps[1]["loss"] == np.float32(math.log(2))
    assert [first[f"rewards/{name}"] for name in ("chosen", "rejected", "margins")] == [0.0] * 3
    assert steps[3]["figures"]["rewards/margins"] > 0.01
    run = "continued"
    shutil.copytree(folder / "run", folder / run)
    shutil.rmtree(folder / run / "iter_0000003")
    (folder / run / "latest_checkpointed_iteration.txt").write_text("2")
    continued = train(folder, run, PIPELINE)[3]
    assert continued["loss"] == pytest.approx(steps[3]["loss"], rel=1e-5)
    # Of float32's sums of some 30 nats; with the base for a reference it is 0.01 off.
    margin = steps[3]["figures"]["rewards/margins"]
    assert continued["figures"]["rewards/margins"] == pytest.approx(margin, abs=1e-5)
