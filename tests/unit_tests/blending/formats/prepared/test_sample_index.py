"""The database of keys."""

import os
import pickle
import sqlite3
import threading

import pytest

from megatron.blending.formats.prepared.nv_meta import FOLDER, SQLITE
from megatron.blending.formats.prepared.sample_index import (
    DuplicateKeyError,
    SampleIndex,
    SampleIndexWriter,
)
from megatron.blending.formats.prepared.tar import Part, TarSample, TarScan


def scan(*keys):
    samples = [
        TarSample(key, 1024 * number, [Part("txt", 1024 * number + 512, 3)])
        for number, key in enumerate(keys)
    ]
    return TarScan(samples, 1024 * len(keys))


def write(root, *scans):
    (root / FOLDER).mkdir(parents=True, exist_ok=True)
    with SampleIndexWriter(str(root / FOLDER / SQLITE)) as index:
        for number, one in enumerate(scans):
            index.add(number, one)
    return str(root)


@pytest.mark.parametrize("folder", ["plain", "with space", "odd%20?#name"])
def test_finds_what_was_written(tmp_path, folder):
    """Paths of databases are URLs to sqlite: odd names would open another file, or make an empty
    one.
    """
    root = write(tmp_path / folder, scan("a", "b/c"), scan("é", "\udcff"))
    assert SampleIndex(root).find(["é", "b/c", "nowhere", "\udcff"]) == {
        "b/c": (0, 1),
        "é": (1, 0),
        "\udcff": (1, 1),
    }


def test_duplicates_name_both_shards(tmp_path):
    """A user must know which two files to look at."""
    with pytest.raises(DuplicateKeyError, match="key 'b' exists twice") as caught:
        write(tmp_path, scan("a", "b"), scan("c"), scan("d", "b"))
    assert (caught.value.key, caught.value.shard_ids) == ("b", (0, 2))
    with pytest.raises(DuplicateKeyError) as caught:
        write(tmp_path, scan("a"), scan("b", "c", "b"))
    assert (caught.value.key, caught.value.shard_ids) == ("b", (1, 1))


def test_a_failure_leaves_the_old_index(tmp_path):
    """Readers of other runs use it."""
    root = write(tmp_path, scan("a"))
    with pytest.raises(DuplicateKeyError):
        write(tmp_path, scan("b", "b"))
    assert SampleIndex(root).find(["a", "b"]) == {"a": (0, 0)}
    assert [path.name for path in (tmp_path / FOLDER).iterdir()] == [SQLITE]


def test_one_connection_for_many_questions(tmp_path, monkeypatch):
    """A store of media asks for one file at a time: a database opened for each took 179
    microseconds, three times what energon's took.
    """
    index = SampleIndex(write(tmp_path, scan("a", "b")))
    connected = []
    connect = sqlite3.connect

    def noted_connect(*arguments, **options):
        connected.append(arguments)
        return connect(*arguments, **options)

    monkeypatch.setattr(sqlite3, "connect", noted_connect)
    assert [index.find([key]) for key in "ab"] == [{"a": (0, 0)}, {"b": (0, 1)}]
    assert len(connected) == 1
    found = []
    thread = threading.Thread(target=lambda: found.append(index.find(["a"])))
    thread.start()
    thread.join()
    assert found == [{"a": (0, 0)}]
    assert len(connected) == 2
    reader, writer = os.pipe()
    if os.fork() == 0:
        is_right = index.find(["b"]) == {"b": (0, 1)}
        os.write(writer, bytes([is_right, len(connected)]))
        os._exit(0)
    assert os.read(reader, 2) == bytes([True, 3])
    assert pickle.loads(pickle.dumps(index)).find(["b"]) == {"b": (0, 1)}
