"""Whole runs of pretrain_sft.py from a HuggingFace folder to another one, as a user starts them."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from megatron.sft.__main__ import main
from megatron.sft.commands.export import export
from megatron.sft.model.huggingface.older_rope import with_older_rope
from tests.functional_tests.forked_runs import command_forked, train_forked
from tests.functional_tests.hf_models import read_folder, write_model
from tests.functional_tests.ranks import run_ranks

COMMON = (
    "--seq-length 96 --global-batch-size 4 --sequence-packing --over-length-policy truncate "
    "--max-seqlen-per-dp-cp-rank 192 --eval-iters 0"
)
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


# An export that is killed when its third file is written.
def export_and_die(checkpoints: Path, folder: Path) -> None:
    """Export, and be killed behind the third file of weights."""
    from megatron.sft.model.huggingface import write as hf_write

    write, written = hf_write._write_file, []

    def write_or_die(*arguments: Any) -> None:
        write(*arguments)
        written.append(1)
        if len(written) == 3:
            os.kill(os.getpid(), signal.SIGKILL)

    hf_write._write_file = write_or_die  # type: ignore[assignment]
    export(checkpoints, folder, 100_000)


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
    trainer = trainers.BpeTrainer(
        vocab_size=290, special_tokens=special, initial_alphabet=byte_level.alphabet()
    )
    bpe.train_from_iterator(["yes yes yes", "how are you today"], trainer)
    bpe.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|endoftext|>",
        "chat_template": TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "generation_config.json").write_text(
        json.dumps({"eos_token_id": 0, "do_sample": False})
    )


def talk(folder: Path, questions: Sequence[str]) -> tuple[list[str], dict[str, Any], list[str]]:
    """What transformers complains of when it loads a folder, what its generation config says, and
    what it answers.
    """
    import transformers

    library: Any = transformers
    model, told = library.AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    tokenizer = library.AutoTokenizer.from_pretrained(folder)
    answers = []
    for question in questions:
        prompt = tokenizer.apply_chat_template(
            [{"role": "user", "content": question}],
            add_generation_prompt=True,
            return_tensors="pt",
            return_dict=True,
        )
        answer = model.generate(**prompt, max_new_tokens=5)[0, prompt["input_ids"].shape[1] :]
        assert len(answer)
        answers.append(tokenizer.decode(answer, skip_special_tokens=True))
    complaints = [str(name) for names in told.values() for name in names]
    return complaints, model.generation_config.to_dict(), answers


def answers_loss(folder: Path, turns: Sequence[list[dict[str, str]]]) -> tuple[float, int]:
    """The mean loss of the answers' tokens by transformers, each chat alone, and how many tokens
    these are.
    """
    import transformers

    library: Any = transformers
    model = library.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    tokenizer = library.AutoTokenizer.from_pretrained(folder)
    total, count = 0.0, 0
    for chat in turns:
        question = tokenizer.apply_chat_template(
            chat[:-1], add_generation_prompt=True, tokenize=False
        )
        whole = question + chat[-1]["content"] + "<|im_end|>"
        ids = torch.tensor(tokenizer(whole)["input_ids"])
        num_before = len(tokenizer(question)["input_ids"])
        with torch.no_grad():
            logits = model(ids[None]).logits[0]
        total += torch.nn.functional.cross_entropy(
            logits[num_before - 1 : -1], ids[num_before:], reduction="sum"
        ).item()
        count += len(ids) - num_before
    return total / count, count


@pytest.mark.parametrize(
    ("model", "dtype", "world_size", "flags"),
    [
        ("qwen2-moe", torch.bfloat16, 4, "--bf16 --tensor-model-parallel-size 2 "
                                         "--pipeline-model-parallel-size 2 "
         "--expert-model-parallel-size 2 --sequence-parallel --use-distributed-optimizer "
         "--overlap-grad-reduce "
         "--overlap-param-gather"),
        ("gemma", torch.bfloat16, 2, "--tensor-model-parallel-size 2"),
        ("qwen3", torch.float32, 1, ""),
    ],
)  # fmt: skip
def test_without_training_every_tensor_keeps_its_bytes(
    tmp_path: Path, model: str, dtype: torch.dtype, world_size: int, flags: str
) -> None:
    """Steps at a learning rate of zero; a tensor that is cut, joined or rounded wrongly would
    differ.
    """
    source, target = tmp_path / "source", tmp_path / "target"
    run_ranks(write_model, 1, model, source, dtype)
    train(
        world_size,
        f"--pretrained-checkpoint {source} --mock-data --train-iters 2 --lr 0 --run-dir "
        f"{tmp_path / 'run'} --save-hf {target} {flags}".split(),
    )
    expected, found = read_folder(source), read_folder(target)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == dtype
        assert torch.equal(found[name].view(torch.uint8), tensor.view(torch.uint8)), name
    # transformers 5 wrote the source, and 4 reads what is written, too.
    assert json.loads((target / "config.json").read_text()) == with_older_rope(
        json.loads((source / "config.json").read_text())
    )


def test_from_a_folder_to_a_folder(tmp_path: Path) -> None:
    """Trained, saved, exported, after an export that was killed, talked to and continued."""
    source, run, first, second = (tmp_path / name for name in ("source", "run", "first", "second"))
    run_ranks(write_model, 1, "llama3", source, torch.float32, 320)
    write_tokenizer(source)
    chats = tmp_path / "chats.jsonl"
    turns = [
        [{"role": "user", "content": f"{i}?"}, {"role": "assistant", "content": "yes " * i}]
        for i in range(1, 9)
    ]
    chats.write_text("".join(json.dumps({"messages": turn}) + "\n" for turn in turns))
    arguments = (
        f"--pretrained-checkpoint {source} --data-path {chats} --lr 1e-3 --run-dir {run} --save "
        f"{run / 'checkpoints'} --load {run / 'checkpoints'} --pipeline-model-parallel-size 2 "
        f"--valid-data-path {chats} --eval-iters 2 --hidden-dropout 0.2 --sample-prompts {chats} "
        "--sample-tokens 5"
    ).split()
    assert "no checkpoint" in train(2, [*arguments, "--train-iters", "2", "--save-hf", str(first)])
    status, _ = train_forked(1, [], partial(export_and_die, run / "checkpoints", second))
    assert status == -signal.SIGKILL
    assert not second.exists()
    command = ["export", str(run / "checkpoints"), str(second)]
    status, _, errors = command_forked([*command, "--max-shard-gigabytes", "0.0001"])
    assert status == 0, errors
    written, exported, before = read_folder(first), read_folder(second), read_folder(source)
    assert written.keys() == exported.keys() == before.keys()
    assert all(torch.equal(written[name], exported[name]) for name in written)
    assert not any(torch.equal(written[name], before[name]) for name in written)
    for folder in (first, second):  # the run's card goes with its checkpoints to the export
        assert re.search(r"trained +2 steps.*\ntraining loss", (folder / "README.md").read_text())
    index = json.loads((second / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 3
    assert all(name in load_file(second / file) for name, file in index["weight_map"].items())
    # Two batches of answers of different lengths: only a mean over all of their tokens, without
    # dropout, is this.
    ((loss, num_tokens),) = run_ranks(answers_loss, 1, first, turns)
    records = [json.loads(line) for line in (run / "metrics.jsonl").open()]
    evaluation = [record for record in records if record["kind"] == "evaluation"][-1]
    answered = [record for record in records if record.get("event") == "answers"][-1]
    assert (evaluation["iteration"], evaluation["num_tokens"]) == (2, num_tokens)
    assert evaluation["loss"] == pytest.approx(loss, rel=1e-6)
    for folder in (first, second):
        questions = [pair["prompt"] for pair in answered["answers"]]
        ((complaints, generation, answers),) = run_ranks(talk, 1, folder, questions)
        assert complaints == []
        # The model in training answered as transformers does, from the prompt that it serves.
        assert questions == [f"{i}?" for i in range(1, 9)]
        assert [pair["answer"] for pair in answered["answers"]] == answers
        assert generation["eos_token_id"] == [
            0,
            2,
        ]  # <|endoftext|>, and <|im_end|>, which was trained
    with pytest.raises(ValueError, match="exists"):
        export(run / "checkpoints", second, 100_000)
    for file in source.glob("*.safetensors"):
        file.unlink()
    assert "continuing" in train(2, [*arguments, "--train-iters", "3"])


def main_in_own_folder() -> None:
    """Each rank has a working directory of its own, as each machine has a disk."""
    os.chdir(Path(os.environ["OWN_FOLDERS"]) / f"rank{os.environ['RANK']}")
    main()


def test_ranks_that_read_other_files_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With half a model of each of two revisions a run trains on, at a loss that nobody suspects;
    so it does with other records or another chat template on some machines.
    """
    own, other = tmp_path / "rank0", tmp_path / "rank1"
    own.mkdir()
    run_ranks(write_model, 1, "llama2", own / "model", torch.float32, 304)
    write_tokenizer(own / "model")
    (own / "template.jinja").write_text(TEMPLATE)
    for records, number in (("chats.jsonl", 8), ("held_out.jsonl", 2)):
        turns = [{"role": "user", "content": "how"}, {"role": "assistant", "content": "yes"}]
        (own / records).write_text((json.dumps({"messages": turns}) + "\n") * number)
    shutil.copytree(own, other)
    weights = max((other / "model").glob("*.safetensors"))
    revised = bytearray(weights.read_bytes())
    revised[-1] ^= 1
    weights.write_bytes(revised)
    for name in ("chats.jsonl", "template.jinja"):
        (other / name).write_text((other / name).read_text().replace("yes", "no ") + "\n\n")
    monkeypatch.setenv("OWN_FOLDERS", str(tmp_path))
    arguments = (
        "--pretrained-checkpoint model --data-path chats.jsonl --valid-data-path held_out.jsonl "
        "--chat-template template.jinja --train-iters 1 --lr 1e-3 --tensor-model-parallel-size 2"
    )
    status, output = train_forked(2, [*COMMON.split(), *arguments.split()], main_in_own_folder)
    assert status == 2, output
    tokens, line = output.splitlines()
    assert tokens.startswith("tokens are those of tokenizer.json")
    assert (
        "ranks must be started alike, with the same options, versions and files: the data "
        "chats.jsonl" in line
    )
    for name in ("the data chats.jsonl", "template.jinja", f"model/{weights.name}"):
        assert re.search(
            rf"{re.escape(name)}[^;]* is [^;]* on rank 1, but [^;]* on rank 0", line
        ), line
    assert line.count(" on rank 1") == 3  # nothing else differs
