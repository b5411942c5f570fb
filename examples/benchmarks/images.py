"""mcore. Steps of text and images: balance by true cost and by tokens alone, modelled and measured
on two CPU processes; bytes moved, and memory of images that wait.

    OMP_NUM_THREADS=1 python -m examples.benchmarks.images
    OMP_NUM_THREADS=1 python -m examples.benchmarks.images --shared    # images shared out, modelled

Modelled: an 8B language model and two vision towers on 8 and 64 data-parallel ranks. Measured: the
toy model of examples/multimodal, whose images are random; CPU time of each process in a step, by
costs that were fitted to the same process before.
"""

from __future__ import annotations

import itertools
import sys
import tempfile
from dataclasses import replace

import numpy as np
import torch.multiprocessing as processes

from examples.benchmarks.images_run import process
from megatron.packing.model.shared_tower import shares
from megatron.packing.scheduling.cost import gpt_pack_cost
from megatron.packing.scheduling.default import default
from megatron.packing.scheduling.payload_cost import vision_cost
from megatron.packing.scheduling.problem import ScheduleRequest
from megatron.packing.scheduling.step_time import StepModel

BATCHES, SEQUENCES = 20, 512
MODEL = gpt_pack_cost(
    num_layers=36,
    hidden_size=4096,
    num_attention_heads=32,
    num_query_groups=8,
    kv_channels=128,
    ffn_hidden_size=12288,
    vocab_size=151936,
    swiglu=True,
)
TOWERS = {
    "27 layers of 1152, whole images": {"hidden_size": 1152, "ffn_hidden_size": 4304},
    "32 layers of 1280, windows of 64 patches": {
        "num_layers": 32,
        "hidden_size": 1280,
        "ffn_hidden_size": 3420,
        "is_gated": True,
        "window": 64,
        "num_full_layers": 4,
    },
}
MODES = {
    "ranks": StepModel(),
    "4 stages": StepModel(num_stages=4),
    "experts": StepModel(sync_every_microbatch=True),
}


def mix(seed: int) -> tuple[np.ndarray, list[np.ndarray]]:
    """Returns lengths of sequences, and the patches of each one's images: six in ten are text of
    16 to 8,192 tokens; the others have 1 to 12 images of 256 to 4,096 patches, a token for each 4.
    """
    rng = np.random.default_rng(seed)
    text = np.clip(np.exp(rng.normal(6.0, 1.2, SEQUENCES)), 16, 8192).astype(np.int64)
    images = []
    for number in range(SEQUENCES):
        count = int(rng.integers(1, 13)) if rng.random() < 0.4 else 0
        patches = 4 * (2 ** rng.uniform(6, 10, count)).astype(np.int64)
        images.append(patches[np.cumsum(patches) // 4 <= 8192])
        if count:
            text[number] = rng.integers(16, 512)
    return text + np.array([its.sum() // 4 for its in images]), images


def modelled() -> None:
    """Prints the modelled time of steps that are scheduled by tokens alone, over that by true
    cost.
    """
    print(
        "| tower | part of the cost | ranks | mode | by tokens / by true cost, mean | most |"
        " by true cost / bound |\n|---|---|---|---|---|---|---|"
    )
    for (tower, shape), ranks, (mode, model) in itertools.product(
        TOWERS.items(), (8, 64), MODES.items()
    ):
        cost = vision_cost(**{"num_layers": 27, **shape}, num_ranks=model.num_stages)  # type: ignore[arg-type]
        ratios, bounds, parts = [], [], []
        for seed in range(BATCHES):
            lengths, images = mix(seed)
            source = np.arange(SEQUENCES) * ranks // SEQUENCES
            of_images = np.array([cost(its).sum() for its in images])
            true = ScheduleRequest(
                lengths=lengths,
                source_rank=source,
                source_fetch=np.zeros(SEQUENCES, np.int64),
                payload_costs=of_images,
                num_ranks=ranks,
                num_fetches=1,
                capacity=16384,
                cost=MODEL,
                model=model,
            )
            by_true = true.time_of(default(true))
            by_tokens = true.time_of(default(replace(true, payload_costs=None)))
            ratios.append(by_tokens / by_true)
            bounds.append(by_true / true.bound)
            parts.append(of_images.sum() / true.sequence_costs.sum())
        print(
            f"| {tower} | {np.mean(parts):.0%} | {ranks} | {mode} | "
            f"{np.exp(np.mean(np.log(ratios))):.3f} | {max(ratios):.2f} | {np.mean(bounds):.3f} |"
        )


def shared() -> None:
    """Prints the modelled cost of a rank, where the ranks that hold a pack share out its images,
    over that where each of them encodes all.
    """
    print("| tower | ranks that hold a pack | shared / each encodes all |\n|---|---|---|")
    for (tower, shape), ranks in itertools.product(TOWERS.items(), (2, 4, 8)):
        cost = vision_cost(**{"num_layers": 27, **shape})  # type: ignore[arg-type]
        both = np.zeros(2)
        for seed in range(BATCHES):
            lengths, images = mix(seed)
            of_images = np.array([cost(its).sum() for its in images])
            request = ScheduleRequest(
                lengths=lengths,
                source_rank=np.zeros(SEQUENCES, np.int64),
                source_fetch=np.zeros(SEQUENCES, np.int64),
                payload_costs=of_images,
                num_ranks=1,
                num_fetches=1,
                capacity=16384,
                cost=MODEL,
                model=StepModel(),
            )
            text = (request.sequence_costs - of_images) / ranks
            microbatch = default(request).microbatch
            for number in range(int(microbatch.max()) + 1):
                its = np.flatnonzero(microbatch == number)
                each = cost(np.concatenate([images[i] for i in its]))
                most = max(each[share].sum() for share in shares(each.tolist(), ranks))
                both += text[its].sum() + np.array([most, each.sum()])
        print(f"| {tower} | {ranks} | {both[0] / both[1]:.3f} |")


def measured() -> None:
    """Prints what two processes measured."""
    with processes.Manager() as manager, tempfile.TemporaryDirectory() as folder:
        results = manager.dict()
        processes.spawn(process, (f"{folder}/store", results), nprocs=2)
        found = dict(results)
    print(
        "\n| scheduled by | CPU seconds of the slower process | of both, mean | slower / mean |\n"
        "|---|---|---|---|"
    )
    print(f"fitted: {found['fitted 0']}", file=sys.stderr)
    for name in ("tokens alone", "true cost"):
        seconds = np.array([found[f"{name} {rank}"] for rank in range(2)])
        slower, mean = seconds.max(axis=0).sum(), seconds.mean(axis=0).sum()
        print(f"| {name} | {slower:.1f} | {mean:.1f} | {slower / mean:.3f} |")
    print(
        "\n| images travel as | bytes moved | samples with images | tokens moved | bytes held |\n"
        "|---|---|---|---|---|"
    )
    for name in ("keys", "tensors"):
        print(f"| {name} | " + " | ".join(f"{value:,}" for value in found[f"{name} 0"]) + " |")
    print("\n| 4 global batches ahead | bytes of images that wait | batches |\n|---|---|---|")
    for name in ("no bound", "bound of 6 MiB"):
        most, ahead = found[f"{name} 0"]
        print(f"| {name} | {most:,} | {ahead} |")


if __name__ == "__main__":
    if "--shared" in sys.argv:
        shared()
        sys.exit()
    if "--measured" not in sys.argv:
        modelled()
    measured()
