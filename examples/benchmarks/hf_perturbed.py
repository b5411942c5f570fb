"""mcore. Tells a mistake from rounding that grows: losses beside transformers, and those of
transformers beside itself with weights that differ by 1e-15.

    python -m examples.benchmarks.hf_perturbed --models qwen3.5-moe qwen3.5

A mistake shows from the step on in which it is made. Rounding grows at the rate at which the model
takes two runs apart, which is that of the perturbed run.
"""

from __future__ import annotations

import argparse
import itertools
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from examples.benchmarks.hf_training import batches, layout_of
from tests.functional_tests.hf_models import (
    FAMILY_MODELS,
    MODELS,
    train_by_product,
    train_by_transformers,
    write_model,
)
from tests.functional_tests.oracle import Sample
from tests.functional_tests.ranks import run_ranks


def perturb(folder: Path, relative: float, seed: int = 3) -> None:
    """Changes each weight of a folder by a random factor about 1, and stores it in float64."""
    torch.manual_seed(seed)
    for file in folder.glob("*.safetensors"):
        tensors = load_file(file)
        for name, tensor in tensors.items():
            wide = tensor.double()
            tensors[name] = wide * (1 + relative * torch.randn(wide.shape, dtype=wide.dtype))
        save_file(tensors, file, metadata={"format": "pt"})


def differences(found: Sequence[float], expected: Sequence[float]) -> list[float]:
    """Returns the difference of each step's loss, relative to it."""
    return [abs(a - b) / b for a, b in zip(found, expected, strict=True)]


def grown(
    model: str, layouts: Sequence[str], data: Sequence[Sequence[Sample]], relative: float
) -> list[list[float]]:
    """Returns differences from transformers step by step: of transformers whose weights differ by
    `relative`, and of the product in each layout.
    """
    with tempfile.TemporaryDirectory() as name:
        folder, other = Path(name) / "model", Path(name) / "perturbed"
        for target in (folder, other):
            run_ranks(write_model, 1, model, target)
        perturb(other, relative)
        plain, perturbed = (
            run_ranks(train_by_transformers, 1, one, data, torch.float64, timeout_seconds=300.0)[0]
            for one in (folder, other)
        )
        found = [differences(perturbed.losses, plain.losses)]
        for layout in layouts:
            world_size, flags = layout_of(layout, model)
            ranks = run_ranks(
                train_by_product,
                world_size,
                flags,
                folder,
                data,
                torch.float64,
                timeout_seconds=300.0,
            )
            found.append(differences(ranks[-1][0], plain.losses))
    return found


def main() -> None:
    """Print one row per step."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    known = [*MODELS, *FAMILY_MODELS]
    parser.add_argument("--models", nargs="+", choices=known, default=["qwen3.5-moe"])
    parser.add_argument("--layouts", nargs="+", default=["1 process", "TP2"])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--relative", type=float, default=1e-15)
    arguments = parser.parse_args()
    data = batches(arguments.steps)
    for model in arguments.models:
        columns = grown(model, arguments.layouts, data, arguments.relative)
        names = ("step", f"transformers, weights +- {arguments.relative:g}", *arguments.layouts)
        print(f"{model}\n\n| {' | '.join(names)} |\n|{'---|' * len(names)}")
        for step, row in enumerate(zip(*columns)):
            print(f"| {step + 1} | {' | '.join(f'{one:.1e}' for one in row)} |", flush=True)


def largest_so_far(values: Sequence[float]) -> list[float]:
    """Returns the largest of the values up to each."""
    return list(itertools.accumulate(values, max))


if __name__ == "__main__":
    main()
