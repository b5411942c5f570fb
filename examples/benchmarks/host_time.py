"""mcore. Host time of a layer beside transformers: microbatches too small to compute much.

    OMP_NUM_THREADS=1 python -m examples.benchmarks.host_time [--rounds 60]

On a GPU the host launches each operation, and where a pack has few tokens the device waits for it.
A Llama of width 32 trains three microbatches of one sequence of 64 tokens, forward and backward, as
the trainer does and as transformers' model does, by turns in one process. Both are measured at two
depths: what a deeper model takes more is its layers' (the rest is head, loss and schedule).
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from megatron.core import tensor_parallel
from transformers import LlamaConfig, LlamaForCausalLM

from examples.benchmarks.data_path import print_row
from megatron.packing.device import CPU
from megatron.sft.arguments.parse import parse_config
from megatron.sft.distributed import make_groups
from megatron.sft.fit.step import StepData, forward_backward, on_device, prepare
from megatron.sft.model import cpu_support, mcore_fixes
from megatron.sft.model.build import build_training

DEPTHS = (2, 10)
MICROBATCHES, TOKENS, VOCAB_SIZE = 3, 64, 96
FLAGS = (
    "--hidden-size 32 --num-attention-heads 4 --group-query-attention --num-query-groups 2 "
    "--ffn-hidden-size 48 --swiglu --normalization RMSNorm --position-embedding-type rope "
    "--untie-embeddings-and-output-weights --disable-bias-linear --sequence-packing --mock-data "
    f"--seq-length {TOKENS} --vocab-size {VOCAB_SIZE} --make-vocab-size-divisible-by 8 "
    f"--train-iters 1 --global-batch-size {MICROBATCHES} --lr 1e-3 --eval-iters 0"
)


def ours(depth: int) -> Callable[[], None]:
    """Returns a step of the trainer's model, without the optimizer."""
    config = parse_config(f"--num-layers {depth} {FLAGS}".split(), 1)
    mcore_fixes.install()
    cpu_support.install()
    if not dist.is_initialized():
        store = dist.FileStore(f"{tempfile.mkdtemp()}/store", 1)
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        make_groups(config)
    tensor_parallel.model_parallel_cuda_manual_seed(config.training.seed)
    packs = prepare(config, StepData(lengths=((TOKENS,),) * MICROBATCHES))
    training = build_training(config, VOCAB_SIZE, CPU)

    def step() -> None:
        forward_backward(config, training, [on_device(packs, CPU)], packs)

    return step


def theirs(depth: int) -> Callable[[], None]:
    """Returns the same of transformers' model."""
    model = LlamaForCausalLM(
        LlamaConfig(
            hidden_size=32,
            num_attention_heads=4,
            num_key_value_heads=2,
            intermediate_size=48,
            num_hidden_layers=depth,
            vocab_size=VOCAB_SIZE,
            max_position_embeddings=TOKENS,
            use_cache=False,
        )
    ).train()
    tokens = torch.zeros(1, TOKENS, dtype=torch.int64)
    positions = torch.arange(TOKENS)[None]

    def step() -> None:
        for _ in range(MICROBATCHES):
            model(input_ids=tokens, position_ids=positions, labels=tokens).loss.backward()

    return step


def main() -> None:
    """Prints a row for each: best and median milliseconds of CPU."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=60)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    makers = {"ours": ours, "transformers": theirs}
    steps = {(name, depth): make(depth) for name, make in makers.items() for depth in DEPTHS}
    spent: dict[tuple[str, int], list[float]] = {key: [] for key in steps}
    for number in range(rounds + 3):
        for key, step in steps.items():
            start = time.process_time()
            step()
            if number >= 3:
                spent[key].append(1000 * (time.process_time() - start))
    print_row("", f"step of {DEPTHS[1]} layers, ms", "best", "a layer and microbatch, ms", "best")
    print_row(*["---"] * 5)
    found = []
    for name in makers:
        few, many = (spent[name, depth] for depth in DEPTHS)
        more = [(b - a) / (DEPTHS[1] - DEPTHS[0]) / MICROBATCHES for a, b in zip(few, many)]
        best = (min(many) - min(few)) / (DEPTHS[1] - DEPTHS[0]) / MICROBATCHES
        found.append((statistics.median(many), min(many), statistics.median(more), best))
        print_row(name, *(f"{value:.1f}" if value > 5 else f"{value:.2f}" for value in found[-1]))
    print_row("ours / transformers", *(f"{a / b:.2f}" for a, b in zip(*found)))


if __name__ == "__main__":
    main()
