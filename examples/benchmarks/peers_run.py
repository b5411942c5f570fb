"""tensor. One contender of peers.py, as this rank; also in the peers' environment, which has
nothing of this project's.

Each step's end is seen by a hook on torch's optimizers, so that all are measured alike: from the
end of a step to that of the next. There the process sleeps while the other contenders do theirs.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from examples.benchmarks.peers_kinds import KINDS, Kind
from examples.benchmarks.peers_turns import done

LONGEST = 1024
"""Most tokens of a sequence."""
PACKS = {"ours, packed": 2048, "ours, packs of 1,024": 1024}
"""Most tokens of a pack."""
ROWS = {
    "ours, padded": 8,
    "transformers, flattened": 1,
    "transformers, flattened in pairs": 2,
    "transformers, flattened in fours": 4,
    "TRL, packed": 1,
    "TRL, padded": 8,
}
"""Sequences of a microbatch of a process, for TRL's packing packs of LONGEST tokens. Few are
quickest where nothing is
padded: transformers' attention on CPU takes a mask of all pairs of a microbatch's tokens. Which of
one, two and four is quickest depends on lengths and machine.
"""
LR = 1e-4
LLAMA: dict[str, Any] = {
    "vocab_size": 8192,
    "hidden_size": 256,
    "intermediate_size": 688,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": LONGEST,
    "tie_word_embeddings": False,
    "rms_norm_eps": 1e-5,
}


def sequences(num_steps: int, masked: float, kind: Kind) -> list[dict[str, list[int]]]:
    """Samples as transformers takes them: labels are the tokens, -100 where they are masked."""
    random = np.random.default_rng(1)
    logs = random.normal(kind.mean_log, kind.deviation, num_steps * kind.global_batch_size)
    lengths = np.exp(logs).clip(8, LONGEST).astype(int)
    samples = []
    for length in lengths:
        tokens = random.integers(0, LLAMA["vocab_size"], length)
        labels = np.where(np.arange(length) <= masked * (length - 1), -100, tokens)
        samples.append({"input_ids": tokens.tolist(), "labels": labels.tolist()})
    return samples


def main() -> None:
    """Train as the command line says, and write what this rank measured."""
    asked = SimpleNamespace(**json.loads(sys.argv[1]))
    rank, folder = int(os.environ.get("RANK", 0)), Path(asked.folder)
    marks: list[float] = []

    def end_of_step(*_: Any) -> None:
        marks.append(time.process_time())
        if len(marks) < asked.num_steps:
            done(folder / asked.pipes[rank])

    register_optimizer_step_post_hook(end_of_step)
    asked.kind = KINDS[asked.data]
    data = sequences(asked.num_steps, asked.masked, asked.kind)
    train: Callable[..., tuple[list[int], float]] = (
        by_this_project if asked.name.startswith("ours") else by_peer
    )
    tokens, loss = train(asked, data, folder, rank)
    result: dict[str, Any] = {
        "tokens": tokens[: len(marks)],
        "seconds": [later - earlier for earlier, later in pairwise(marks)],
        "loss": loss,
    }
    if (
        asked.name == "TRL, packed"
    ):  # its first step is of other sequences, so one of just these is compared
        is_alone = asked.num_processes == 1
        result["loss"] = (
            by_peer(asked, data[: asked.kind.global_batch_size], folder, rank)[1]
            if is_alone
            else None
        )
    (folder / f"{asked.pipes[rank]}.json").write_text(json.dumps(result))


def by_this_project(
    asked: Any, data: Sequence[Any], folder: Path, rank: int
) -> tuple[list[int], float]:
    """(tokens of each step, of this rank: its share of them), and the loss of the first."""
    from examples.benchmarks import peers_ours

    rows = f"--micro-batch-size {ROWS.get(asked.name)}"
    if asked.name in PACKS:
        rows = f"--sequence-packing --max-seqlen-per-dp-cp-rank {PACKS[asked.name]}"
    flags = (
        f"--pretrained-checkpoint {model_folder(folder, rank)} --mock-data --seq-length {LONGEST} "
        f"--eval-iters 0 --global-batch-size {asked.kind.global_batch_size} "
        f"--train-iters {asked.num_steps} "
        f"--lr {LR} --lr-decay-style constant --weight-decay 0 --num-workers 0 --log-interval 1000 "
        f"{rows}"
    )
    steps = peers_ours.train(flags, data, folder / asked.name)
    return [step["tokens"] // asked.num_processes for step in steps], steps[0]["loss"]


def model_folder(folder: Path, rank: int) -> Path:
    """The model that all begin with, of weights on which the loss depends; made once."""
    from transformers import LlamaConfig, LlamaForCausalLM

    path = folder / "model"
    done = folder / "model_is_there"
    if rank == 0 and not done.exists():
        torch.manual_seed(1)
        model = LlamaForCausalLM(LlamaConfig(**LLAMA))
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, 1.0 if parameter.dim() == 1 else 0.0, 0.1)
        model.save_pretrained(path)
        done.touch()
    while not done.exists():
        time.sleep(0.1)
    return path


def by_peer(asked: Any, data: Sequence[Any], folder: Path, rank: int) -> tuple[list[int], float]:
    """As `by_this_project`; `data` of a single step is one microbatch."""
    from datasets import Dataset
    from torch.utils.data import SequentialSampler
    from transformers import (
        DataCollatorWithFlattening,
        LlamaForCausalLM,
        Trainer,
        TrainingArguments,
    )

    model = LlamaForCausalLM.from_pretrained(model_folder(folder, rank), dtype=torch.float32)
    batch = asked.kind.global_batch_size
    is_packed, is_single = asked.name == "TRL, packed", len(data) == batch
    rows = ROWS[asked.name] * (asked.kind.sequences_per_pack if is_packed else 1)
    common: dict[str, Any] = {
        "output_dir": str(folder / asked.name),
        "per_device_train_batch_size": batch if is_single else ROWS[asked.name],
        "gradient_accumulation_steps": 1 if is_single else batch // rows // asked.num_processes,
        "max_steps": 1 if is_single else asked.num_steps,
        "learning_rate": LR,
        "lr_scheduler_type": "constant",
        "weight_decay": 0.0,
        "max_grad_norm": 1.0,
        "optim": "adamw_torch",
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "use_cpu": True,
        "ddp_backend": "gloo" if asked.num_processes > 1 else None,
        "ddp_find_unused_parameters": False,
        "disable_tqdm": True,
        "bf16": False,
        "gradient_checkpointing": False,
    }
    counts: list[int] = []

    def counted(collate: Any) -> Any:
        def collate_and_count(features: Any) -> Any:
            batch = collate(features)
            flat = "attention_mask" not in batch
            counts.append(
                int(
                    (batch["position_ids"] > 0).sum()
                    if flat
                    else (batch["attention_mask"][:, 1:]).sum()
                )
            )
            return batch

        return collate_and_count

    def in_order(self: Any, train_dataset: Any = None) -> Any:
        return SequentialSampler(self.train_dataset if train_dataset is None else train_dataset)

    dataset = Dataset.from_list(list(data))
    if asked.name.startswith("TRL"):
        from trl import SFTConfig, SFTTrainer

        SFTTrainer._get_train_sampler = in_order
        arguments = SFTConfig(
            **common,
            max_length=LONGEST,
            packing=is_packed,
            padding_free=is_packed,
            dataset_kwargs={"skip_prepare_dataset": False},
        )
        trainer = SFTTrainer(
            model=model, args=arguments, train_dataset=dataset, processing_class=tokenizer()
        )
        trainer.data_collator = counted(trainer.data_collator)
    else:
        Trainer._get_train_sampler = in_order  # type: ignore[method-assign]
        collator = counted(DataCollatorWithFlattening())
        trainer = Trainer(
            model=model,
            args=TrainingArguments(**common),
            train_dataset=dataset,
            data_collator=collator,
        )
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    each = common["gradient_accumulation_steps"]
    tokens = [sum(counts[start : start + each]) for start in range(0, len(counts), each)]
    return tokens, losses[0]


def tokenizer() -> Any:
    """One that TRL asks for its ids of ends and padding; the data are tokens already."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = {f"<{number}>": number for number in range(LLAMA["vocab_size"])}
    words_only = Tokenizer(models.WordLevel(words, unk_token="<0>"))
    return PreTrainedTokenizerFast(
        tokenizer_object=words_only, eos_token="<1>", pad_token="<2>", unk_token="<0>"
    )


if __name__ == "__main__":
    main()
