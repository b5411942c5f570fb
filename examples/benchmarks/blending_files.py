"""pure. The files that blending is measured on: three data sets, prepared, and what the barest loop
over them costs.
"""

from __future__ import annotations

import io
import itertools
import json
import mmap
import random
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[2]

WEIGHTS = {"a": 0.5, "b": 0.3, "c": 0.2}
SAMPLES_PER_SHARD = 1000
SLICE_LENGTH = 100


class Way(NamedTuple):
    """Which files are read."""

    name: str
    path: str
    """Of the YAML file that blends them."""
    is_crude: bool
    """Whether a cooker makes the samples: of JSONL."""


def make_data(folder: Path, num_shards: int) -> list[Way]:
    """Three data sets as tar shards and as JSONL, with the same texts of about 1 kB, prepared."""
    rng = random.Random(0)
    words = ["".join(rng.choices("abcdefghijklmnop", k=6)) for _ in range(2000)]
    for name in WEIGHTS:
        (folder / name).mkdir()
        with open(folder / f"{name}.jsonl", "w") as lines:
            for shard in range(num_shards):
                with tarfile.open(folder / name / f"{shard:03}.tar", "w") as tar:
                    for number in range(shard * SAMPLES_PER_SHARD, (shard + 1) * SAMPLES_PER_SHARD):
                        text = f"{name} " + " ".join(rng.choices(words, k=rng.randint(90, 200)))
                        member = tarfile.TarInfo(f"{name}{number:06}.txt")
                        member.size = len(text)
                        tar.addfile(member, io.BytesIO(text.encode()))
                        lines.write(json.dumps({"text": text}) + "\n")
        command = [sys.executable, "-m", "megatron.blending", "prepare", "--num-workers", "1"]
        kind = ["--sample-type", "TextSample", "--field-map", '{"text": "txt"}']
        for arguments in ([str(folder / name), *kind], [str(folder / f"{name}.jsonl")]):
            subprocess.run([*command, *arguments], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    for file, suffix in (("tar.yaml", ""), ("jsonl.yaml", ".jsonl")):
        entries = "".join(
            f"      - {{path: {name}{suffix}, weight: {weight}}}\n"
            for name, weight in WEIGHTS.items()
        )
        head = (
            "__module__: megatron.energon\n__class__: MetadatasetV2\nsplits:\n  train:\n    "
            "blend:\n"
        )
        (folder / file).write_text(head + entries)
    return [
        Way("tar shards", str(folder / "tar.yaml"), False),
        Way("JSONL", str(folder / "jsonl.yaml"), True),
    ]


def floor(way: Way) -> dict[str, float]:
    """CPU microseconds per sample of the barest loop: slices of mapped files at known places, then
    made text.
    """
    slices = []
    for path in sorted(Path(way.path).parent.glob("*.jsonl" if way.is_crude else "*/*.tar")):
        with open(path, "rb") as file:
            content = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
        places = _lines(content) if way.is_crude else _members(path)
        slices += [
            (content, places[at : at + SLICE_LENGTH]) for at in range(0, len(places), SLICE_LENGTH)
        ]
    random.Random(0).shuffle(slices)
    order = [(content, start, end) for content, places in slices for start, end in places]
    parse: Callable[[bytes], Any] = json.loads if way.is_crude else bytes.decode
    for content, start, end in order:  # into the page cache
        content[start:end]
    begun = time.process_time()
    for content, start, end in order:
        content[start:end]
    sliced = time.process_time()
    for content, start, end in order:
        parse(content[start:end])
    ended = time.process_time()
    return {
        "slice": (sliced - begun) / len(order) * 1e6,
        "text": (ended - sliced) / len(order) * 1e6,
    }


def _members(path: Path) -> list[tuple[int, int]]:
    with tarfile.open(path) as tar:
        return [(member.offset_data, member.offset_data + member.size) for member in tar]


def _lines(file: mmap.mmap) -> list[tuple[int, int]]:
    ends = [0]
    while (end := file.find(b"\n", ends[-1])) >= 0:
        ends.append(end + 1)
    return list(itertools.pairwise(ends))
