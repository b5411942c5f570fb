"""Memory of long contexts on each of 8 GPUs, by `megatron-sft fit`, without and with the options
that take activations away:

    python examples/benchmarks/long_context_memory.py --write PAGE [--only TEXT]

The shape is that of Qwen3-8B. Main weights, gradients and Adam are float32 on the GPU, but where a
row says otherwise.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

WORLD_SIZE, VOCAB_SIZE = 8, 151_936
MODEL = (
    "--num-layers 36 --hidden-size 4096 --num-attention-heads 32 --group-query-attention "
    "--num-query-groups 8 --kv-channels 128 --ffn-hidden-size 12288 --swiglu --normalization "
    "RMSNorm --disable-bias-linear --qk-layernorm --position-embedding-type rope --rotary-base "
    "1000000 --untie-embeddings-and-output-weights --bf16 --use-distributed-optimizer "
    f"--sequence-packing --mock-data --vocab-size {VOCAB_SIZE} --train-iters 1 --lr 1e-5 "
    "--global-batch-size 8 --recompute-granularity full"
)
LAYOUTS = {
    "CP8": "--context-parallel-size 8",
    "TP2 CP4": "--tensor-model-parallel-size 2 --context-parallel-size 4 --sequence-parallel",
    "TP4 CP2": "--tensor-model-parallel-size 4 --context-parallel-size 2 --sequence-parallel",
    "TP8": "--tensor-model-parallel-size 8 --sequence-parallel",
}
MLP, HOST = "--mlp-chunks-for-training 16", "--fine-grained-activation-offloading"
GROUPS, PRODUCTS = "--query-groups-per-gather 1", "--attention-chunks-for-training 16"
ADAM_ON_HOST = "--use-precision-aware-optimizer --optimizer-cpu-offload --main-grads-dtype bf16"
WINDOWS = f"--window-size 4095 0 --window-attn-skip-freq {'1 1 1 1 1 0 ' * 6}".strip()
LONG, MEDIUM = "--seq-length 1048576", "--seq-length 131072"


class Row(NamedTuple):
    """A run."""

    name: str
    layout: str
    options: str

    def flags(self) -> str:
        """Returns its options, but those of the model."""
        return f"{LAYOUTS[self.layout]} {self.options}"


def all_options(layout: str) -> str:
    """Returns what takes activations away in a layout."""
    used = [GROUPS] * ("CP" in layout) + [MLP] + [PRODUCTS] * ("TP" in layout) + [HOST]
    return " ".join(used)


def rows() -> Iterator[Row]:
    """Yields the runs of the page."""
    for layout in ("TP8", "TP4 CP2", "TP2 CP4", "CP8"):
        yield Row("1M tokens, all options", layout, f"{LONG} {all_options(layout)}")
    everything = all_options("TP8")
    packs = "--seq-length 524288 --max-seqlen-per-dp-cp-rank 1048576"
    yield Row("two sequences of 512k, all options", "TP8", f"{packs} {everything}")
    sinks = "--softmax-type learnable"
    windows = f"{WINDOWS} {sinks}"
    yield Row("windows and sinks, all options", "TP8", f"{LONG} {windows} {everything}")
    yield Row("Adam on the host, all options", "TP8", f"{LONG} {ADAM_ON_HOST} {everything}")
    for layout in ("TP8", "TP4 CP2", "TP2 CP4", "CP8"):
        yield Row("1M tokens, full recomputation alone", layout, LONG)
    yield Row("128k tokens, full recomputation alone", "CP8", MEDIUM)
    yield Row("128k tokens, all options", "CP8", f"{MEDIUM} {all_options('CP8')}")
    no_tiles = f"{GROUPS} {HOST}"
    yield Row("1M tokens, all but tiled MLPs", "CP8", f"{LONG} {no_tiles}")
    yield Row("1M tokens, all but inputs on the host", "CP8", f"{LONG} {GROUPS} {MLP}")
    yield Row("1M tokens, all but keys by groups", "CP8", f"{LONG} {MLP} {HOST}")


def measure(row: Row) -> str:
    """Returns the row of the table."""
    from megatron.sft.arguments.parse import parse_config
    from megatron.sft.fit.estimate import Request, estimates
    from megatron.sft.memory_estimate import gib

    config = parse_config(f"{MODEL} {row.flags()}".split(), WORLD_SIZE)
    request = Request(config=config, vocab_size=VOCAB_SIZE, world_size=WORLD_SIZE)
    (stage,) = estimates(request)
    states = sum(part.num_bytes for part in stage.states)
    passes = sum(part.num_bytes for part in stage.passes)
    cells = [gib(stage.peak), f"{stage.peak / 1e9:.1f}", gib(states), gib(passes)]
    cells.append(gib(stage.host_bytes * WORLD_SIZE))
    line = f"| {row.name} | {row.layout} | {' | '.join(cells)} | `{row.flags()}` |"
    print(line, flush=True)
    return line


def main() -> None:
    """Measures the rows, and writes the page."""
    parser = argparse.ArgumentParser(description="Memory of long contexts.")
    parser.add_argument("--write", type=Path)
    parser.add_argument("--only", default="")
    options = parser.parse_args()
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # before torch: estimates run on the CPU
    found = [measure(row) for row in rows() if options.only in row.name]
    if options.write is None:
        return
    head = [
        "# Memory of long contexts on 8 GPUs, by estimate",
        "",
        f"{time.strftime('%Y-%m-%d')}, torch {version('torch')}, megatron-core "
        f"{version('megatron-core')}.",
        "",
        "```",
        "python examples/benchmarks/long_context_memory.py",
        "```",
        "",
        "Qwen3-8B's shape in bfloat16, one pack of that many tokens; float32 gradients, main "
        "weights and Adam on the GPU, sharded over all ranks, unless a row says otherwise. Each "
        f"row has its options; in front of them stand `{MODEL}`. Bytes are those of tensors, "
        "without the margin of `fit`. The peak is the larger of building the model, the passes and "
        "the optimizer's step. No row has run on a GPU.",
        "",
        "| run | layout | peak, GiB | peak, GB | states, GiB | passes beside them, GiB | host of "
        "the node, GiB | options |",
        "|---|---|---|---|---|---|---|---|",
    ]
    options.write.write_text("\n".join([*head, *found, ""]))


if __name__ == "__main__":
    main()
