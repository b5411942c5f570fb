"""mcore. Trains as transformers does: the same batches and options, in a plain loop of transformers
and in the product.

    python -m examples.benchmarks.hf_training --models llama3 qwen3 --steps 20

For each tiny model with random weights: losses of every step in float64 and float32, on one process
and in four layouts, packed, beside a loop that runs each sequence alone through transformers; and
the error of bfloat16.
"""

from __future__ import annotations

import argparse
import math
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from tests.functional_tests.hf_models import (
    MODELS,
    logits_of,
    sequences_in_order,
    train_by_product,
    train_by_transformers,
    write_model,
)
from tests.functional_tests.oracle import Sample
from tests.functional_tests.ranks import run_ranks

LAYOUTS = {
    "1 process": (1, ""),
    "TP2": (2, "--tensor-model-parallel-size 2"),
    "PP2": (2, "--pipeline-model-parallel-size 2"),
    "CP2": (2, "--context-parallel-size 2"),
    "DP2": (2, "--use-distributed-optimizer"),
}
OF_EXPERTS = " --sequence-parallel --expert-model-parallel-size 2"
OF_ROUTER = " --moe-router-dtype fp64"
_WITH_EXPERTS = (
    *("mixtral", "gpt-oss", "minimax-m2"),
    *("deepseek-v3", "deepseek-v2", "glm4-moe-lite", "mistral4"),
)
_WITH_ROUTERS_IN_FP32 = ("glm4-moe", "deepseek-v3", "deepseek-v2", "glm4-moe-lite")
CHOSEN = ("llama3", "mistral", "qwen2", "qwen3", "gemma", "mixtral", "qwen2-moe", "qwen3-moe")
PER_STEP = 8


def batches(num_steps: int) -> list[list[Sample]]:
    """Eight sequences of 8 to 64 tokens a step."""
    random = np.random.default_rng(7)
    return [
        sequences_in_order(step, [int(length) for length in random.integers(8, 65, PER_STEP)])
        for step in range(num_steps)
    ]


def layout_of(name: str, model: str) -> tuple[int, str]:
    """Processes and flags; experts have to be shared where matrices are."""
    world_size, flags = LAYOUTS[name]
    has_experts = "moe" in model or model in _WITH_EXPERTS
    if has_experts and name == "TP2":
        flags += OF_EXPERTS
    return world_size, flags + flags_of_router(model)


def flags_of_router(model: str) -> str:
    """Those by which a router is as exact as the rest, in families that have it in float32."""
    return OF_ROUTER * (model in _WITH_ROUTERS_IN_FP32)


def largest(found: Sequence[float], expected: Sequence[float]) -> float:
    """Of the differences, relative to the loss; NaN if one is."""
    return torch.tensor([abs(a - b) / b for a, b in zip(found, expected, strict=True)]).max().item()


def compare(
    model: str,
    folder: Path,
    data: Sequence[Sequence[Sample]],
    dtype: torch.dtype,
    layouts: Sequence[str],
    adapter: Path | None = None,
) -> list[str]:
    """First and last loss of transformers, and the largest relative difference of each layout; of
    `adapter`, if given, beside the frozen model.
    """
    (theirs,) = run_ranks(
        train_by_transformers, 1, folder, data, dtype, 1e-3, adapter, timeout_seconds=300.0
    )
    lora = "" if adapter is None else f" --lora --lora-adapter {adapter}"
    columns = [f"{theirs.losses[0]:.6f} -> {theirs.losses[-1]:.6f}"]
    for name in layouts:
        world_size, flags = layout_of(name, model)
        ranks = run_ranks(
            train_by_product, world_size, flags + lora, folder, data, dtype, timeout_seconds=300.0
        )
        columns.append(f"{max(largest(losses, theirs.losses) for losses, _ in ranks):.1e}")
    return columns


def bfloat16_errors(folder: Path, data: Sequence[Sequence[Sample]]) -> tuple[float, float]:
    """Root mean square error of each token's log-probability in bfloat16 against float32:
    transformers', ours.
    """
    first = list(data[:1])
    (exact,) = run_ranks(train_by_transformers, 1, folder, first, torch.float32)
    (theirs,) = run_ranks(train_by_transformers, 1, folder, first, torch.bfloat16)
    ((_, packs),) = run_ranks(train_by_product, 1, "--bf16", folder, first, torch.float32)
    ours = logits_of(first[0], packs, exact.logits[0].shape[-1])

    def log_probabilities(logits: Sequence[torch.Tensor]) -> torch.Tensor:
        labels = [torch.from_numpy(sample.labels) for sample in first[0]]
        return torch.cat(
            [
                found.double().log_softmax(-1).gather(1, n[:, None])[:, 0]
                for found, n in zip(logits, labels)
            ]
        )

    wanted = log_probabilities(exact.logits)
    return tuple(  # type: ignore[return-value]
        (log_probabilities(found) - wanted).square().mean().sqrt().item()
        for found in (theirs.logits, ours)
    )


def main() -> None:
    """Print one row per model and precision."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(CHOSEN))
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--layouts", nargs="+", choices=list(LAYOUTS), default=list(LAYOUTS))
    arguments = parser.parse_args()
    data = batches(arguments.steps)
    columns = [
        "model",
        "precision",
        "loss of transformers",
        *arguments.layouts,
        "bf16 error: transformers, ours, ratio",
    ]
    print(f"| {' | '.join(columns)} |\n|{'---|' * len(columns)}", flush=True)
    with tempfile.TemporaryDirectory() as name:
        for model in arguments.models:
            folder = Path(name) / model
            run_ranks(write_model, 1, model, folder)
            for dtype in (torch.float64, torch.float32):
                columns = compare(model, folder, data, dtype, arguments.layouts)
                if dtype == torch.float32:
                    theirs, ours = bfloat16_errors(folder, data)
                    assert math.isfinite(theirs)
                    columns.append(f"{theirs:.2e}, {ours:.2e}, {ours / theirs:.2f}")
                else:
                    columns.append("")
                print(
                    f"| {model} | {str(dtype).removeprefix('torch.')} | {' | '.join(columns)} |",
                    flush=True,
                )


if __name__ == "__main__":
    main()
