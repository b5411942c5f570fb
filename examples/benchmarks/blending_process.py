"""pure. One loader in a process of its own, measured; blending.py runs it with the Python of either
package.

The code is the same for both, but for the package that it imports. Prints one line of JSON. Linux
only: CPU time and memory of worker processes are the kernel's own counts, so nothing is asked of
the package measured.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
from collections import Counter
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

BATCH_SIZE = 32
WARMUP_SAMPLES = 3200
NUM_MARKS = 10


def make_loader(package: Any, case: dict[str, Any]) -> Any:
    """The blend of three data sets as batches of TextSample."""

    @package.stateless
    def to_text(sample: Any) -> Any:
        return package.TextSample(**package.basic_sample_keys(sample), text=sample["json"]["text"])

    class Encoder(package.DefaultTaskEncoder):  # type: ignore[misc, name-defined]
        cookers = [package.Cooker(cook=to_text)] if case["is_crude"] else []

    config = package.WorkerConfig(rank=0, world_size=1, num_workers=case["num_workers"])

    dataset = package.get_train_dataset(
        case["path"],
        worker_config=config,
        batch_size=BATCH_SIZE,
        shuffle_buffer_size=100,
        max_samples_per_sequence=100,
        task_encoder=Encoder(),
    )
    return package.get_loader(dataset)


def pids() -> list[int]:
    """This process and all below it."""
    found = [os.getpid()]
    for pid in found:
        for task in Path(f"/proc/{pid}/task").iterdir():
            found += map(int, (task / "children").read_text().split())
    return found


def cpu_seconds(pid: int) -> float:
    """User and system time of all threads of any process, to the nanosecond: what
    clock_getcpuclockid(3) names.
    """
    return time.clock_gettime(~pid << 3 | 2)


def memory_mb(pid: int, field: str, file: str = "status") -> float:
    lines = Path(f"/proc/{pid}/{file}").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith(field)) / 1024


def draw(batches: Iterator[Any], num_samples: int) -> None:
    for _ in range(num_samples // BATCH_SIZE):
        if len(next(batches).text) != BATCH_SIZE:
            raise AssertionError("a batch is not full")


def measure(package: Any, case: dict[str, Any]) -> dict[str, Any]:
    """Seconds to the first batch, then CPU per sample and memory after a warm-up."""
    imported = time.monotonic()
    batches = iter(make_loader(package, case))
    first = next(batches)
    found: dict[str, Any] = {
        "first_after_imports": time.monotonic() - imported,
        "first_with_imports": time.monotonic() - case["started"],
        "first_cpu": sum(map(cpu_seconds, pids())),
    }
    texts = list(first.text)
    for _ in range(WARMUP_SAMPLES // BATCH_SIZE):
        texts += next(batches).text
    # That both do the same work: each text begins with the name of its data set.
    shares = Counter(text[0] for text in texts)
    found["shares"] = {name: count / len(texts) for name, count in sorted(shares.items())}
    found["mean_length"] = sum(map(len, texts)) / len(texts)
    processes = pids()
    before = sum(map(cpu_seconds, processes))
    draw(batches, case["num_samples"])
    found["cpu_us"] = (sum(map(cpu_seconds, processes)) - before) / case["num_samples"] * 1e6
    workers = processes[1:] or processes
    found["peak_mb"] = max(memory_mb(pid, "VmHWM") for pid in workers)
    found["own_mb"] = max(memory_mb(pid, "Private_", "smaps_rollup") for pid in workers)
    found["num_processes"] = len(processes)
    return found


def grow(package: Any, case: dict[str, Any]) -> dict[str, Any]:
    """Memory that is not of files, as samples go by, of all processes together."""
    batches = iter(make_loader(package, case))
    draw(batches, case["num_samples"] // NUM_MARKS)
    marks = []
    for mark in range(1, NUM_MARKS + 1):
        marks.append(
            [
                mark * case["num_samples"] // NUM_MARKS,
                sum(memory_mb(pid, "RssAnon") for pid in pids()),
            ]
        )
        if mark < NUM_MARKS:
            draw(batches, case["num_samples"] // NUM_MARKS)
    return {"marks": marks}


def main() -> None:
    """Measure what the first argument says."""
    case = json.loads(sys.argv[1])
    if case["imports_torch"]:
        importlib.import_module("torch")
    package = importlib.import_module(case["package"])
    for name in ("get_train_dataset", "get_loader", "DefaultTaskEncoder", "Cooker", "TextSample"):
        getattr(package, name)  # where names are imported when they are used, these are imports too
    found = (grow if case["is_long"] else measure)(package, case)
    found["torch"] = metadata.version("torch")
    print(json.dumps(found), flush=True)
    os._exit(0)  # how a loader shuts down is not what is measured here


if __name__ == "__main__":
    main()
