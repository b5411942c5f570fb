"""mcore. A prompt with several answers, in one process: as a tree, as a sequence per answer, and by
transformers.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path as Folder
from typing import Any, NamedTuple

import numpy as np
import torch

from examples.benchmarks.throughput_case import WARM_UPS, TransformersModel, by_matrix_products
from megatron.packing.batch.microbatches import layouts_of_samples, pack
from megatron.packing.batch.reading import read_samples
from megatron.packing.batch.tree import Path, merge
from megatron.packing.device import Device
from megatron.sft.fit.step import Prepared, forward_backward, on_device
from megatron.sft.model.build import build_training
from megatron.sft.options.config import SFTConfig

NUM_ANSWERS, NUM_PACKS = 8, 2
PROMPT, ANSWER = 4, 32
"""One in so many tokens of the longest sequence."""


class Step(NamedTuple):
    """What a step trains on."""

    prepared: list[Prepared]
    path_tokens: int
    """Tokens of the prompt and an answer, over all answers."""
    computed_tokens: int


def step_of(config: SFTConfig, *, as_trees: bool) -> Step:
    """Returns packs of as many whole prompts with their answers as they hold; at least one."""
    assert config.data.vocab_size is not None
    rng = np.random.default_rng(1)
    prompt, answer = config.model.seq_length // PROMPT, config.model.seq_length // ANSWER
    # A prompt is computed once in a tree: that many fit into a pack.
    num_prompts = NUM_PACKS * max(1, config.capacity_per_rank // (prompt + NUM_ANSWERS * answer))
    records: list[dict[str, Any]] = []
    for _ in range(num_prompts):
        asked = rng.integers(0, config.data.vocab_size, prompt)
        paths = []
        for _ in range(NUM_ANSWERS):
            ids = np.concatenate((asked, rng.integers(0, config.data.vocab_size, answer + 1)))
            trained = (np.arange(1, len(ids)) >= prompt).astype(np.float32)
            paths.append(Path(ids[:-1], ids[1:], trained))
        records += [merge(paths)._asdict()] if as_trees else [one._asdict() for one in paths]
    samples = read_samples(records)
    size = config.capacity_per_rank // int(samples.lengths.max())
    whole, rest = divmod(len(samples.lengths), max(size, 1))
    numbers = np.array([max(size, 1)] * whole + [rest] * bool(rest), np.int64)
    layouts = layouts_of_samples(samples, numbers, config.alignment)
    prepared = [
        Prepared(batch, layout.num_tokens, int(batch["loss_mask"].count_nonzero()))
        for batch, layout in zip(pack(samples, numbers, layouts), layouts)
    ]
    path_tokens = num_prompts * NUM_ANSWERS * (prompt + answer)
    return Step(prepared, path_tokens, int(samples.lengths.sum()))


def by_answers(config: SFTConfig, device: torch.device, case: Any, _: Folder) -> dict[str, Any]:
    """Tokens of paths per second of the product's own passes and optimizer, as trees or paths."""
    step = step_of(config, as_trees=case.way == "trees")
    assert config.data.vocab_size is not None
    training = build_training(config, config.data.vocab_size, Device.at(device))

    def train() -> None:
        forward_backward(
            config, training, [on_device(step.prepared, Device.at(device))], step.prepared
        )
        training.optimizer.step()

    return {"tokens_per_second": speed(train, case.num_steps, device) * step.path_tokens}


def by_transformers(
    config: SFTConfig, device: torch.device, case: Any, _: Folder
) -> dict[str, Any]:
    """The same of transformers, which has paths alone."""
    step = step_of(config, as_trees=False)
    model = TransformersModel(config, device)
    num_items = sum(one.num_loss_tokens for one in step.prepared)
    batches: Sequence[Prepared] = step.prepared

    def train() -> None:
        microbatches: Iterator[Any] = on_device(batches, Device.at(device))
        model.step(microbatches, num_items)

    return {"tokens_per_second": speed(train, case.num_steps, device) * step.path_tokens}


def matrix_products(
    config: SFTConfig, device: torch.device, case: Any, folder: Folder
) -> dict[str, Any]:
    """The limit of trees: products of the tokens that they compute."""
    step = step_of(config, as_trees=True)
    found = by_matrix_products(config, device, case, folder)["tokens_per_second"]
    return {"tokens_per_second": found * step.path_tokens / step.computed_tokens}


WAYS = {
    "trees": by_answers,
    "paths": by_answers,
    "transformers": by_transformers,
    "matrix products": matrix_products,
}


def speed(train: Callable[[], None], num_steps: int, device: torch.device) -> float:
    """Returns steps per second, after warming up."""
    start = 0.0
    for number in range(WARM_UPS + num_steps):
        if number == WARM_UPS:
            start = time.perf_counter()
        train()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    return num_steps / (time.perf_counter() - start)
