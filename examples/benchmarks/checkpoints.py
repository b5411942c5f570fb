"""mcore. CPU seconds and host memory of checkpoints: plain, sharded, beside torch's own and beside
another commit.

    python -m examples.benchmarks.checkpoints [--beside CHECKOUT] [--rounds 3]

A round saves and loads three times for each case, in forked ranks; the first time is left out. CPU
is that of the slowest rank, per GB of the whole checkpoint. Checksums are part of ours. `torch` is
`torch.distributed.checkpoint` with the same tensors. Linux only.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import tensor_parallel
from megatron.core.utils import unwrap_model
from torch.distributed import checkpoint as torch_checkpoint

from megatron.sft.arguments.parse import parse_config
from megatron.sft.distributed import make_groups
from megatron.sft.fit.counter import ByteCounter
from megatron.sft.fit.step import StepData, run_step
from megatron.sft.model import cpu_support, mcore_fixes
from megatron.sft.model.checkpoints.content import Progress, Wanted, load_checkpoint
from megatron.sft.model.checkpoints.folder import checkpoint_path
from megatron.sft.model.checkpoints.save import CheckpointSave
from tests.functional_tests.ranks import run_ranks

_VOCAB = 8192
_MODEL = (
    "--num-layers 6 --hidden-size 512 --num-attention-heads 8 --ffn-hidden-size 2048 --mock-data "
    f"--seq-length 64 --vocab-size {_VOCAB} --make-vocab-size-divisible-by 8 --train-iters 1 "
    "--global-batch-size 24 --lr 1e-3 --eval-iters 0 --position-embedding-type rope --swiglu "
    "--normalization RMSNorm --untie-embeddings-and-output-weights --disable-bias-linear "
    "--sequence-packing --bf16"
)
_SHARDED = "--use-distributed-optimizer"
_CASES = {
    "torch": (1, ""),
    "plain": (1, ""),
    "sharded, dp 2": (2, _SHARDED),
    "sharded, dp 4": (4, _SHARDED),
}
_NUM_TIMES = 3


def _cost(work: Callable[[], object]) -> tuple[float, float]:
    """Returns (CPU seconds, GB that this process grew by at most)."""
    Path("/proc/self/clear_refs").write_text("5")
    resident, start = _resident("VmRSS"), time.process_time()
    work()
    return time.process_time() - start, _resident("VmHWM") - resident


def _resident(name: str) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024e-9 for line in lines if line.startswith(name))


def _size(folder: Path) -> float:
    return sum(path.stat().st_size for path in folder.rglob("*")) / 1e9


def _measure(flags: str, folder: Path, by_torch: bool) -> list[dict[str, float]]:
    """Returns what each save and load of this rank costs."""
    config = parse_config(f"{_MODEL} {flags}".split(), dist.get_world_size())
    mcore_fixes.install()
    cpu_support.install()
    make_groups(config)
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    data = StepData(lengths=((40, 24),), loss_share=0.7)
    training = run_step(config, _VOCAB, data, ByteCounter(), num_steps=1)
    found = []
    save: Callable[[], object]
    load: Callable[[], object]
    for number in range(1, _NUM_TIMES + 1):
        path = checkpoint_path(folder, number)
        if by_torch:
            state = _tensors(training)
            save = partial(torch_checkpoint.save, state, checkpoint_id=path)
            load = partial(torch_checkpoint.load, state, checkpoint_id=path)
        else:
            save = partial(_save, folder, training, number)
            load = partial(load_checkpoint, folder, training, {}, {}, Wanted())
        saved, loaded = _cost(save), _cost(load)
        dist.barrier()
        found.append({"save": saved[0], "load": loaded[0], "memory": saved[1], "GB": _size(path)})
        dist.barrier()
        if dist.get_rank() == 0:
            shutil.rmtree(path)
    return found[1:]


def _save(folder: Path, training: Any, number: int) -> None:
    CheckpointSave(folder, training, Progress(number, 24, False), {}, {}).finish()


def _tensors(training: Any) -> dict[str, torch.Tensor]:
    state = {
        f"model.{name}": value
        for name, value in unwrap_model(training.model[0]).state_dict().items()
        if isinstance(value, torch.Tensor)
    }
    adam = training.optimizer.optimizer
    for number, parameter in enumerate(p for group in adam.param_groups for p in group["params"]):
        state[f"optimizer.{number}.param"] = parameter.detach()
        for name in ("exp_avg", "exp_avg_sq"):
            state[f"optimizer.{number}.{name}"] = adam.state[parameter][name]
    return state


def _run_rounds(names: list[str]) -> None:
    """Runs each case once for every line of the standard input, and prints a JSON line of all."""
    for _ in sys.stdin:
        rows = []
        for name in names:
            world_size, flags = _CASES[name]
            with tempfile.TemporaryDirectory() as folder:
                ranks = run_ranks(
                    *(_measure, world_size, flags, Path(folder), name == "torch"),
                    timeout_seconds=900,
                )
            gigabytes = ranks[0][0]["GB"]
            row: dict[str, Any] = {"case": name, "GB": gigabytes}
            for what in ("save", "load"):
                slowest = (max(times, key=itemgetter(what)) for times in zip(*ranks))
                row[what] = [each[what] / gigabytes for each in slowest]
            row["memory"] = max(each["memory"] for rank in ranks for each in rank)
            rows.append(row)
        print(json.dumps(rows), flush=True)


def main() -> None:
    """Runs rounds of all cases, trees in turn, and prints a table of ranges after each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--beside", type=Path, help="a checkout of another commit")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--case", nargs="*", choices=[*_CASES], help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.case is not None:
        _run_rounds(options.case)
        return
    trees = {"here": (Path.cwd(), list(_CASES))}
    if options.beside is not None:
        trees["beside"] = options.beside, ["plain", "sharded, dp 2"]
    processes = {
        tree: subprocess.Popen(
            [sys.executable, "-W", "ignore", __file__, "--case", *cases],
            env={**os.environ, "PYTHONPATH": str(path.resolve()), "OMP_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for tree, (path, cases) in trees.items()
    }
    found: dict[str, dict[str, list[float]]] = {}
    for number in range(options.rounds):
        for tree, process in processes.items():
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.write("round\n")
            process.stdin.flush()
            for row in json.loads(process.stdout.readline()):
                name = row["case"] if row["case"] == "torch" else f"{row['case']} | {tree}"
                values = found.setdefault(name, {"save": [], "load": [], "memory": [], "GB": []})
                values["save"] += row["save"]
                values["load"] += row["load"]
                values["memory"].append(row["memory"])
                values["GB"].append(row["GB"])
        load = Path("/proc/loadavg").read_text().split()[0]
        print(f"{number + 1} rounds, load {load}")
        _print_table(found)


def _print_table(found: dict[str, dict[str, list[float]]]) -> None:
    print("| case | GB | save, CPU s per GB | load, CPU s per GB | host memory of a save, GB |")
    print("|---|---|---|---|---|")
    for name, values in sorted(found.items()):
        cells = [f"{min(values[w]):.2f} to {max(values[w]):.2f}" for w in ("save", "load")]
        print(f"| {name.replace(' | ', ', ')} | {values['GB'][0]:.2f} | {' | '.join(cells)} | "
              f"{max(values['memory']):.2f} |", flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
