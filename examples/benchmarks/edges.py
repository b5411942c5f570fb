"""mcore. Costs at the edges: records of Parquet in random order, files of an auxiliary store,
memory of a long record, positions far into a blend, and a checkpoint with its checksums.

python -m examples.benchmarks.edges [CASE ...]

Each case runs in a process of its own, CASE by CASE, and prints a line. CPU is user and system
time. Linux only: memory is the kernel's count.
"""

from __future__ import annotations

import io
import json
import resource
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable, Sequence
from fractions import Fraction
from pathlib import Path

import numpy as np

MODEL = (
    "--num-layers 12 --hidden-size 512 --num-attention-heads 8 --vocab-size 32000 "
    "--tokenizer-type NullTokenizer --mock-data --seq-length 64 --global-batch-size 1 "
    "--train-iters 1 --lr 1e-3 --eval-iters 0"
)


def cpu() -> float:
    """Seconds of this process so far."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def cpu_of(work: Callable[..., object], *arguments: object) -> float:
    """Seconds of a call."""
    start = cpu()
    work(*arguments)
    return cpu() - start


def cpu_of_each(work: Callable[..., object], arguments: Sequence[object]) -> float:
    """Seconds of a call, of many with an argument each."""
    start = cpu()
    for argument in arguments:
        work(argument)
    return (cpu() - start) / len(arguments)


def resident(field: str) -> int:
    """Bytes of this process in memory: VmRSS now, VmHWM at most since `reset_peak`."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


def reset_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def spread(values: list[float], unit: str, digits: int = 0) -> str:
    ordered = sorted(values)
    return f"{ordered[len(ordered) // 2]:,.{digits}f} {unit} (least {ordered[0]:,.{digits}f})"


def parquet(folder: Path) -> None:
    """Rows of 1 kB, one by one, and as training reads them. A process keeps 256 MB decoded: 100 MB
    fit, 400 MB and 4 GB do not.
    """
    from megatron.blending.formats.sources import open_source

    draws = np.random.default_rng(0)
    for num_rows, group in ((100_000, 1000), (100_000, 100_000), (400_000, 1000)):
        path = write_rows(folder, num_rows, group)
        order = draws.permutation(num_rows)[:20_000].tolist()
        costs = {}
        for name, indices in (("in order", list(range(20_000))), ("in random order", order)):
            source = open_source(path)
            costs[name] = cpu_of_each(source.read, [[index] for index in indices])
        both = ", ".join(f"{1e6 * cost:,.0f} us {name}" for name, cost in costs.items())
        print(f"parquet, {num_rows:,} rows in row groups of {group:,}: {both}, CPU per row")
        path.unlink()
    for num_rows, group in (
        (100_000, 1000),
        (400_000, 1000),
        (400_000, 100_000),
        (4_000_000, 1000),
        (4_000_000, 100),
    ):
        path = write_rows(folder, num_rows, group)
        first, planned = (1e6 * cost for cost in cpu_of_samples(path))
        path.unlink()
        print(
            f"parquet in training, {num_rows:,} rows in row groups of {group:,}: "
            f"{planned:,.0f} us, CPU per sample ({first:,.0f} of the first 30,720)"
        )


def write_rows(folder: Path, num_rows: int, group: int) -> Path:
    """Rows of 1 kB; a million of them repeat 100,000."""
    import pyarrow
    import pyarrow.parquet

    draws = np.random.default_rng(1)
    table = pyarrow.table({"text": [draws.bytes(500).hex() for _ in range(100_000)]})
    path = folder / f"{num_rows}-{group}.parquet"
    with pyarrow.parquet.ParquetWriter(path, table.schema) as file:
        for _ in range(num_rows // len(table)):
            file.write_table(table, row_group_size=group)
    return path


def cpu_of_samples(path: Path) -> list[float]:
    """Seconds of a sample in random order by a worker: of 30,720, and of the next 32,768, which
    are planned together.
    """
    from megatron.blending import RepeatDataset, SourceDataset, open_source
    from megatron.blending.loading.chunk_loader import ChunkLoader
    from megatron.blending.streams.chunk import ChunkDataset
    from megatron.blending.streams.worker_config import WorkerConfig

    samples = RepeatDataset(SourceDataset(open_source(path)))
    workers = WorkerConfig(rank=0, world_size=1, num_workers=0, seed=1)
    loader = ChunkLoader(ChunkDataset(samples, 32), workers)

    def draw(num_samples: int) -> None:
        for _ in range(num_samples // 32):
            next(loader)

    return [cpu_of(draw, count) / count for count in (30_720, 32_768)]


def aux(folder: Path) -> None:
    """Files of 1 kB of a prepared WebDataset by their names, 20,000 of 100,000, at random."""
    from megatron.blending.energon._encoding.file_store import open_store

    with tarfile.open(folder / "shard.tar", "w") as tar:
        for number in range(100_000):
            member = tarfile.TarInfo(f"{number:06d}.txt")
            member.size = 1000
            tar.addfile(member, io.BytesIO(b"x" * 1000))
    command = ["prepare", "--non-interactive", "--split-ratio", "1,0,0", "--sample-type"]
    command += ["CrudeWebdataset", str(folder)]
    subprocess.run([sys.executable, "-m", "megatron.blending", *command], check=True)
    store = open_store(str(folder), lambda name, content: content, "benchmark")
    names = [f"{number:06d}.txt" for number in np.random.default_rng(0).permutation(100_000)]
    store.get(names[-1])
    costs = [
        1e6 * cpu_of_each(store.get, names[part : part + 4000]) for part in range(0, 20_000, 4000)
    ]
    print(f"aux store: {spread(costs, 'us')}, CPU per file")


def record(folder: Path) -> None:
    """A line of 5 MB with the byte-level tokenizer: at most, and while the sample waits."""
    from megatron.blending.formats.record import read_records
    from megatron.blending.formats.sources import open_source
    from megatron.sft.data.chat_encoder import ChatEncoder
    from megatron.sft.data.tokenizer import build_tokenizer

    (folder / "long.jsonl").write_text(json.dumps({"text": "word " * 1_000_000}) + "\n")
    (folder / "short.jsonl").write_text('{"text": "word"}\n')
    encoder = ChatEncoder(build_tokenizer("ByteLevelTokenizer", None, None), 2**24, "truncate")
    samples = []
    for name in ("short", "long"):
        source = open_source(folder / f"{name}.jsonl")
        reset_peak()
        before = resident("VmRSS")
        samples.append(encoder.encode(read_records(source, [0])[0]))  # type: ignore[arg-type]
    most, kept = ((resident(field) - before) / 5e6 for field in ("VmHWM", "VmRSS"))
    print(f"a line of 5 MB: {most:.1f} times its bytes at most, {kept:.1f} while it waits")


def proportions(_: Path) -> None:
    """The first choice of a process: at position two million and 10^9 of weights with long
    decimals; at the start of 300 finite sources.
    """
    from megatron.blending.order.proportions import Proportions
    from megatron.blending.order.weights import integer_weights

    draws = np.random.default_rng(0)
    # The first one of a process also imports.
    Proportions([(0, integer_weights((1, 2)))], 0).choose(np.arange(4))
    for position in (2_000_000, 10**9):
        costs = []
        for seed in range(5):
            weights = integer_weights(draws.random(5).tolist())
            choose = Proportions([(0, weights)], seed).choose
            costs.append(cpu_of(choose, np.array([position])))
        print(f"weights of long decimals, position {position:,}: {spread(costs, 's', 3)}, CPU")
    costs = []
    for seed in range(5):
        sizes = draws.integers(1000, 1_000_000, 300).tolist()
        odd = [Fraction(float(weight)) for weight in draws.random(300)]
        costs.append(cpu_of(_first_of_finite, odd, sizes, seed))
    print(f"300 finite sources of odd weights, first 100: {spread(costs, 's', 3)}, CPU")


def _first_of_finite(weights: Sequence[Fraction], sizes: Sequence[int], seed: int) -> None:
    from megatron.blending.order.proportions import Proportions, until_exhausted

    Proportions(until_exhausted(weights, sizes), seed).choose(np.arange(100))


def checkpoint(folder: Path) -> None:
    """Measures --save in one process after a step on CPU, and torch.save of the same tensors.

    The model and its optimizer are 0.85 GB in float32.
    """
    import torch

    from megatron.sft.__main__ import main
    from megatron.sft.training.saved_run import SavedRun

    save = SavedRun.save

    def measured(self: SavedRun, *arguments: object) -> None:
        ours, beside, memory = [], [], 0.0
        for _ in range(5):
            reset_peak()
            before = resident("VmRSS")
            self._saved_iteration = None  # else that step is saved already
            seconds = cpu_of(save, self, *arguments)
            gb = sum(path.stat().st_size for path in folder.rglob("*.distcp")) / 1e9
            memory = max(memory, (resident("VmHWM") - before) / 1e9 / gb)
            ours.append(seconds / gb)
            tensors = [torch.ones(2**24) for _ in range(int(gb * 1e9 / 2**26))]
            beside.append(cpu_of(torch.save, tensors, folder / "beside.pt") / gb)
            tensors.clear()
        print(
            f"checkpoint of {gb:.2f} GB: {spread(ours, 's', 2)} of CPU and at most "
            f"{memory:.2f} GB of memory per GB; torch.save {spread(beside, 's', 2)}"
        )

    SavedRun.save = measured  # type: ignore[method-assign,assignment]
    sys.argv = ["train", *MODEL.split(), "--save", str(folder / "saved")]
    main()


CASES = {case.__name__: case for case in (parquet, aux, record, proportions, checkpoint)}


def run_all(names: list[str]) -> None:
    for name in names:
        command = [
            sys.executable,
            "-W",
            "ignore",
            "-m",
            "examples.benchmarks.edges",
            "--case",
            name,
        ]
        subprocess.run(command, check=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--case"]:
        with tempfile.TemporaryDirectory() as made:
            CASES[sys.argv[2]](Path(made))
    else:
        run_all(sys.argv[1:] or list(CASES))
