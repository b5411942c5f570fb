"""Whole runs of pretrain_sft.py from a HuggingFace folder to another one, as a user starts them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.functional_tests.forked_runs import ROOT, train_forked
from tests.functional_tests.hf_models import read_folder, write_model
from tests.functional_tests.ranks import run_ranks

COMMON = "--seq-length 96 --global-batch-size 4 --sequence-packing --over-length-policy truncate --eval-iters 0"
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

# An export that is killed when its third file is written.
KILLED = """
import os, sys
from megatron.sft.export import export
from megatron.sft.model.huggingface import write as hf_write
write, num_written = hf_write._write_file, []
def write_or_die(*arguments):
    write(*arguments)
    num_written.append(1)
    if len(num_written) == 3:
        os.kill(os.getpid(), 9)
hf_write._write_file = write_or_die
export(sys.argv[1], sys.argv[2], 100_000)
"""


def train(num_processes: int, arguments: Sequence[str]) -> str:
    status, output = train_forked(num_processes, [*COMMON.split(), *arguments])
    assert status == 0, output
    return output


def write_tokenizer(folder: Path) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer, bpe.decoder = byte_level, decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    trainer = trainers.BpeTrainer(vocab_size=290, special_tokens=special, initial_alphabet=byte_level.alphabet())
    bpe.train_from_iterator(["yes yes yes", "how are you today"], trainer)
    bpe.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|endoftext|>", "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 0, "do_sample": False}))


def talk(folder: Path) -> tuple[list[str], dict[str, Any]]:
    """What transformers complains of when it loads a folder, and what its generation config says; it answers a chat."""
    import transformers

    library: Any = transformers
    model, told = library.AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    tokenizer = library.AutoTokenizer.from_pretrained(folder)
    chat = [{"role": "user", "content": "how are you"}]
    prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    answer = model.generate(**prompt, max_new_tokens=5)
    assert len(answer[0]) > prompt["input_ids"].shape[1]
    return [str(name) for names in told.values() for name in names], model.generation_config.to_dict()


@pytest.mark.parametrize(
    ("model", "dtype", "world_size", "flags"),
    [
        ("qwen2-moe", torch.bfloat16, 4, "--bf16 --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 "
         "--expert-model-parallel-size 2 --sequence-parallel --use-distributed-optimizer --overlap-grad-reduce "
         "--overlap-param-gather"),
        ("gemma", torch.bfloat16, 2, "--tensor-model-parallel-size 2"),
        ("qwen3", torch.float32, 1, ""),
    ],
)  # fmt: skip
def test_without_training_every_tensor_keeps_its_bytes(
    tmp_path: Path, model: str, dtype: torch.dtype, world_size: int, flags: str
) -> None:
    """Steps at a learning rate of zero; a tensor that is cut, joined or rounded wrongly would differ."""
    source, target = tmp_path / "source", tmp_path / "target"
    run_ranks(write_model, 1, model, source, dtype)
    train(
        world_size,
        f"--pretrained-checkpoint {source} --mock-data --train-iters 2 --lr 0 --run-dir {tmp_path / 'run'} "
        f"--save-hf {target} {flags}".split(),
    )
    expected, found = read_folder(source), read_folder(target)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == dtype
        assert torch.equal(found[name].view(torch.uint8), tensor.view(torch.uint8)), name
    assert json.loads((target / "config.json").read_text()) == json.loads((source / "config.json").read_text())


def test_from_a_folder_to_a_folder(tmp_path: Path) -> None:
    """Trained, saved, exported, after an export that was killed, talked to and continued."""
    source, run, first, second = (tmp_path / name for name in ("source", "run", "first", "second"))
    run_ranks(write_model, 1, "llama3", source, torch.float32, 320)
    write_tokenizer(source)
    chats = tmp_path / "chats.jsonl"
    turns = [[{"role": "user", "content": f"{i}?"}, {"role": "assistant", "content": "yes " * i}] for i in range(1, 9)]
    chats.write_text("".join(json.dumps({"messages": turn}) + "\n" for turn in turns))
    arguments = (
        f"--pretrained-checkpoint {source} --data-path {chats} --lr 1e-3 --run-dir {run} --save {run / 'checkpoints'} "
        f"--load {run / 'checkpoints'} --pipeline-model-parallel-size 2 --split 1"
    ).split()
    assert "no checkpoint" in train(2, [*arguments, "--train-iters", "2", "--save-hf", str(first)])
    killed = subprocess.run([sys.executable, "-c", KILLED, str(run / "checkpoints"), str(second)], cwd=ROOT)
    assert killed.returncode == -9
    assert not second.exists()
    command = [sys.executable, "-m", "megatron.sft.export", str(run / "checkpoints"), str(second)]
    done = subprocess.run(
        [*command, "--max-shard-gigabytes", "0.0001"], cwd=ROOT, env={**os.environ}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    written, exported, before = read_folder(first), read_folder(second), read_folder(source)
    assert written.keys() == exported.keys() == before.keys()
    assert all(torch.equal(written[name], exported[name]) for name in written)
    assert not any(torch.equal(written[name], before[name]) for name in written)
    index = json.loads((second / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 3
    assert all(name in load_file(second / file) for name, file in index["weight_map"].items())
    for folder in (first, second):
        ((complaints, generation),) = run_ranks(talk, 1, folder)
        assert complaints == []
        assert generation["eos_token_id"] == [0, 2]  # <|endoftext|>, and <|im_end|>, which was trained
    assert subprocess.run(command, cwd=ROOT, capture_output=True).returncode == 2  # it is there already
    for file in source.glob("*.safetensors"):
        file.unlink()
    assert "continuing" in train(2, [*arguments, "--train-iters", "3"])
