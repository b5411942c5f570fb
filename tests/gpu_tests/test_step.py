"""A step of the trainer on this device: what waits for it, what moves beside it, and what stays in
its memory.
"""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch

from megatron.packing.batch.layout import Alignment
from megatron.packing.batch.microbatches import FIELDS, layouts_of, pack
from megatron.packing.batch.reading import read_samples
from megatron.packing.device import Device
from megatron.packing.step.global_batch import PackedIterator
from megatron.sft.arguments.parse import parse_config
from megatron.sft.data.datasets import build_datasets
from megatron.sft.distributed import process_groups
from megatron.sft.training.passes import Passes
from megatron.sft.training.stop import StopSignals
from megatron.sft.training.train import Trainer
from tests.functional_tests.layouts import MODELS

COMMON = (
    "--num-layers 4 --hidden-size 256 --num-attention-heads 4 --seq-length 2048 --mock-data "
    "--vocab-size 1000 --global-batch-size 16 --lr 1e-4 --eval-iters 0 --log-interval 100 "
    "--sequence-packing --over-length-policy truncate --bf16"
)
TINY = "--num-layers 2 --hidden-size 32 --seq-length 64 --global-batch-size 4 --num-workers 0"


def train(
    text: str, folder: Path, device: torch.device, after_step: Callable[[int], None] | None = None
) -> None:
    """Run the trainer in this process; `after_step` hears the number of each step."""
    text = f"{COMMON} {TINY if device.type == 'cpu' else ''} {text} --run-dir {folder}"
    config = parse_config(text.split(), 1)
    datasets = build_datasets(config)
    config = config.for_records(len(datasets.train))
    with process_groups(config) as found:
        assert found.kind == device.type
        trainer = Trainer(config, datasets, found, folder)
        take_step: Any = trainer._step

        def step(*arguments: Any) -> bool:
            stops = take_step(*arguments)
            if after_step is not None:
                after_step(trainer.progress.iteration)
            return bool(stops)

        trainer._step = step  # type: ignore[method-assign, assignment]
        trainer.train(StopSignals())
    gc.collect()


def set_sync_debug_mode(mode: str, device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.set_sync_debug_mode(mode)


@pytest.mark.parametrize("model", ["grouped", "tied", "experts"])
def test_passes_read_nothing_from_the_device(
    model: str, tmp_path: Path, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each read empties the device's queue: the host then starts kernels one by one, and no figure
    says why.
    """
    run = Passes.forward_backward
    modes: list[str] = []

    def watched(self: Passes, *arguments: Any, **named: Any) -> list[Any]:
        # The first three compile, for other lengths again.
        mode = "error" if len(modes) >= 3 else "default"
        modes.append(mode)
        set_sync_debug_mode(mode, device)
        try:
            return run(self, *arguments, **named)
        finally:
            set_sync_debug_mode("default", device)

    monkeypatch.setattr(Passes, "forward_backward", watched)
    gathers = "--moe-permute-fusion" if model == "experts" else ""
    train(f"{MODELS[model]} {gathers} --train-iters 6", tmp_path, device)
    assert modes == 3 * ["default"] + 3 * ["error"]


def test_a_step_waits_once(tmp_path: Path, device: torch.device) -> None:
    """For the norm of the gradients, at its end."""
    told: list[list[str]] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")

        def note(iteration: int) -> None:
            told.append(
                [
                    str(warning.message)
                    for warning in caught
                    if "called a synchronizing" in str(warning.message)
                ]
            )
            caught.clear()
            set_sync_debug_mode("warn", device)

        train(f"{MODELS['grouped']} --train-iters 6", tmp_path, device, note)
        set_sync_debug_mode("default", device)
    assert len(told) == 6
    assert all(len(of_step) <= 1 for of_step in told[3:]), told


def test_memory_stays_flat(tmp_path: Path, device: torch.device) -> None:
    """A tensor kept per step, or pinned memory that is never given back, ends a run after days."""
    num_steps = 500 if device.type == "cuda" else 50
    allocated, reserved, resident = [], [], []
    process = psutil.Process()

    def note(iteration: int) -> None:
        if device.type == "cuda":
            allocated.append(torch.cuda.memory_allocated(device))
            reserved.append(torch.cuda.memory_reserved(device))
        resident.append(process.memory_info().rss)

    train(f"{MODELS['grouped']} --train-iters {num_steps}", tmp_path, device, note)
    assert len(resident) == num_steps
    settled = num_steps // 2  # by then caches are full, and the longest batches were there
    if device.type == "cuda":
        assert max(allocated[settled:]) <= max(allocated[:settled]) + 2**20
        assert max(reserved[settled:]) <= 1.25 * max(reserved[:settled]) + 2**26
    assert max(resident[settled:]) <= max(resident[:settled]) + 2**26


def test_microbatches_arrive_whole_beside_a_busy_device(device: torch.device) -> None:
    """They are copied on a stream of their own: a missing wait, or memory that is used again too
    early, trains on other tokens than were drawn.
    """
    random = np.random.default_rng(1)
    lengths = random.integers(1, 2000, (24, 8))
    draws = [
        {
            "tokens": torch.from_numpy(random.integers(0, 1000, n)),
            "loss_mask": torch.from_numpy(random.random(n)),
        }
        for n in lengths.flatten()
    ]
    samples = read_samples([{**draw, "loss_mask": draw["loss_mask"].float()} for draw in draws])
    num_sequences = np.full(24, 8)
    microbatches = pack(
        samples, num_sequences, layouts_of(samples.lengths, num_sequences, Alignment())
    )
    sums = []
    for microbatch in PackedIterator(microbatches, Device.at(device)):
        if device.type == "cuda":
            torch.cuda._sleep(2_000_000)  # about a millisecond: the host runs ahead
        weights = {
            name: torch.arange(1.0, microbatch[name].numel() + 1, device=device) for name in FIELDS
        }
        sums.append(
            torch.stack([(microbatch[name].double() * weights[name]).sum() for name in FIELDS])
        )
    for microbatch, found in zip(microbatches, sums, strict=True):
        assert all(microbatch[name].is_pinned() == (device.type == "cuda") for name in FIELDS)
        weights = {name: torch.arange(1.0, microbatch[name].numel() + 1) for name in FIELDS}
        expected = torch.stack(
            [(microbatch[name].double() * weights[name]).sum() for name in FIELDS]
        )
        torch.testing.assert_close(found.cpu(), expected, rtol=1e-12, atol=0)
