"""pure. Files that `make scale` reads: a Parquet file of chats, and prepared tars."""

from __future__ import annotations

import io
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import numpy as np

WORDS_PER_TURN = 300
_NUM_TEXTS = 20_000
_ROWS_PER_GROUP = 2000
_SAMPLES_PER_SHARD = 10_000


def _texts(count: int, num_words: int) -> list[str]:
    """Returns turns of words as frequent as those of a language: the n-th has weight 1/n."""
    draws = np.random.default_rng(0)
    lengths = draws.integers(2, 11, 30_000)
    words = ["".join(map(chr, draws.integers(97, 123, length))) for length in lengths]
    weights = 1 / np.arange(1, len(words) + 1)
    chosen = draws.choice(len(words), (count, num_words), p=weights / weights.sum())
    return [" ".join(words[number] for number in row) for row in chosen]


def write_chats(path: Path, num_bytes: int) -> None:
    """Writes chats of four turns, 2,000 in a row group, as datasets and pandas compress them.

    The texts are 20,000 ones in random order, which the compression of a page does not see: it
    looks 64 kB back. They are not written as a dictionary, in which case the file would be small.
    """
    import pyarrow
    import pyarrow.parquet

    draws = np.random.default_rng(1)
    texts = pyarrow.array(_texts(_NUM_TEXTS, WORDS_PER_TURN))
    roles = pyarrow.array(["user", "assistant"] * (2 * _ROWS_PER_GROUP))
    offsets = pyarrow.array(np.arange(0, 4 * _ROWS_PER_GROUP + 1, 4, dtype=np.int32))
    writer: Any = None
    with open(path, "wb") as sink:
        while True:
            chosen = draws.integers(0, _NUM_TEXTS, 4 * _ROWS_PER_GROUP)
            turns = pyarrow.StructArray.from_arrays(
                [roles, texts.take(pyarrow.array(chosen))], ["role", "content"]
            )
            table = pyarrow.table({"messages": pyarrow.ListArray.from_arrays(offsets, turns)})
            if writer is None:
                writer = pyarrow.parquet.ParquetWriter(
                    sink, table.schema, compression="snappy", use_dictionary=False
                )
            writer.write_table(table)
            if sink.tell() >= num_bytes:
                break
        writer.close()


def write_tars(folder: Path, num_samples: int) -> None:
    """Writes tars of texts of 200 bytes, and prepares them."""
    texts = [text.encode()[:200] for text in _texts(1000, 40)]
    for first in range(0, num_samples, _SAMPLES_PER_SHARD):
        with tarfile.open(folder / f"{first // _SAMPLES_PER_SHARD:04}.tar", "w") as tar:
            for number in range(first, min(num_samples, first + _SAMPLES_PER_SHARD)):
                member = tarfile.TarInfo(f"{number:08}.txt")
                text = b"%d %s" % (number, texts[number % len(texts)])
                member.size = len(text)
                tar.addfile(member, io.BytesIO(text))
    prepare = [sys.executable, "-m", "megatron.blending", "prepare", "--num-workers", "1"]
    kind = ["--sample-type", "TextSample", "--field-map", '{"text": "txt"}', str(folder)]
    subprocess.run([*prepare, *kind], check=True, stdout=subprocess.DEVNULL)
