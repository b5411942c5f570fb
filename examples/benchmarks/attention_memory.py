"""tensor. Memory of one context-parallel rank's attention on CPU, forward and backward, beside its
inputs.

    OMP_NUM_THREADS=1 python examples/benchmarks/attention_memory.py
        (a minute; prints the table of results/attention_memory.md)

One sequence over 2 context-parallel ranks, of which rank 0 is computed: 2 heads of 32 channels,
float32. Bytes of tensors are counted as `megatron-sft fit` counts them; the process's own peak,
which knows of memory that kernels take unseen, is what Linux reports. Each row is a process.
"""

from __future__ import annotations

import multiprocessing
import resource
from multiprocessing.connection import Connection

import torch

from megatron.packing.model.attention.blocks import Scores, Segments
from megatron.packing.model.attention.kernels import causal_attention
from megatron.packing.model.attention.zigzag import zigzag
from megatron.sft.fit.counter import ByteCounter

NUM_RANKS, HEADS, WIDTH = 2, 2, 32
WINDOW = 1024
LENGTHS = (8192, 16384, 32768, 65536)
CPU = torch.device("cpu")


def measure(length: int, window: int | None, answers: Connection) -> None:
    """Sends the bytes of tensors and of the process, both beside the inputs, and the bytes of a
    mask of queries and keys.
    """
    seen = zigzag((length,), NUM_RANKS, 0, CPU, window)
    segments = Segments(seen.query_lengths, seen.key_lengths)
    num_queries, num_keys = sum(seen.query_lengths), sum(seen.key_lengths)
    inputs = [
        torch.randn(rows, HEADS, WIDTH, requires_grad=True)
        for rows in (num_queries, num_keys, num_keys)
    ]
    scores = Scores(scale=WIDTH**-0.5, window=window, softcap=None)
    _train([part[:64].detach().requires_grad_() for part in inputs], Segments((64,), (64,)), scores)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    counter = ByteCounter()
    with counter, counter.phase("attention"):
        _train(inputs, segments, scores)
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    answers.send((counter.phases[0].peak, grown * 1024, num_queries * num_keys))


def _train(inputs: list[torch.Tensor], segments: Segments, scores: Scores) -> None:
    query, key, value = inputs
    causal_attention(query, key, value, segments, scores).sum().backward()


def row(length: int, window: int | None) -> str:
    """Returns a line of the table."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    process = context.Process(target=measure, args=(length, window, theirs))
    process.start()
    counted, grown, mask = ours.recv()
    process.join()
    return (
        f"| {length:,} | {'none' if window is None else f'{window:,}'} | {counted / 1e6:.1f} "
        f"| {grown / 1e6:.1f} | {mask / 1e6:,.0f} |"
    )


def main() -> None:
    """Prints the table."""
    torch.set_num_threads(1)
    print(
        "| tokens of the sequence | window | tensors, MB | process, MB | a mask of one byte for "
        "each query and key, MB |"
    )
    print("|" + " --- |" * 5)
    for window in (None, WINDOW):
        for length in LENGTHS:
            print(row(length, window), flush=True)


if __name__ == "__main__":
    main()
