"""pure. Samples that blending holds back: how many, in how much memory, and what they cost.

    python examples/benchmarks/blending_blocks.py
    python examples/benchmarks/blending_blocks.py --energon-python energon_venv/bin/python

A worker's part of a stream of a million samples of 20 KiB each, packed by buffers of 100 and 1,000,
for 1 to 256 workers: encoded samples that are alive at once, resident memory, and calls of the
encoder per sample given. Then CPU per sample of text, packed, skipped and in batches; with
megatron-energon beside it if its Python is given. Every case runs in a process of its own.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import subprocess
import sys
import tempfile
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

from blending_files import make_data

ROOT = Path(__file__).parents[2]
NUM_RECORDS = 1_000_000
NUM_PACKS = 400
SAMPLE_BYTES = 20 * 1024
CAPACITY = 8000
WARMUP, MEASURED = 100, 600
"""Outputs."""


class Encoded:
    """A sample of 20 KiB, of which it is known whether it is still held."""

    alive: ClassVar[weakref.WeakSet[Encoded]] = weakref.WeakSet()
    most = calls = 0

    def __init__(self, number: int) -> None:
        self.number = number
        self.content = bytes(bytearray(SAMPLE_BYTES))
        Encoded.calls += 1
        Encoded.alive.add(self)
        Encoded.most = max(Encoded.most, len(Encoded.alive))


def held(buffer: int, num_workers: int, by: str) -> dict[str, Any]:
    """What the first of `num_workers` workers holds while it makes packs."""
    from megatron.blending import MapDataset, PackingDataset, RepeatDataset, SourceDataset
    from megatron.blending.energon._loading.cells import CellState
    from megatron.blending.energon._loading.lanes import lanes_of
    from megatron.blending.energon._loading.server import Server, Start
    from megatron.blending.streams.failures import Failures
    from megatron.blending.streams.node import Binding

    class Numbers:
        def __len__(self) -> int:
            return NUM_RECORDS

        def __getitem__(self, index: int) -> int:
            return index

        def read(self, indices: Any) -> list[Any]:
            return list(indices)

        def describe(self, index: int) -> str:
            return str(index)

        def fingerprint(self) -> str:
            return "numbers"

    def eights(samples: list[Any]) -> list[list[Any]]:
        return [samples[at : at + 8] for at in range(0, len(samples), 8)]

    def numbers_of(samples: list[Any]) -> list[int]:
        return [sample.number for sample in samples]

    source = RepeatDataset(SourceDataset(Numbers(), name="numbers"))
    if by == "lengths":
        tree: Any = PackingDataset(
            source, buffer, eights, numbers_of, sample_encoder=Encoded, length_of=lambda number: 8
        )
    else:
        tree = PackingDataset(MapDataset(source, Encoded), buffer, eights, numbers_of)
    server = Server(lanes_of(tree.bind(Binding(0))), 0, num_workers, 1, Failures())
    server.start(Start(cells=[CellState(0)]))
    before = resident_mb()
    given = sum(len(server.next().items[0][1]) for _ in range(NUM_PACKS))
    # Of a block that is under way the rest is encoded and not given yet.
    under_way = len(Encoded.alive)
    return {
        "most": Encoded.most,
        "rss_mb": resident_mb() - before,
        "per_sample": Encoded.calls / (given + under_way),
    }


def resident_mb() -> float:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


def cost(package_name: str, path: str, kind: str) -> dict[str, Any]:
    """CPU microseconds per sample that comes out, in one process."""
    importlib.import_module("torch")
    package = importlib.import_module(package_name)

    @package.stateless
    def cook(sample: Any) -> Any:
        return package.TextSample(**package.basic_sample_keys(sample), text=sample["json"]["text"])

    class Encoder(package.DefaultTaskEncoder):  # type: ignore[misc, name-defined]
        cookers = (package.Cooker(cook=cook),)
        every = {"1 % skipped": 100, "half skipped": 2}.get(kind, 0)

        @package.stateless
        def encode_sample(self, sample: Any) -> Any:
            if self.every and int(sample.__key__) % self.every == 0:
                raise package.SkipSample
            return sample

        def select_samples_to_pack(self, samples: list[Any]) -> list[list[Any]]:
            packs: list[list[Any]] = [[]]
            room = CAPACITY
            for sample in sorted(samples, key=lambda sample: -len(sample.text)):
                if len(sample.text) > room:
                    packs.append([])
                    room = CAPACITY
                packs[-1].append(sample)
                room -= len(sample.text)
            return packs

        @package.stateless
        def pack_selected_samples(self, samples: list[Any]) -> Any:
            # One that is not encoded: energon's `basic_sample_keys` takes crude samples alone.
            texts: Any = [sample.text for sample in samples]
            return package.TextSample.derive_from(samples[0], text=texts)

        def batch(self, samples: list[Any]) -> Any:
            return {"text": [sample.text for sample in samples]}

    options: dict[str, Any] = {"batch_size": 32}
    if kind.startswith("packs of"):
        options = {"packing_buffer_size": int(kind.split()[-1]), "batch_size": 1}
    config = package.WorkerConfig(rank=0, world_size=1, num_workers=0)
    dataset = package.get_train_dataset(
        path,
        worker_config=config,
        shuffle_buffer_size=100,
        max_samples_per_sequence=100,
        task_encoder=Encoder(),
        **options,
    )
    batches = iter(package.get_loader(dataset))
    count_of(batches, WARMUP)
    begun = time.process_time()
    count = count_of(batches, MEASURED)
    return {"us": (time.process_time() - begun) / count * 1e6}


def count_of(batches: Iterator[Any], number: int) -> int:
    """Draw so many batches, and return how many samples are in them."""
    count = 0
    for _ in range(number):
        texts = next(batches)["text"]
        count += sum(len(text) if isinstance(text, list) else 1 for text in texts)
    return count


def run(python: str, case: dict[str, Any]) -> dict[str, Any]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    environment.pop("PYTHONPATH", None)
    if case.get("package") != "megatron.energon":
        environment["PYTHONPATH"] = str(ROOT)
    done = subprocess.run(
        [python, __file__, "--case", json.dumps(case)],
        env=environment,
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise SystemExit(f"{case}: {done.stderr[-2000:]}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--energon-python", metavar="PATH", help="Python with megatron-energon")
    parser.add_argument("--only-cost", action="store_true", help="skip what is held")
    parser.add_argument("--case", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.case:
        case = json.loads(options.case)
        function = held if "buffer" in case else cost
        names = {"package": "package_name"}
        print(json.dumps(function(**{names.get(name, name): case[name] for name in case})))
        sys.stdout.flush()
        os._exit(0)  # how a loader shuts down is not what is measured here
    print("| holds | buffer | workers | encoded samples held | memory, MB | encodings per sample |")
    print("| --- | --- | --- | --- | --- | --- |")
    for by in () if options.only_cost else ("samples", "lengths"):
        for buffer in (100, 1000):
            for workers in (1, 8, 256):
                case = {"buffer": buffer, "num_workers": workers, "by": by}
                found = run(sys.executable, case)
                row = [f"{found['most']}", f"{found['rss_mb']:.1f}", f"{found['per_sample']:.2f}"]
                print("| " + " | ".join([by, str(buffer), str(workers), *row]) + " |", flush=True)
    print("\n| CPU, us per sample | ours | energon |\n| --- | --- | --- |")
    with tempfile.TemporaryDirectory() as folder:
        ways = make_data(Path(folder), 20)
        for kind in ("batches", "1 % skipped", "half skipped", "packs of 100", "packs of 1000"):
            figures = []
            for python, package in (
                (sys.executable, "megatron.blending"),
                (options.energon_python, "megatron.energon"),
            ):
                if python is None:
                    figures.append("-")
                    continue
                case = {"package": package, "path": ways[1].path, "kind": kind}
                found = min((run(python, case) for _ in range(2)), key=lambda one: one["us"])
                figures.append(f"{found['us']:.1f}")
            print(f"| {kind} | {' | '.join(figures)} |", flush=True)


if __name__ == "__main__":
    main()
