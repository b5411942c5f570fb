"""Memory of long contexts on each of 8 or 16 GPUs, by `megatron-sft fit`, without and with options
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

VOCAB_SIZE = 151_936
HEADS = "--num-attention-heads 32 --group-query-attention --num-query-groups 8 --kv-channels 128"
MODEL = (
    f"--num-layers 36 --hidden-size 4096 {HEADS} --qk-layernorm --ffn-hidden-size 12288 --swiglu "
    "--normalization RMSNorm --disable-bias-linear --position-embedding-type rope --rotary-base "
    "1000000 --untie-embeddings-and-output-weights --bf16 --use-distributed-optimizer "
    f"--sequence-packing --mock-data --vocab-size {VOCAB_SIZE} --train-iters 1 --lr 1e-5 "
    "--global-batch-size 8 --recompute-granularity full"
)
LATENT = (
    "--num-attention-heads 32 --kv-lora-rank 512 --q-lora-rank 1536 --qk-head-dim 128 "
    "--qk-pos-emb-head-dim 64 --v-head-dim 128"
)
"""In place of `HEADS` and norms of queries and keys."""
LAYOUTS = {
    "CP8": "--context-parallel-size 8",
    "TP2 CP4": "--tensor-model-parallel-size 2 --context-parallel-size 4 --sequence-parallel",
    "TP4 CP2": "--tensor-model-parallel-size 4 --context-parallel-size 2 --sequence-parallel",
    "TP8": "--tensor-model-parallel-size 8 --sequence-parallel",
    "TP8 CP2": "--tensor-model-parallel-size 8 --context-parallel-size 2 --sequence-parallel",
}
PARENTS, NODES = (-1, *(0,) * 8), (524_288, *(65_536,) * 8)
"""Parent and length of each node of a tree of 1,048,576 tokens: a trunk and 8 branches."""
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
    heads: str = ""
    """In place of the model's own."""
    is_tree: bool = False

    @property
    def world_size(self) -> int:
        """GPUs of the run."""
        return 16 if self.layout == "TP8 CP2" else 8

    def flags(self) -> str:
        """Returns its options, but those of the model."""
        return " ".join(filter(None, (self.heads, LAYOUTS[self.layout], self.options)))

    def all_flags(self) -> str:
        """Returns its options."""
        model = MODEL.replace(f"{HEADS} --qk-layernorm ", "") if self.heads else MODEL
        return f"{model} {self.flags()}"


def all_options(layout: str) -> str:
    """Returns what takes activations away in a layout."""
    return " ".join([GROUPS, MLP, *[PRODUCTS] * ("TP" in layout), HOST])


def rows() -> Iterator[Row]:
    """Yields the runs of the page."""
    for layout in ("TP8", "TP4 CP2", "TP2 CP4", "CP8"):
        yield Row("1M tokens, all options", layout, f"{LONG} {all_options(layout)}")
    everything = all_options("TP8")
    packs = "--seq-length 524288 --max-seqlen-per-dp-cp-rank 1048576"
    yield Row("two sequences of 512k, all options", "TP8", f"{packs} {everything}")
    sinks = "--softmax-type learnable"
    yield Row("windows in 5 of 6 layers, all options", "TP8", f"{LONG} {WINDOWS} {everything}")
    both = f"{LONG} {WINDOWS} {sinks}"
    yield Row("windows and sinks, all options", "TP8", f"{both} {everything}")
    yield Row("windows and sinks, all options", "TP4 CP2", f"{both} {all_options('TP4 CP2')}")
    tree = "a tree of 512k and 8 branches of 64k, all options"
    for layout in ("TP8", "TP4 CP2"):
        yield Row(tree, layout, f"{LONG} {all_options(layout)}", is_tree=True)
    kept = f"{everything} --offload-modules layer_input core_attn_output"
    yield Row("all options, attention's outputs on the host", "TP8", f"{LONG} {kept}")
    yield Row("Adam on the host, all options", "TP8", f"{LONG} {ADAM_ON_HOST} {everything}")
    for layout in ("TP8", "TP4 CP2", "TP2 CP4", "CP8"):
        yield Row("1M tokens, full recomputation alone", layout, LONG)
    yield Row("128k tokens, full recomputation alone", "CP8", MEDIUM)
    yield Row("128k tokens, all options", "CP8", f"{MEDIUM} {all_options('CP8')}")
    no_tiles = f"{GROUPS} {HOST}"
    yield Row("1M tokens, all but tiled MLPs", "CP8", f"{LONG} {no_tiles}")
    yield Row("1M tokens, all but inputs on the host", "CP8", f"{LONG} {GROUPS} {MLP}")
    yield Row("1M tokens, all but keys by groups", "CP8", f"{LONG} {MLP} {HOST}")
    further = "TP8 CP2"  # one group of keys and values on a rank
    yield Row("1M tokens on 16 GPUs, all options", further, f"{LONG} {all_options(further)}")
    no_groups = f"{LONG} {MLP} {PRODUCTS} {HOST}"
    yield Row("1M tokens on 16 GPUs, all but keys by ranks", further, no_groups)
    for layout in ("TP8", "CP8"):
        yield Row("latent attention, all options", layout, f"{LONG} {all_options(layout)}", LATENT)
        others = all_options(layout).replace(f"{GROUPS} ", "")
        yield Row("latent attention, all but by heads", layout, f"{LONG} {others}", LATENT)


def measure(row: Row) -> str:
    """Returns the row of the table."""
    from megatron.sft.arguments.parse import parse_config
    from megatron.sft.fit.estimate import Request, estimates
    from megatron.sft.fit.step import StepData
    from megatron.sft.memory_estimate import gib

    class TreeRequest(Request):
        def data(self, num_microbatches: int) -> StepData:
            return StepData(lengths=(NODES,) * num_microbatches, parents=PARENTS)

    config = parse_config(row.all_flags().split(), row.world_size)
    kind = TreeRequest if row.is_tree else Request
    request = kind(config=config, vocab_size=VOCAB_SIZE, world_size=row.world_size)
    (stage,) = estimates(request)
    states = sum(part.num_bytes for part in stage.states)
    passes = sum(part.num_bytes for part in stage.passes)
    cells = [gib(stage.peak), f"{stage.peak / 1e9:.1f}", gib(states), gib(passes)]
    cells.append(gib(stage.host_bytes * min(row.world_size, 8)))
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
        "# Memory of long contexts on 8 GPUs and 16, by estimate",
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
        f"row has its options; in front of them stand `{MODEL}`, less heads and their norms where "
        "a row has its own. Bytes are those of tensors, "
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
