"""Data sets for tests, as energon's preparation leaves them on disk."""

import io
import json
import tarfile
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron.blending.formats.files import open_file
from megatron.blending.formats.prepared.sample_index import SampleIndexWriter
from megatron.blending.formats.prepared.tar import scan_tar

Samples = Sequence[tuple[str, Mapping[str, bytes]]]

TEXT = (
    "sample_type:\n  __module__: megatron.energon\n  __class__: TextSample\nfield_map:\n  "
    "text: "
    "txt\n"
)
CRUDE = "__module__: megatron.energon\n__class__: CrudeWebdataset\n"
CAPTION = (
    "sample_type:\n  __module__: megatron.energon\n  __class__: CaptioningSample\n"
    "field_map:\n  image: pth\n  caption: json[caption]\n"
)


def write_tar(path: Path, samples: Samples) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    starts: list[int] = []
    with tarfile.open(path, "w") as tar:
        for key, parts in samples:
            starts.append(tar.offset)
            for name, content in parts.items():
                member = tarfile.TarInfo(f"{key}.{name}")
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content))
        starts.append(tar.offset)
    np.array(starts, np.uint64).tofile(f"{path}.idx")


def write_folder(
    root: Path, shards: Mapping[str, Samples], dataset: str = TEXT, **split_parts: list[str]
) -> Path:
    """Write shards by name, and what preparation adds. `split_parts`: shards of each; by default
    all to train.
    """
    for name, samples in shards.items():
        write_tar(root / name, samples)
    meta = root / ".nv-meta"
    meta.mkdir(parents=True, exist_ok=True)
    counts = {name: len(samples) for name, samples in shards.items()}
    (meta / ".info.json").write_text(
        json.dumps({"energon_version": "7.4.1", "shard_counts": counts})
    )
    (meta / "split.yaml").write_text(
        json.dumps({"split_parts": split_parts or {"train": list(shards)}, "exclude": []})
    )
    (meta / "dataset.yaml").write_text(dataset)
    with SampleIndexWriter(str(meta / "index.sqlite")) as index:
        for number, name in enumerate(shards):
            index.add(number, scan_tar(open_file(str(root / name))))
    return root


def write_texts(root: Path, name: str, count: int, subflavors: str = "") -> Path:
    """Samples "NAME-0", "NAME-1" ...: three quarters in two shards for training, the last quarter
    for validation.
    """
    samples = [(f"{name}_{i:04d}", {"txt": f"{name}-{i}".encode()}) for i in range(count)]
    cuts = [0, count // 2, count * 3 // 4, count]
    shards = {
        f"shards/s_{number}.tar": samples[a:b] for number, (a, b) in enumerate(pairwise(cuts))
    }
    train, val = ["shards/s_{0..1}.tar"], ["shards/s_2.tar"]
    return write_folder(root / name, shards, TEXT + subflavors, train=train, val=val)


def write_jsonl(path: Path, rows: Sequence[Mapping[str, object]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def write_parquet(path: Path, rows: Sequence[Any], row_group_size: int) -> Path:
    table = pytest.importorskip("pyarrow").Table.from_pylist(rows)
    pytest.importorskip("pyarrow.parquet").write_table(table, path, row_group_size=row_group_size)
    return path
