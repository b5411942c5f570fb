"""mcore. The product's trainer on the data of peers_run.py, in a module that the peers' environment
never imports.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch.distributed as dist

from megatron.blending.formats.record import RecordSource
from megatron.blending.streams.source import SourceDataset
from megatron.sft.arguments.parse import parse_config
from megatron.sft.data.datasets import Datasets, mock_sample
from megatron.sft.data.sample_set import concatenated
from megatron.sft.distributed import process_groups
from megatron.sft.environment import world_from_environment
from megatron.sft.model.huggingface.pretrained import open_pretrained
from megatron.sft.training.stop import StopSignals
from megatron.sft.training.train import Trainer


class Records(RecordSource):
    """Samples of transformers as the trainer's: labels are the next tokens."""

    def __init__(self, samples: Sequence[dict[str, list[int]]]) -> None:
        self._samples = samples

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, index: int) -> dict[str, Any]:
        tokens, labels = (np.array(self._samples[index][name]) for name in ("input_ids", "labels"))
        return {
            "tokens": tokens[:-1],
            "labels": tokens[1:],
            "loss_mask": (labels[1:] >= 0).astype(np.float32),
        }

    def describe(self, index: int) -> str:
        return f"sample {index}"

    def fingerprint(self) -> str:
        return "peers"


def train(
    flags: str, samples: Sequence[dict[str, list[int]]], folder: Path
) -> list[dict[str, Any]]:
    """The metrics of each step."""
    _, world_size = world_from_environment()
    config = parse_config([*flags.split(), "--run-dir", str(folder)], world_size)
    source = SourceDataset(Records(samples), load=mock_sample, shuffle=False, name="peers")
    none = concatenated([], [])
    assert config.data.vocab_size is not None
    datasets = Datasets(concatenated(["peers"], [source]), none, none, config.data.vocab_size)
    pretrained = open_pretrained(config, datasets.vocab_size)
    with process_groups(config) as device:
        Trainer(config, datasets, device, folder, pretrained).train(StopSignals())
        dist.barrier()  # rank 0 writes the metrics
        lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [record for record in map(json.loads, lines) if record["kind"] == "train"]
