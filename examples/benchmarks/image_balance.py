"""tensor. Balance of chats with images over data-parallel ranks, modelled for Qwen3-VL-8B: the
trainer's schedule, and each rank packing its own share, as other trainers do.

    python -m examples.benchmarks.image_balance --write examples/benchmarks/results/image_balance.md

Costs are those that the trainer schedules by (`tower_cost`, `gpt_pack_cost`). They are compared
with the FLOPs that torch counts of transformers' own modules, of full size, on tensors without
memory.
"""

from __future__ import annotations

import argparse
import itertools
import json
import tempfile
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from megatron.packing.scheduling.cost import PackCost, gpt_pack_cost
from megatron.packing.scheduling.default import default
from megatron.packing.scheduling.payload_cost import PayloadCost
from megatron.packing.scheduling.problem import ScheduleRequest
from megatron.packing.scheduling.step_time import StepModel
from megatron.sft.images.sizes import resized, tower_cost
from megatron.sft.images.source import ImageSize
from megatron.sft.images.tower import VisionTower
from megatron.sft.images.vision import Vision, read_vision

CONFIG = Path(__file__).parents[1] / "recipes" / "models" / "Qwen3-VL-8B-Instruct.json"
PROCESSOR = {
    "size": {"shortest_edge": 65536, "longest_edge": 16777216},
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
}
BATCHES, SEQUENCES, CAPACITY = 20, 1024, 16384
RANKS = (8, 16, 32, 64)
IMAGE_CHATS = 0.3
FORWARD_AND_BACKWARD = 3


class Batch(NamedTuple):
    """A global batch: tokens of each chat, images among them, and the patches of its images."""

    lengths: npt.NDArray[np.int64]
    patches: list[npt.NDArray[np.int64]]


def read_model(folder: Path) -> tuple[dict[str, Any], Vision]:
    """Returns config.json of the model and what it says of images, at most 1,048,576 pixels."""
    config = json.loads(CONFIG.read_text())
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "preprocessor_config.json").write_text(json.dumps(PROCESSOR))
    return config, read_vision(folder, 1 << 20)


def draw_batch(seed: int, vision: Vision) -> Batch:
    """Draws chats: text of 16 to 8,192 tokens (lognormal, median 400); three in ten have 1 to 6
    images of 0.03 to 8 megapixels, sides 1:3 to 3:1, and a text of 16 to 512 tokens.
    """
    random = np.random.default_rng(seed)
    lengths = np.clip(np.exp(random.normal(6.0, 1.2, SEQUENCES)), 16, 8192).astype(np.int64)
    patches = []
    for number in range(SEQUENCES):
        count = int(random.integers(1, 7)) if random.random() < IMAGE_CHATS else 0
        of_chat = []
        for _ in range(count):
            area = np.exp(random.uniform(np.log(3e4), np.log(8e6)))
            aspect = np.exp(random.uniform(-np.log(3), np.log(3)))
            sides = int(np.sqrt(area * aspect)), int(np.sqrt(area / aspect))
            size = resized(ImageSize(*sides), vision)
            of_chat.append(size.height * size.width // vision.patch_size**2)
        patches.append(np.array(of_chat, np.int64))
        if count:
            lengths[number] = random.integers(16, 512) + patches[-1].sum() // vision.merge_size**2
    return Batch(lengths, patches)


def make_request(
    batch: Batch, num_ranks: int, cost: PackCost, tower: PayloadCost
) -> ScheduleRequest:
    """Returns the request of a step, as the trainer makes it."""
    return ScheduleRequest(
        lengths=batch.lengths,
        source_rank=np.arange(SEQUENCES) * num_ranks // SEQUENCES,
        source_fetch=np.zeros(SEQUENCES, np.int64),
        payload_costs=np.array([tower(patches).sum() for patches in batch.patches]),
        num_ranks=num_ranks,
        num_fetches=1,
        capacity=CAPACITY,
        cost=cost,
        model=StepModel(),
    )


def step_time_by_rank(request: ScheduleRequest) -> float:
    """Returns the time of a step in which each rank packs the chats that it has loaded: first fit,
    the longest first. The slowest rank counts.
    """
    times = []
    for rank in range(request.num_ranks):
        of_rank = np.flatnonzero(request.source_rank == rank)
        rooms: list[int] = []
        for length in np.sort(request.lengths[of_rank])[::-1].tolist():
            place = next((i for i, room in enumerate(rooms) if room >= length), None)
            if place is None:
                rooms.append(CAPACITY - length)
            else:
                rooms[place] -= length
        times.append(request.sequence_costs[of_rank].sum() + request.cost.fixed * len(rooms))
    return float(max(times))


def balance_table(vision: Vision, cost: PackCost) -> list[str]:
    """Returns the rows of times over the lower bound."""
    rows = []
    for trains, num_ranks in itertools.product((False, True), RANKS):
        tower = tower_cost(vision, trains_tower=trains, trains_projector=trains)
        ratios, shares = [], []
        for seed in range(BATCHES):
            request = make_request(draw_batch(seed, vision), num_ranks, cost, tower)
            without_images = replace(request, payload_costs=None)
            ratios.append(
                [
                    request.time_of(default(request)) / request.bound,
                    request.time_of(default(without_images)) / request.bound,
                    step_time_by_rank(request) / request.bound,
                ]
            )
            assert request.payload_costs is not None
            shares.append(request.payload_costs.sum() / request.sequence_costs.sum())
        by_cost, by_tokens, by_rank = np.transpose(ratios)
        rows.append(
            f"| {'trained' if trains else 'frozen'} | {np.mean(shares):.0%} | {num_ranks} | "
            f"{by_cost.mean():.4f}, {by_cost.max():.4f} | "
            f"{by_tokens.mean():.3f}, {by_tokens.max():.3f} "
            f"| {by_rank.mean():.3f}, {by_rank.max():.3f} |"
        )
    return rows


def counted_rows(config: dict[str, Any], vision: Vision, cost: PackCost) -> list[str]:
    """Returns the rows of modelled FLOPs beside those that torch counts."""
    rows = []
    with torch.device("meta"):
        tower = VisionTower(vision).to("meta")
    for sides, trains in itertools.product(((256, 256), (1024, 1024), (480, 2016)), (False, True)):
        tower.requires_grad_(trains)
        image = torch.zeros(*sides, 3, dtype=torch.uint8, device="meta")
        with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
            rows_of_image = tower([image])
            if trains:
                rows_of_image.sum().backward()
        modelled = tower_cost(vision, trains_tower=trains, trains_projector=trains)
        patches = np.array([sides[0] * sides[1] // vision.patch_size**2])
        rows.append(
            _row(
                f"tower, {sides[0]} x {sides[1]} pixels, {'trained' if trains else 'frozen'}",
                modelled(patches)[0],
                counter.get_total_flops(),
            )
        )
    for length in (512, 4096):
        rows.append(
            _row(
                f"language model, {length:,} tokens",
                float(cost.of_sequences(np.array([length]))[0]),
                _count_language_model(config, length),
            )
        )
    return rows


def _count_language_model(config: dict[str, Any], length: int) -> float:
    """Returns the FLOPs of forward and backward, of which torch counts all pairs of tokens; half of
    them are masked.
    """
    from transformers import AutoConfig, AutoModel

    text = {name: value for name, value in config["text_config"].items() if name != "dtype"}
    kind = text.pop("model_type")
    with torch.device("meta"):
        model: Any = AutoModel.from_config(AutoConfig.for_model(kind, **text))
    head = torch.empty(text["vocab_size"], text["hidden_size"], device="meta")
    inputs = torch.empty(1, length, text["hidden_size"], device="meta")
    with (
        torch.no_grad(),
        sdpa_kernel(SDPBackend.MATH),
        FlopCounterMode(display=False) as counter,
    ):
        # With a mask of its own transformers does not look for packs, in values that are not there.
        mask = torch.empty(1, 1, length, length, device="meta")
        hidden = model(inputs_embeds=inputs, attention_mask=mask, use_cache=False).last_hidden_state
        hidden @ head.t()
    counts = counter.get_flop_counts()["Global"]
    of_pairs = sum(flops for operation, flops in counts.items() if "bmm" in str(operation))
    return FORWARD_AND_BACKWARD * (sum(counts.values()) - of_pairs / 2)


def _row(name: str, modelled: float, counted: float) -> str:
    return f"| {name} | {modelled / 1e12:.3f} | {counted / 1e12:.3f} | {modelled / counted:.4f} |"


def main() -> None:
    """Prints both tables, and writes them."""
    parser = argparse.ArgumentParser(description="Balance of chats with images, modelled.")
    parser.add_argument("--write", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        config, vision = read_model(Path(folder))
    text = config["text_config"]
    cost = gpt_pack_cost(
        num_layers=text["num_hidden_layers"],
        hidden_size=text["hidden_size"],
        num_attention_heads=text["num_attention_heads"],
        num_query_groups=text["num_key_value_heads"],
        kv_channels=text["head_dim"],
        ffn_hidden_size=text["intermediate_size"],
        vocab_size=text["vocab_size"],
        swiglu=True,
    )
    lines = [
        "# Chats with images, balanced over ranks",
        "",
        f"Modelled; torch {version('torch')}, transformers {version('transformers')}.",
        "",
        "```",
        "python -m examples.benchmarks.image_balance --write "
        "examples/benchmarks/results/image_balance.md",
        "```",
        "",
        f"Qwen3-VL-8B, {BATCHES} global batches of {SEQUENCES:,} chats, packs of {CAPACITY:,} "
        f"tokens. {IMAGE_CHATS:.0%} of the chats have 1 to 6 images, resized to at most 1,048,576 "
        "pixels. The bound is what no schedule can go below. Mean and worst of the batches.",
        "",
        "Own packs: each rank packs the chats that it has loaded, by their tokens, and the slowest "
        "rank counts, as in trainers that pack in their data loader. By tokens: the trainer's "
        "schedule as if images were free.",
        "",
        "| tower | its part of the FLOPs | ranks | trainer / bound | by tokens / bound "
        "| own packs / bound |",
        "|---|---|---|---|---|---|",
        *balance_table(vision, cost),
        "",
        "## Costs beside counted FLOPs",
        "",
        "Of transformers' modules of full size, forward and, where trained, backward.",
        "",
        "| what | modelled, TFLOP | counted | modelled / counted |",
        "|---|---|---|---|",
        *counted_rows(config, vision, cost),
        "",
    ]
    print("\n".join(lines))
    if arguments.write is not None:
        arguments.write.write_text("\n".join(lines))


if __name__ == "__main__":
    main()
