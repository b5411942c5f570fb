"""mcore. LoRA beside full fine-tuning, and beside peft and transformers on the same model and data.

    python -m examples.benchmarks.lora

First the losses of 20 steps in float64: how far those of the product, packed, on one process and in
four layouts, are from those of peft, which runs each sequence alone. Then what training a larger
model costs: weights that are trained, bytes of the optimizer's state, tokens per second of one
core's time.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from examples.benchmarks.hf_training import LAYOUTS, batches, compare
from tests.functional_tests.hf_models import (
    train_by_product,
    train_by_transformers,
    write_model,
    write_peft,
)
from tests.functional_tests.ranks import run_ranks

ALL = {"r": 4, "lora_alpha": 8, "target_modules": "all-linear"}
SOME = {"r": 4, "lora_alpha": 8, "use_rslora": True, "target_modules": ["q_proj", "v_proj"]}
LARGER = {"hidden_size": 512, "intermediate_size": 1408, "vocab_size": 4096}
NUM_STEPS, NUM_WARM_UP = 8, 2


def main() -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layouts", nargs="+", choices=list(LAYOUTS), default=list(LAYOUTS))
    layouts = parser.parse_args().layouts
    print(
        f"| model | adapters | loss of peft | {' | '.join(layouts)} "
        f"|\n|---|---|---|{'---|' * len(layouts)}"
    )
    with tempfile.TemporaryDirectory() as name:
        for model, options in (("llama3", ALL), ("qwen2", SOME)):
            folder, adapter = Path(name) / model, Path(name) / f"{model}-adapter"
            run_ranks(write_model, 1, model, folder)
            run_ranks(write_peft, 1, folder, adapter, options)
            columns = compare(model, folder, batches(20), torch.float64, layouts, adapter)
            print(f"| {model} | {options['target_modules']} | {' | '.join(columns)} |", flush=True)
        print(
            "\n| training | weights trained | optimizer bytes | tokens/s of a core "
            "|\n|---|---|---|---|"
        )
        folder, adapter = Path(name) / "larger", Path(name) / "larger-adapter"
        run_ranks(write_model, 1, "llama2", folder, torch.float32, None, LARGER)
        run_ranks(write_peft, 1, folder, adapter, ALL | {"r": 16, "lora_alpha": 32})
        data, lora = batches(NUM_STEPS + NUM_WARM_UP), f"--lora --lora-adapter {adapter}"
        tokens = sum(len(sample.tokens) for batch in data[NUM_WARM_UP:] for sample in batch)
        ways: list[tuple[str, Callable[..., Any], tuple[Any, ...]]] = [
            ("transformers, in full", train_by_transformers, (folder, data, torch.float32)),
            ("this project, in full", train_by_product, ("", folder, data, torch.float32)),
            ("peft, LoRA", train_by_transformers, (folder, data, torch.float32, 1e-3, adapter)),
            ("this project, LoRA", train_by_product, (lora, folder, data, torch.float32)),
        ]
        for way, train, arguments in ways:
            ((weights, num_bytes, seconds),) = run_ranks(
                measured, 1, train, arguments, timeout_seconds=400.0
            )
            print(f"| {way} | {weights:,} | {num_bytes:,} | {tokens / seconds:,.0f} |", flush=True)


def measured(train: Callable[..., Any], arguments: tuple[Any, ...]) -> tuple[int, int, float]:
    """Weights that the optimizer steps, bytes of its state, and seconds of CPU time of the steps
    after the warm-up.
    """
    marks: list[tuple[int, int, float]] = []

    def note(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        tensors = [
            value
            for state in optimizer.state.values()
            for value in state.values()
            if torch.is_tensor(value)
        ]
        weights = sum(
            parameter.numel() for group in optimizer.param_groups for parameter in group["params"]
        )
        marks.append((weights, sum(tensor.nbytes for tensor in tensors), time.process_time()))

    register_optimizer_step_post_hook(note)
    train(*arguments)
    assert len(marks) == NUM_STEPS + NUM_WARM_UP
    weights, num_bytes, end = marks[-1]
    return weights, num_bytes, end - marks[NUM_WARM_UP - 1][2]


if __name__ == "__main__":
    main()
