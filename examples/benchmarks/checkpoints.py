"""mcore. CPU seconds and host memory of checkpoints and of --save-hf: plain and sharded, beside
torch's own and beside another commit.

    python -m examples.benchmarks.checkpoints [--beside CHECKOUT] [--rounds 3] [--write PAGE]

A round saves and loads for each case, in forked ranks; the first time is left out. CPU is that of
the slowest rank, per GB of the whole checkpoint. Checksums are part of ours. `torch` is
`torch.distributed.checkpoint` with the same tensors, in the same process in turns. Figures go to
--results, a file for each megatron-core, and the page is made of all files there. Linux only.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core import tensor_parallel
from megatron.core.utils import unwrap_model
from torch.distributed import checkpoint as torch_checkpoint

from examples.benchmarks.provenance import commit
from megatron.sft.arguments.parse import parse_config
from megatron.sft.distributed import make_groups
from megatron.sft.fit.counter import ByteCounter
from megatron.sft.fit.save_bytes import save_bytes
from megatron.sft.fit.step import StepData, run_step
from megatron.sft.model import cpu_support, mcore_fixes
from megatron.sft.model.checkpoints.content import Progress, Wanted, load_checkpoint
from megatron.sft.model.checkpoints.folder import checkpoint_path
from megatron.sft.model.checkpoints.save import CheckpointSave
from megatron.sft.model.huggingface.companions import Companions
from megatron.sft.model.huggingface.write import write_folder
from tests.functional_tests.ranks import run_ranks

_VOCAB = 8192
_MODEL = (
    "--num-attention-heads 8 --mock-data --group-query-attention --num-query-groups 4 "
    f"--seq-length 64 --vocab-size {_VOCAB} --make-vocab-size-divisible-by 8 --train-iters 1 "
    "--global-batch-size 24 --lr 1e-3 --eval-iters 0 --position-embedding-type rope --swiglu "
    "--normalization RMSNorm --untie-embeddings-and-output-weights --disable-bias-linear "
    "--sequence-packing --bf16"
)
_SMALL = "--num-layers 6 --hidden-size 512 --ffn-hidden-size 2048"
_LARGE = "--num-layers 8 --hidden-size 1536 --ffn-hidden-size 6144"
_SHARDED = "--use-distributed-optimizer"
_EXPERTS = (
    "--qk-layernorm --num-experts 8 --moe-router-topk 2 --moe-ffn-hidden-size 256 "
    "--expert-model-parallel-size 2 --moe-token-dispatcher-type alltoall"
)

_OURS, _TORCH = "ours", "torch"
# glibc keeps up to 64 MB of what was freed, which are no part of what a save takes.
_NOTHING_KEPT = {"MALLOC_MMAP_THRESHOLD_": "65536"}


class _Case(NamedTuple):
    """A model and its layout, and what is measured of it, in ranks of its own."""

    world_size: int
    flags: str
    has_torch: bool = False
    """True if torch saves and loads the same tensors."""
    is_beside: bool = False
    """True if the other commit is measured, too."""
    num_times: int = 3
    is_stacked: bool = False
    """True if the folder has the experts of a layer in one tensor."""


_CASES = {
    "plain": _Case(1, _SMALL, has_torch=True, is_beside=True),
    "plain, ten times as large": _Case(1, _LARGE, has_torch=True, num_times=2),
    "sharded, dp 2": _Case(2, f"{_SMALL} {_SHARDED}", is_beside=True),
    "sharded, dp 4": _Case(4, f"{_SMALL} {_SHARDED}"),
}
_LAYOUTS = {
    "one rank": _Case(1, _SMALL, is_beside=True),
    "dp 2": _Case(2, f"{_SMALL} {_SHARDED}", is_beside=True),
    "dp 4": _Case(4, f"{_SMALL} {_SHARDED}"),
    "tp 2": _Case(2, f"{_SMALL} {_SHARDED} --tensor-model-parallel-size 2"),
    "tp 2, dp 2": _Case(4, f"{_SMALL} {_SHARDED} --tensor-model-parallel-size 2"),
    "pp 2": _Case(2, f"{_SMALL} {_SHARDED} --pipeline-model-parallel-size 2"),
    "8 experts, ep 2": _Case(2, f"{_SMALL} {_SHARDED} {_EXPERTS}"),
    "8 experts in one tensor, ep 2": _Case(2, f"{_SMALL} {_SHARDED} {_EXPERTS}", is_stacked=True),
}

_GROWN = ("own", "save", "load", "write", "fit of save", "fit of write")
_HEAD = """# Checkpoints and --save-hf: CPU and host memory

```
for python in .venv .venv-core-0.19.2; do $python/bin/python -m examples.benchmarks.checkpoints \\
    --beside ../main --write examples/benchmarks/results/checkpoints.md; done
```

A model of 32 million weights in bfloat16, with two moments and main weights in float32 (0.45 GB),
and one ten times as large, on a local disk. CPU is that of the slowest rank, per GB of the whole
checkpoint; of each round's saves and loads the first are left out. `torch` is
`torch.distributed.checkpoint` with the same tensors, in the same process in turns; it sums
nothing. Ours compares checksums of all files before it loads, and sums what it saves.

- Ratios are of pairs in turns, smallest to largest, with their median.
- Adam's state is there before a load, as for torch. The commit before makes it again in each load;
  a run, which loads once, makes it once.
- Host memory is what a rank's resident memory grew by at most, in megabytes, rank by rank. `fit`
  is what `megatron-sft fit` says of the rank before it runs, as if the device were not the host:
  of a save it is the largest tensor, which is copied from a device, and not here; of --save-hf two
  copies of the largest parameter (here 8.4 MB each), of which one is that copy, too.
- Summed by zlib, not zlib-ng, a plain load took 1.39 to 1.79 of torch's, and 0.95 of ten times as
  many weights (2026-11-29, five and two pairs).
- Runs of 272671fa and of this code, saved in the middle by two ranks (sharded, bfloat16) and by
  one, are continued by this code to the bits of the losses and norms of gradients to which commit
  ac761bcc continues them: on as many ranks, with two pipeline stages, and with tensor parallel.
  That commit continues what this code saved to the same bits. Under megatron-core 0.19.2 two cases
  were run: 272671fa's two ranks, and one rank of this code.
"""


def _seconds(work: Callable[[], object]) -> float:
    """Returns the CPU time of all threads."""
    start = time.process_time()
    work()
    return time.process_time() - start


def _growth(work: Callable[[], object]) -> float:
    """Returns the megabytes that this process grows by at most."""
    ctypes.CDLL(None).malloc_trim(0)  # what was freed before would be used first
    Path("/proc/self/clear_refs").write_text("5")
    resident = _resident("VmRSS")
    work()
    return _resident("VmHWM") - resident


def _resident(name: str) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024e-6 for line in lines if line.startswith(name))


def _size(folder: Path) -> float:
    return sum(path.stat().st_size for path in folder.rglob("*")) / 1e9


def _train(flags: str) -> Any:
    """Returns a model and its optimizer after a step, and its config."""
    config = parse_config(f"{_MODEL} {flags}".split(), dist.get_world_size())
    mcore_fixes.install()
    cpu_support.install()
    make_groups(config)
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    data = StepData(lengths=((40, 24),), loss_share=0.7)
    return run_step(config, _VOCAB, data, ByteCounter(), num_steps=1), config


def _measure(case: _Case, folder: Path) -> dict[str, list[dict[str, Any]]]:
    """Returns what each save and load of this rank costs, by who saves."""
    training, _ = _train(case.flags)
    costs_by_who: dict[str, list[dict[str, Any]]] = {}
    for number in range(1, case.num_times + 1):
        path = checkpoint_path(folder, number)
        works: dict[str, tuple[Callable[[], object], Callable[[], object]]] = {
            _OURS: (
                partial(_save, folder, training, number),
                partial(load_checkpoint, folder, training, {}, {}, Wanted()),
            )
        }
        if case.has_torch:
            state = _tensors(training)
            works[_TORCH] = (
                partial(torch_checkpoint.save, state, checkpoint_id=path),
                partial(torch_checkpoint.load, state, checkpoint_id=path),
            )
        for name, (save, load) in works.items():
            costs = {"save": _seconds(save), "load": _seconds(load)}
            dist.barrier()
            costs_by_who.setdefault(name, []).append({**costs, "GB": _size(path)})
            dist.barrier()
            if dist.get_rank() == 0:
                shutil.rmtree(path)
    return {name: times[1:] for name, times in costs_by_who.items()}


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


def _cpu_rows(name: str) -> Iterator[dict[str, Any]]:
    """Yields the CPU seconds per GB of one case, of the slowest rank."""
    case = _CASES[name]
    with tempfile.TemporaryDirectory() as folder:
        ranks = run_ranks(_measure, case.world_size, case, Path(folder), timeout_seconds=900)
    for who in ranks[0]:
        times = [*zip(*(rank[who] for rank in ranks))]
        row: dict[str, Any] = {"case": name, "who": who, "GB": times[0][0]["GB"]}
        for work in ("save", "load"):
            row[work] = [max(rank[work] for rank in ranks) / row["GB"] for ranks in times]
        yield row


def _grow(case: _Case, folder: Path) -> dict[str, float]:
    """Returns megabytes of this rank: its weights, and what a save, a load and --save-hf take."""
    training, config = _train(case.flags)
    companions = Companions(config, None, _VOCAB, "bfloat16")
    weights = companions.weights()
    if case.is_stacked:
        weights = weights.with_stacked_experts()
    chunks = [unwrap_model(chunk) for chunk in training.model]
    works: dict[str, Callable[[], object]] = {
        "save": partial(_save, folder, training, 1),
        "load": partial(load_checkpoint, folder, training, {}, {}, Wanted()),
        "write": partial(write_folder, folder / "hf", chunks, weights, companions.write),
    }
    growth = {}
    for name, work in works.items():
        dist.barrier()
        growth[name] = _growth(work)
    described = save_bytes(training)
    return {
        **growth,
        "own": sum(p.nbytes for chunk in chunks for p in chunk.parameters()) / 1e6,
        "fit of save": described.checkpoint / 1e6,
        "fit of write": described.huggingface / 1e6,
    }


def _memory_rows(name: str) -> Iterator[dict[str, Any]]:
    """Yields the megabytes of one layout, each rank's."""
    case = _LAYOUTS[name]
    with tempfile.TemporaryDirectory() as folder:
        ranks = run_ranks(_grow, case.world_size, case, Path(folder), timeout_seconds=900)
    yield {"case": name} | {what: [rank[what] for rank in ranks] for what in ranks[0]}


def _serve(what: str, tree: str) -> None:
    """Measures all cases of a tree once for every line of the standard input, and prints a JSON
    line of what they cost.
    """
    cases, measure = (_CASES, _cpu_rows) if what == "cpu" else (_LAYOUTS, _memory_rows)
    names = [name for name, case in cases.items() if case.is_beside or tree == "here"]
    for _ in sys.stdin:
        print(json.dumps([row for name in names for row in measure(name)]), flush=True)


def _run_rounds(rounds: int, beside: Path | None, results: Path) -> None:
    """Measures trees in turn, and writes their rows into the folder `results`."""
    trees = {"here": Path.cwd()}
    if beside is not None:
        trees["beside"] = beside
    processes = {
        (what, tree): subprocess.Popen(
            [sys.executable, "-W", "ignore", __file__, "--serve", what, tree],
            env={
                **os.environ,
                **(_NOTHING_KEPT if what == "memory" else {}),
                "PYTHONPATH": str(path.resolve()),
                "OMP_NUM_THREADS": "1",
            },
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for what in ("cpu", "memory")
        for tree, path in trees.items()
    }
    rows_of: dict[str, list[dict[str, Any]]] = {"cpu": [], "memory": []}
    loads = []
    for what in ["cpu"] * rounds + ["memory"]:
        for tree in trees:
            process = processes[what, tree]
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.write("\n")
            process.stdin.flush()
            rows = json.loads(process.stdout.readline())
            rows_of[what] += [{"tree": tree, **row} for row in rows]
        loads.append(float(Path("/proc/loadavg").read_text().split()[0]))
    core = version("megatron-core")
    described = {
        "versions": f"megatron-core {core}, torch {torch.__version__}, Python "
        f"{platform.python_version()}",
        "machine": f"{time.strftime('%Y-%m-%d')}, {os.cpu_count()} cores, load {min(loads):.0f} to "
        f"{max(loads):.0f}",
        "beside": "" if beside is None else commit(beside),
    }
    results.mkdir(parents=True, exist_ok=True)
    (results / f"{core}.json").write_text(json.dumps(described | rows_of))


def main() -> None:
    """Runs rounds of all cases, trees in turn, and writes the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--beside", type=Path, help="a checkout of another commit")
    parser.add_argument("--rounds", type=int, default=3, help="0: write the page again")
    parser.add_argument("--results", type=Path, default=Path("runs/checkpoints"))
    parser.add_argument("--write", type=Path)
    parser.add_argument("--serve", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve is not None:
        _serve(*options.serve)
        return
    if options.rounds:
        _run_rounds(options.rounds, options.beside, options.results)
    results = [json.loads(path.read_text()) for path in sorted(options.results.glob("*.json"))]
    page = "\n".join([_HEAD, *(line for result in results for line in _section(result))])
    print(page)
    if options.write is not None:
        options.write.write_text(page)


def _section(result: dict[str, Any]) -> Iterator[str]:
    """Yields the lines of a page about one megatron-core."""
    labels = {"beside": f"commit {result['beside']}", "here": "this code", _TORCH: "torch"}
    yield f"## {result['versions']}\n\n{result['machine']}\n"
    yield "| case | who | GB | save, CPU s per GB | load, CPU s per GB |\n|---|---|---|---|---|"
    times: dict[tuple[str, str], dict[str, list[float]]] = {}
    for row in result["cpu"]:
        who = _TORCH if row["who"] == _TORCH else row["tree"]
        values = times.setdefault((row["case"], who), {"save": [], "load": [], "GB": [row["GB"]]})
        values["save"] += row["save"]
        values["load"] += row["load"]
    for (case, who), values in sorted(times.items()):
        yield (
            f"| {case} | {labels[who]} | {values['GB'][0]:.2f} | {_range(values['save'])} | "
            f"{_range(values['load'])} |"
        )
    yield ""
    plain = next(iter(_CASES))
    against = [((case, "here"), (case, _TORCH)) for case, one in _CASES.items() if one.has_torch]
    against += [((case, "here"), (case, "beside")) for case, one in _CASES.items() if one.is_beside]
    against += [((case, "here"), (plain, "beside")) for case in _CASES if "sharded" in case]
    for one, other in against:
        if other in times:
            ratios = " and ".join(
                f"a {work} {_range(pairs)} ({statistics.median(pairs):.2f})"
                for work in ("load", "save")
                for pairs in [[a / b for a, b in zip(times[one][work], times[other][work])]]
            )
            yield f"- {one[0]}, {labels[one[1]]}, by {other[0]}, {labels[other[1]]}: {ratios}."
    yield (
        "\n| layout | who | weights of a rank, MB | a save grew each rank by, MB | a load | "
        "--save-hf | `fit` of a save | of --save-hf |\n|---|---|---|---|---|---|---|---|"
    )
    for row in result["memory"]:
        cells = [", ".join(f"{size:.0f}" for size in row[what]) for what in _GROWN]
        yield f"| {row['case']} | {labels[row['tree']]} | {' | '.join(cells)} |"
    yield ""


def _range(values: list[float]) -> str:
    return f"{min(values):.2f} to {max(values):.2f}"


if __name__ == "__main__":
    main()
