"""Arithmetic of a step at 1,048,576 tokens with the options of long contexts, against full
recomputation alone:

    python examples/benchmarks/long_context_flops.py --write PAGE

Products are counted as operations on fake tensors make them, attention by the pairs of queries and
keys that its kernels compute: for each pair, head and channel 2 FLOPs of scores and 2 of values,
and 2.5 times as many in the backward pass, as FlashAttention 2 does. Runs of one and two layers
tell of all 36.
"""

from __future__ import annotations

import argparse
import os
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any
from unittest import mock

from examples.benchmarks.long_context_memory import (
    GROUPS,
    HOST,
    LAYOUTS,
    LONG,
    MLP,
    MODEL,
    PRODUCTS,
    VOCAB_SIZE,
)

NUM_LAYERS = 36
KEPT = f"{HOST} --offload-modules layer_input core_attn_output"
"""Inputs of layers and outputs of attention on the host."""


def flops(layout: str, options: str, num_layers: int) -> int:
    """Returns the FLOPs of a step of one microbatch on rank 0."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils.flop_counter import flop_registry

    from megatron.packing.model.attention import kernels
    from megatron.sft.arguments.parse import parse_config
    from megatron.sft.fit.counter import ByteCounter
    from megatron.sft.fit.estimate import Request
    from megatron.sft.fit.fake.host_reads import HostReads
    from megatron.sft.fit.fake.world import fake_world
    from megatron.sft.fit.step import run_step

    kernels._varlen()  # defines the operations
    of_attention = torch.ops.torch_attn
    pairs_of: dict[int, tuple[Any, int]] = {}
    places = kernels._places

    def noted(segments: Any, device: Any) -> Any:
        found = places(segments, device)
        # The last query sees the last key, the one before all but one, and so on.
        pairs = sum(q * k - q * (q - 1) // 2 for q, k in zip(*segments))
        pairs_of[id(found[1])] = found[1], pairs
        return found

    class Flops(TorchDispatchMode):
        total = 0

        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            out = func(*args, **(kwargs or {}))
            name, count = func._overloadpacket, flop_registry.get(func._overloadpacket)
            if name is of_attention._varlen_attn:
                query, keys = args[0], args[4]
                self.total += 4 * query.shape[1] * query.shape[2] * pairs_of[id(keys)][1]
            elif name is of_attention._varlen_attn_backward:
                query, keys = args[1], args[7]
                self.total += 10 * query.shape[1] * query.shape[2] * pairs_of[id(keys)][1]
            elif count is not None:
                factors = [x for x in args if isinstance(x, torch.Tensor)]
                self.total += count(*factors, out_val=out)
            return out

    model = MODEL.replace(f"--num-layers {NUM_LAYERS}", f"--num-layers {num_layers}")
    flags = f"{model} {LAYOUTS[layout]} {LONG} {options} --no-gradient-accumulation-fusion"
    config = parse_config(flags.split(), 8)
    request, reads = Request(config=config, vocab_size=VOCAB_SIZE, world_size=8), HostReads()
    patch = mock.patch.object(kernels, "_places", noted)
    world = fake_world(config, 0, 8, reads, request.device)
    with patch, world as mode, Flops() as counter:
        run_step(
            config,
            VOCAB_SIZE,
            request.data(1),
            ByteCounter(),
            (mode, reads),
            num_steps=1,
            device=request.device,
        )
    return counter.total


def count_whole_model(layout: str, options: str) -> int:
    """Returns the FLOPs of the whole model."""
    one, two = (flops(layout, options, num_layers) for num_layers in (1, 2))
    return one + (NUM_LAYERS - 1) * (two - one)


def rows() -> list[tuple[str, str, str]]:
    """Returns the layout, the name and the options of each run."""
    found = []
    for layout in ("TP8", "TP4 CP2", "CP8"):
        tiles = f"{MLP} {PRODUCTS}" if "TP" in layout else MLP
        found += [
            (layout, "full recomputation alone", ""),
            (layout, "keys by groups", GROUPS),
            (layout, "tiled MLPs and products", tiles),
            (layout, "inputs on the host", HOST),
            (layout, "all of these", f"{GROUPS} {tiles} {HOST}"),
            (layout, "and attention's outputs on the host", f"{GROUPS} {tiles} {KEPT}"),
        ]
    return found


def main() -> None:
    """Counts, and writes the page."""
    parser = argparse.ArgumentParser(description="Arithmetic of long contexts.")
    parser.add_argument("--write", type=Path)
    options = parser.parse_args()
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # before torch: the count runs on the CPU
    lines, alone = [], 0
    for layout, name, more in rows():
        total = count_whole_model(layout, more)
        alone = alone if more else total
        used = f"`{more}`" if more else ""
        lines.append(f"| {layout} | {name} | {total / 1e15:.3f} | {total / alone:.4f} | {used} |")
        print(lines[-1], flush=True)
    if options.write is None:
        return
    head = [
        "# Arithmetic of a step at 1,048,576 tokens, counted",
        "",
        f"{time.strftime('%Y-%m-%d')}, torch {version('torch')}, megatron-core "
        f"{version('megatron-core')}.",
        "",
        "```",
        "python examples/benchmarks/long_context_flops.py",
        "```",
        "",
        "FLOPs of one rank's products and attention in a step, Qwen3-8B's shape, one sequence on 8 "
        "GPUs with `--recompute-granularity full`. Counted on fake tensors; nothing here has run "
        "on a GPU.",
        "",
        "| layout | options | PFLOP of a rank | of full recomputation's | flags |",
        "|---|---|---|---|---|",
    ]
    options.write.write_text("\n".join([*head, *lines, ""]))


if __name__ == "__main__":
    main()
