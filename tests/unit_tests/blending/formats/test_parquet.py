"""Rows of Parquet files: the right ones, and each row group decoded no more often than it must."""

import itertools
import json
import os
import pickle
import signal
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron.blending import BlendDataset, RepeatDataset, SourceDataset
from megatron.blending.formats import parquet
from megatron.blending.formats.json_forms import TableForms
from megatron.blending.formats.record import planned_read, read_records
from megatron.blending.formats.source_part import SourcePart
from megatron.blending.formats.sources import open_source
from megatron.blending.loading.chunk_loader import ChunkLoader
from megatron.blending.streams.chunk import ChunkDataset
from tests.unit_tests.blending.folders import write_parquet
from tests.unit_tests.blending.number_streams import config, loaders

pyarrow = pytest.importorskip("pyarrow")
pytest.importorskip("pyarrow.parquet")

CALLS = Path(__file__).parents[3] / "fixtures" / "released" / "datasets"


@pytest.fixture
def decoded(monkeypatch):
    """The row groups that are decoded: (first value of it, number of the row group)."""
    found = []
    decode = pyarrow.parquet.ParquetFile.read_row_group

    def noted_decode(self, row_group, **options):
        table = decode(self, row_group, **options)
        found.append((table["id"][0].as_py(), row_group))
        return table

    monkeypatch.setattr(pyarrow.parquet.ParquetFile, "read_row_group", noted_decode)
    return found


@pytest.fixture
def no_room(monkeypatch):
    """A process keeps one row group, as if each were of 256 MB."""
    monkeypatch.setattr(parquet, "_DECODED", parquet._ByteCache(most_bytes=1))


def rows_of(name, count):
    return [{"id": f"{name} {row}", "turns": [{"n": row}] * 2} for row in range(count)]


def opened(folder, name, count, group):
    return open_source(write_parquet(folder / f"{name}.parquet", rows_of(name, count), group))


def test_parquet_rows_across_row_groups(tmp_path, monkeypatch):
    """A wrong border of row groups, or an evicted one that is looked up, would give another row
    than asked for.
    """
    monkeypatch.setattr(parquet, "_DECODED", parquet._ByteCache(most_bytes=300))
    rows = [{"id": i, "messages": [{"role": "user", "content": str(i)}]} for i in range(10)]
    source = open_source(write_parquet(tmp_path / "x.parquet", rows, row_group_size=3))
    order = [9, 0, 3, 2, 6, 8, 1, 5, 4, 7, 0]
    assert [source[i] for i in order] == [rows[i] for i in order]
    assert source.describe(5) == f"{tmp_path / 'x.parquet'} row 5"


def test_cells_of_json(tmp_path):
    """Taken for strings, schemas of tools stood as JSON within JSON in the prompt, in silence."""
    rows = [json.loads(line) for line in (CALLS / "calls.jsonl").read_text().splitlines()]
    source = open_source(str(CALLS / "calls.parquet"))
    assert source.read(range(4)) == [source[row] for row in range(4)] == rows
    schema = pyarrow.parquet.read_schema(CALLS / "calls.parquet")
    json_type = schema.field("messages").type.value_type
    texts = pyarrow.array(["{}", "{", None])
    cells = texts.cast(json_type)
    path = tmp_path / "broken.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"json": cells, "text": texts}), path)
    assert open_source(str(path)).read([0, 2]) == [
        {"json": {}, "text": "{}"},
        {"json": None, "text": None},
    ]
    (error,) = read_records(open_source(str(path)), [1])
    assert str(error).startswith(f"{path} row 1: cannot be read: JSONDecodeError: ")


def test_cells_of_json_by_the_metadata_of_a_field():
    """Releases of pyarrow before 19 read them as strings, and leave the type's name there."""
    marked = pyarrow.field(
        "element", pyarrow.string(), metadata={"ARROW:extension:name": "arrow.json"}
    )
    nested = pyarrow.struct([("name", pyarrow.string()), ("parts", pyarrow.large_list(marked))])
    forms = TableForms(pyarrow.schema([("tool", nested), ("n", pyarrow.int8())]))
    row = {"tool": {"name": "{}", "parts": ['{"a": null}', None, "3"]}, "n": 1}
    assert forms.convert(row) == {"tool": {"name": "{}", "parts": [{"a": None}, None, 3]}, "n": 1}


def test_row_groups_are_decoded_once_while_there_is_room(tmp_path, decoded):
    """In random order each row cost the decoding of its row group: 885 microseconds for 10."""
    rows = [{"id": i, "text": str(i) * 10} for i in range(60)]
    sources = [
        open_source(write_parquet(tmp_path / name, rows, row_group_size=3))
        for name in ("a.parquet", "b.parquet")
    ]
    order = [7 * place % 60 for place in range(60)]
    for source in sources:
        assert [source[i] for i in order] == [rows[i] for i in order]
    assert len(decoded) == 2 * 20
    copy = pickle.loads(pickle.dumps(sources[0]))  # in another process it has nothing yet
    assert copy[0] == rows[0]
    assert len(decoded) == 41


def test_large_row_groups_are_told(tmp_path, monkeypatch):
    """Training would wait for data, by seconds for each sample, and nobody knew why."""
    monkeypatch.setattr(parquet, "_CACHED_BYTES", 1000)
    monkeypatch.setattr(parquet, "_LARGE_ROW_GROUP", 1000)
    path = write_parquet(tmp_path / "a.parquet", [{"id": i} for i in range(900)], 900)
    with pytest.warns(UserWarning, match=r"a\.parquet: has row groups of .* row_group_size=1000"):
        open_source(path)


def blend(folder):
    """Two files, of which one in two parts, and a source that draws with replacement."""
    first, second = opened(folder, "a", 90, 15), opened(folder, "b", 60, 20)
    sources = [
        SourceDataset(first, name="a"),
        SourceDataset(SourcePart(second, range(7, 33)), name="b"),
        SourceDataset(SourcePart(second, range(33, 60)), name="c", shuffle=False),
        SourceDataset(opened(folder, "d", 30, 10), name="d", multiplier=-1),
    ]
    return BlendDataset(*((RepeatDataset(source), 1 + at) for at, source in enumerate(sources)))


@pytest.mark.usefixtures("no_room")
def test_a_plan_decodes_each_row_group_once(tmp_path, decoded, monkeypatch):
    """A file of 400 MB in random order cost a row group for each sample: 260 microseconds for
    50.
    """
    monkeypatch.setattr("megatron.blending.loading.chunk_loader._FIRST_SAMPLES", 100)
    monkeypatch.setattr("megatron.blending.loading.chunk_loader._MAX_SAMPLES", 100)
    chunks = ChunkDataset(blend(tmp_path), 4)

    def made(num_chunks, num_given=0):
        loader = ChunkLoader(chunks, config(), num_given=num_given)
        return list(itertools.islice(loader, num_chunks))

    plans = []
    for plan in range(4):
        decoded.clear()
        plans.append(made(25, 25 * plan))
        # The parts of b are two sources, each with a plan of its own.
        assert max(Counter(decoded).values()) <= 2
        assert len(decoded) <= 6 + 3 + 3 + 3
    # One loader has the same plans, one after the other.
    decoded.clear()
    whole = made(100)
    assert whole == list(itertools.chain(*plans))
    assert 40 < len(decoded) <= 4 * 15
    assert made(10, num_given=37) == whole[37:47]
    ids = Counter(sample["id"] for chunk in whole for sample in chunk)
    # 400 samples: 80 of 26 rows, then 120 of 27.
    counts = [ids[f"b {row}"] for row in range(60)]
    assert counts[:7] == [0] * 7
    assert set(counts[7:33]) == {3, 4}
    assert set(counts[33:]) == {4, 5}
    assert all(sample["turns"][1]["n"] == int(sample["id"][2:]) for c in whole for sample in c)


@pytest.mark.usefixtures("no_room")
def test_loaders_of_energon_decode_each_row_group_once(tmp_path, decoded):
    """They plan in a loop of their own."""
    dataset = RepeatDataset(SourceDataset(opened(tmp_path, "a", 120, 10), name="a"))
    (loader,) = loaders(dataset)
    samples = list(itertools.islice(loader, 240))  # of the first plan's 2,048
    assert sorted(sample["id"] for sample in samples[:120]) == sorted(
        row["id"] for row in rows_of("a", 120)
    )
    assert len(decoded) == 12


def test_a_wrapper_of_a_source_keeps_its_own_read(tmp_path):
    """Its changes of records would be lost where it passes on all other attributes."""

    class Changed:
        def __init__(self, source):
            self.source = source

        def __len__(self):
            return len(self.source)

        def __getattr__(self, name):
            return getattr(self.source, name)

        def read(self, indices):
            return [record["id"] for record in self.source.read(indices)]

    wrapped = Changed(opened(tmp_path, "a", 9, 3))
    for source in (wrapped, SourcePart(wrapped, range(9))):
        (loader,) = loaders(SourceDataset(source, shuffle=False))
        assert list(loader) == [f"a {row}" for row in range(9)]


@pytest.mark.usefixtures("no_room")
def test_rows_that_the_plan_has_twice_or_not_at_all(tmp_path, decoded):
    """Drawn with replacement, or asked for by another caller: any row is read, as an object of its
    own.
    """
    source = opened(tmp_path, "a", 30, 10)
    read: Any = planned_read(source, [25, 3, 25, 7, 3])
    (first,), (other,) = read([3]), read([12])
    assert [first["id"], other["id"]] == ["a 3", "a 12"]
    first["turns"].clear()
    assert read([7, 3, 4]) == [rows_of("a", 30)[row] for row in (7, 3, 4)]
    assert len(decoded) == 3, "row 4 is not planned"
    assert read([25]) == [rows_of("a", 30)[25]]
    source.read([0])
    del decoded[:]
    assert read([25]) == [rows_of("a", 30)[25]]
    assert not decoded
    assert [row["id"] for row in read(list(range(29, -1, -1)))] == [
        f"a {row}" for row in range(29, -1, -1)
    ]
    with pytest.raises(IndexError, match=r"range\(30\), but is 30"):
        read([30])
    nothing = write_parquet(tmp_path / "null.parquet", [{"id": None}] * 4, 2)  # rows of no bytes
    assert planned_read(open_source(nothing), [3, 1])([3, 1]) == [{"id": None}] * 2
    part: Any = planned_read(SourcePart(source, range(10, 30)), [0, 15, 1])
    assert [row["id"] for row in part([15, 0, 3])] == ["a 25", "a 10", "a 13"]
    with pytest.raises(IndexError, match=r"range\(20\), but is 20"):
        part([20])


@pytest.mark.usefixtures("no_room")
def test_a_plan_keeps_no_more_than_its_bytes(tmp_path, monkeypatch, decoded):
    """Images of a megabyte, 32,768 of them planned, would fill the memory of each worker."""
    monkeypatch.setattr(parquet, "_PLANNED_BYTES", 5000)
    rows = [{"id": row, "image": bytes([row % 251]) * 20_000} for row in range(200)]
    source = open_source(write_parquet(tmp_path / "a.parquet", rows, 10))
    order = np.random.default_rng(0).permutation(200).tolist()
    before = pyarrow.total_allocated_bytes()
    read, most = planned_read(source, order), 0
    for row in order:
        assert read([row]) == [rows[row]]
        most = max(most, pyarrow.total_allocated_bytes() - before)
    # 200 rows of 20 kB planned, of which a quarter is kept, and two row groups of ten rows.
    assert 0.8e6 < most < 1e6 + 2 * 0.3e6
    # 2.5 rows of each of 20 row groups at a time. Rows that wait for long would leave no room for
    # those that are read soon: 147 row groups.
    assert len(decoded) < 110
    del read
    assert pyarrow.total_allocated_bytes() - before < 0.3e6, "a plan's rows go with it"


def test_threads_keep_count_of_bytes():
    """A count that drifts would fill the memory, or keep nothing."""
    kept: parquet._ByteCache[int, None] = parquet._ByteCache(most_bytes=300)

    def add(seed):
        for key in np.random.default_rng(seed).integers(0, 20, 10_000).tolist():
            kept.add(key, None, key + 1)
            assert kept.get(-1) is None

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(8) as threads:
            list(threads.map(add, range(8)))
    finally:
        sys.setswitchinterval(interval)
    assert kept._num_bytes == sum(num_bytes for _, num_bytes in kept._held.values())


def test_a_forked_process_does_not_wait_for_threads_of_its_parent(tmp_path):
    """Workers are forked while the trainer's threads read: one would hang at its first sample."""
    source = opened(tmp_path, "a", 20, 5)
    with parquet._DECODED._lock:  # as held by a thread that does not exist in the child
        child = os.fork()
        if not child:
            signal.alarm(5)
            os._exit(source[7]["id"] != "a 7")
    assert os.waitpid(child, 0)[1] == 0
