"""mcore. Host time of a layer beside transformers: microbatches too small to compute much.

    OMP_NUM_THREADS=1 python -m examples.benchmarks.host_time [--runs 3] [--write PAGE]

On a GPU the host launches each operation, and where a pack has few tokens the device waits for it.
A Llama of width 32 trains three microbatches of one sequence of 64 tokens, forward and backward, as
the trainer does and as transformers' model does, by turns in one process. Both are measured at two
depths: what a deeper model takes more is its layers' (the rest is head, loss and schedule).
Figures go to --results, a file for each megatron-core, and the page is made of all files there.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core import tensor_parallel
from transformers import LlamaConfig, LlamaForCausalLM

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

_HEAD = f"""# Host time of a layer beside transformers

```
for python in .venv .venv-core-0.19.2; do OMP_NUM_THREADS=1 \\
    $python/bin/python -m examples.benchmarks.host_time \\
    --write examples/benchmarks/results/host_time.md; done
```

Milliseconds of CPU, medians and best of the rounds of a run, by turns; of all runs the smallest
and the largest. {MICROBATCHES} microbatches of one sequence of {TOKENS} tokens, forward and
backward, a width of 32, on 2 cores that others used.

Both sides spend about as long in torch's backward engine. What is left over is megatron-core's:
more modules in modules, a hook for each weight's gradient, and a walk over all modules once a step
(some 3 % here, with three microbatches).
"""


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


def measure(rounds: int) -> dict[str, list[float]]:
    """Returns milliseconds of CPU by who: of a step of the deeper model and of a layer and
    microbatch, the median and the best of each.
    """
    makers = {"ours": ours, "transformers": theirs}
    steps = {(name, depth): make(depth) for name, make in makers.items() for depth in DEPTHS}
    spent: dict[tuple[str, int], list[float]] = {key: [] for key in steps}
    for number in range(rounds + 3):
        for key, step in steps.items():
            start = time.process_time()
            step()
            if number >= 3:
                spent[key].append(1000 * (time.process_time() - start))
    milliseconds = {}
    for name in makers:
        few, many = (spent[name, depth] for depth in DEPTHS)
        more = [(b - a) / (DEPTHS[1] - DEPTHS[0]) / MICROBATCHES for a, b in zip(few, many)]
        best = (min(many) - min(few)) / (DEPTHS[1] - DEPTHS[0]) / MICROBATCHES
        milliseconds[name] = [statistics.median(many), min(many), statistics.median(more), best]
    return milliseconds


def section(result: dict[str, object]) -> Iterator[str]:
    """Yields the lines of a page about one megatron-core: of all runs the smallest and largest."""
    runs = result["runs"]
    assert isinstance(runs, list)
    yield f"## {result['versions']}\n\n{result['machine']}, {len(runs)} runs\n"
    heads = (f"a step of {DEPTHS[1]} layers, ms", "best", "a layer and microbatch, ms", "best")
    yield f"|  | {' | '.join(heads)} |\n| --- | --- | --- | --- | --- |"
    ratios = [[a / b for a, b in zip(run["ours"], run["transformers"])] for run in runs]
    rows = {name: [run[name] for run in runs] for name in ("ours", "transformers")}
    for name, values in {**rows, "ours / transformers": ratios}.items():
        cells = [f"{min(column):.2f} to {max(column):.2f}" for column in zip(*values)]
        yield f"| {name} | {' | '.join(cells)} |"
    yield ""


def main() -> None:
    """Measures some times, and writes the page."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--results", type=Path, default=Path("runs/host_time"))
    parser.add_argument("--write", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    runs = [measure(options.rounds) for _ in range(options.runs)]
    core = version("megatron-core")
    result = {
        "versions": f"megatron-core {core}, torch {torch.__version__}, transformers "
        f"{version('transformers')}, Python {platform.python_version()}",
        "machine": f"{time.strftime('%Y-%m-%d')}, a load of "
        f"{Path('/proc/loadavg').read_text().split()[0]}",
        "runs": runs,
    }
    options.results.mkdir(parents=True, exist_ok=True)
    (options.results / f"{core}.json").write_text(json.dumps(result))
    results = [json.loads(path.read_text()) for path in sorted(options.results.glob("*.json"))]
    page = "\n".join([_HEAD, *(line for one in results for line in section(one))])
    print(page)
    if options.write is not None:
        options.write.write_text(page)


if __name__ == "__main__":
    main()
