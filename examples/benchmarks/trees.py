"""mcore. Cost of a chat with thoughts: as a tree, as a sequence per turn, and in one rendering.

    OMP_NUM_THREADS=1 python -m examples.benchmarks.trees [TURNS ...]

Chats are synthetic: each turn asks with 60 tokens, thinks with 200 and answers with 80, give or
take half, under a template that leaves out the thoughts of earlier turns. CPU seconds are of
forward and backward passes of a small GPT on one core, median of several.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megatron.packing.batch.layout import Alignment
from megatron.packing.batch.microbatches import layouts_of_samples, pack
from megatron.packing.batch.reading import read_samples
from megatron.packing.batch.tree import Path, merge
from megatron.packing.device import Device
from megatron.packing.model.get_batch import packed_seq_params
from megatron.packing.model.layer_spec import packed_block_spec
from megatron.packing.model.loss.head import skip_masked_tokens
from megatron.planner.calibrate import one_process

WORDS = 1024
TURNS = (3, 10, 40)
QUESTION, THOUGHT, ANSWER = 60, 200, 80
REPEATS = 3
CPU = torch.device("cpu")


class Chat(NamedTuple):
    """The same turns three times: what an iterator gives."""

    tree: list[dict[str, Any]]
    per_turn: list[dict[str, Any]]
    one_rendering: list[dict[str, Any]]


def chat(num_turns: int, seed: int) -> Chat:
    """Returns a random chat of so many turns."""
    rng = np.random.default_rng(seed)

    def text(mean: int) -> list[int]:
        return rng.integers(0, WORDS, rng.integers(mean // 2, mean * 3 // 2 + 1)).tolist()

    context: list[int] = []
    whole: list[int] = []
    trained: list[int] = []
    paths = []
    for _ in range(num_turns):
        question, thought, answer = text(QUESTION), text(THOUGHT), text(ANSWER)
        context += question
        own = thought + answer
        paths.append(_path(context + own, [0] * len(context) + [1] * len(own)))
        context = context + answer
        whole += question + own
        trained += [0] * len(question) + [1] * len(own)
    merged = merge(paths)
    tree = {**merged._asdict()}
    return Chat([tree], [one._asdict() for one in paths], [_path(whole, trained)._asdict()])


def _path(ids: Sequence[int], trained: Sequence[int]) -> Path:
    return Path(np.array(ids[:-1]), np.array(ids[1:]), np.array(trained[1:], np.float32))


def seconds(model: GPTModel, records: list[dict[str, Any]], repeats: int) -> tuple[int, float]:
    """Returns the tokens of a record's samples, and the CPU seconds of their passes."""
    samples = read_samples(records)
    # Each sample is a pack: neither mode is helped by company.
    number = np.ones(samples.lengths.size, np.int64)
    packs = pack(samples, number, layouts_of_samples(samples, number, Alignment()))
    times = []
    for _ in range(repeats + 1):
        start = time.process_time()
        for microbatch in packs:
            params = packed_seq_params(microbatch, CPU)
            fields = {
                name: microbatch[name].unsqueeze(0)
                for name in ("tokens", "position_ids", "labels", "loss_mask")
            }
            losses: Tensor = model(
                fields["tokens"],
                fields["position_ids"],
                None,
                labels=fields["labels"],
                loss_mask=fields["loss_mask"],
                packed_seq_params=params,
            )
            (losses * fields["loss_mask"]).sum().backward()
        times.append(time.process_time() - start)
    return int(samples.lengths.sum()), statistics.median(times[1:])


def main() -> None:
    """Prints a row per number of turns."""
    config = TransformerConfig(
        num_layers=4,
        hidden_size=256,
        num_attention_heads=8,
        num_query_groups=2,
        ffn_hidden_size=768,
        normalization="RMSNorm",
        gated_linear_unit=True,
        add_bias_linear=False,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        use_cpu_initialization=True,
    )
    torch.manual_seed(1)
    with one_process(Device.at(CPU)):
        model = GPTModel(
            config, packed_block_spec(config), WORDS, 1 << 16, position_embedding_type="rope"
        )
        skip_masked_tokens(model)
        print(
            "| turns | samples | tokens computed | CPU seconds | tokens of turns per CPU second |"
        )
        print("|---|---|---|---|---|")
        for num_turns in [int(one) for one in sys.argv[1:]] or TURNS:
            made = chat(num_turns, num_turns)
            path_tokens = sum(len(one["tokens"]) for one in made.per_turn)
            for name, records in made._asdict().items():
                tokens, took = seconds(model, records, REPEATS if num_turns < 10 else 1)
                print(
                    f"| {num_turns} | {name.replace('_', ' ')} | {tokens:,} | {took:.2f} | "
                    f"{path_tokens / took:,.0f} |",
                    flush=True,
                )


if __name__ == "__main__":
    main()
