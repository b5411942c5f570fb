"""Prepared folders: any sample by index, the right one, whatever index files there are."""

import os
import pickle
import sqlite3
import tarfile
from contextlib import closing
from functools import lru_cache

import numpy as np
import pytest

from megatron.blending.energon._encoding.decode import decode_part
from megatron.blending.formats.prepared import webdataset
from megatron.blending.formats.prepared.shard import open_shard
from megatron.blending.formats.prepared.webdataset import open_webdataset
from megatron.blending.formats.record import RecordError
from tests.unit_tests.blending.archives import texts, write_folder, write_tar

SHARDS = {
    "s/a_0.tar": texts("a", "d/b", "c"),
    "s/a_1.tar": texts("e"),
    "s/a_2.tar": texts("f", "g"),
}
KEYS = ["a", "d/b", "c", "e", "f", "g"]


@pytest.fixture
def folder(tmp_path):
    return write_folder(
        tmp_path / "data", SHARDS, sample_type="TextSample", field_map={"text": "txt"}
    )


def opened(folder, **options):
    return open_webdataset(str(folder), **{"split_part": "train", **options})


def keys(dataset):
    return [record["__key__"] for record in dataset.read(range(len(dataset)))]


def set_split(folder, text):
    (folder / ".nv-meta" / "split.yaml").write_text(text)


def test_reads_any_sample(folder):
    """Records in another order than asked for would be indistinguishable from a shuffle."""
    dataset = opened(folder)
    assert len(dataset) == 6
    assert dataset[1] == {
        "__key__": "d/b",
        "__shard__": "s/a_0.tar",
        "txt": b"text of d/b",
        "json": b'{"key": "d/b"}',
    }
    assert [record["__key__"] for record in dataset.read([5, 0, 3, 3, 1])] == [
        "g",
        "a",
        "e",
        "e",
        "d/b",
    ]
    assert dataset.read([]) == []
    assert [dataset[i]["__key__"] for i in range(6)] == KEYS
    assert dataset.describe(4) == f"{folder}/s/a_2.tar sample 0"
    for wrong in (-1, 6):
        with pytest.raises(IndexError, match=rf"index must be in range\(6\), but is {wrong}"):
            dataset.read([0, wrong])


def test_fields_are_as_dataset_yaml_says(folder):
    """The sample class is given exactly its fields."""
    dataset = opened(folder)
    assert dataset.fields(dataset[3], decode_part) == {"__key__": "e", "text": "text of e"}
    (folder / ".nv-meta" / "crude.yaml").write_text(
        "__class__: CrudeWebdataset\nsubflavors: {kind: test}\n"
    )
    crude = opened(folder, dataset_config="crude.yaml")
    expected = {"__key__": "e", "__shard__": "s/a_1.tar", "txt": "text of e", "json": {"key": "e"}}
    assert crude.fields(crude[3], decode_part) == expected
    assert crude.subflavors == {"kind": "test"}


def test_part_filter(folder):
    """A crude data set of texts and videos, of which only the texts are wanted."""
    (folder / ".nv-meta" / "crude.yaml").write_text(
        "__class__: CrudeWebdataset\npart_filter: [json]\n"
    )
    assert opened(folder, dataset_config="crude.yaml")[3] == {
        "__key__": "e",
        "__shard__": "s/a_1.tar",
        "json": b'{"key": "e"}',
    }


def test_code_is_run_only_when_allowed(folder, tmp_path):
    """A data set from elsewhere would run its author's code on every rank."""
    witness = tmp_path / "was_run"
    (folder / ".nv-meta" / "l.py").write_text(
        f"open({str(witness)!r}, 'w').close()\n"
        "def sample_loader(raw): return {'text': raw['txt'].upper() + str(sorted(raw))}\n"
        "def parts(name): return name == 'txt'\n"
    )
    (folder / ".nv-meta" / "code.yaml").write_text(
        "sample_type: {__class__: TextSample}\nsample_loader: l.py\npart_filter: l.py:parts\n"
    )
    with pytest.raises(
        ValueError,
        match=r"code\.yaml:1: names Python code, l\.py, which is not run; .*allow_code=True",
    ):
        opened(folder, dataset_config="code.yaml")
    assert not witness.exists()
    dataset = opened(folder, dataset_config="code.yaml", allow_code=True)
    expected = {"__key__": "e", "text": "TEXT OF E['__key__', '__shard__', 'txt']"}
    assert dataset.fields(dataset[3], decode_part) == expected
    again = pickle.loads(pickle.dumps(dataset))
    assert again.fields(again[3], decode_part) == expected
    (folder / ".nv-meta" / "code.yaml").write_text(
        "sample_type: {__class__: A}\nsample_loader: l.py:nothing\n"
    )
    with pytest.raises(ValueError, match="has no function 'nothing'"):
        opened(folder, dataset_config="code.yaml", allow_code=True)


def test_excluded_shards_and_samples_have_no_index(folder):
    """Bad samples that users found are listed there, often while a run goes on with the rest."""
    set_split(
        folder,
        "split_parts: {train: ['s/a_{0..2}.tar']}\nexclude: [s/a_1.tar, s/a_0.tar/d/b, "
        "s/a_2.tar/f]\n",
    )
    dataset = opened(folder)
    assert keys(dataset) == ["a", "c", "g"]
    assert [dataset[i]["__key__"] for i in (2, 1, 0)] == ["g", "c", "a"]
    assert dataset.find(["a", "d/b", "c", "e", "f", "g"]) == {"a": 0, "c": 1, "g": 2}
    assert dataset.describe(1) == f"{folder}/s/a_0.tar sample 2"
    set_split(folder, "split_parts: {train: ['s/a_0.tar']}\nexclude: [s/a_0.tar/z]\n")
    with pytest.warns(UserWarning, match=r"1 excluded samples are not in s/a_0\.tar"):
        assert len(opened(folder)) == 3


def test_a_part_without_samples_is_refused(folder):
    """A validation set that is empty evaluates to nothing, silently."""
    for split in (
        "split_parts: {train: []}",
        "split_parts: {train: [s/a_1.tar]}\nexclude: [s/a_1.tar/e]",
    ):
        set_split(folder, split)
        with pytest.raises(ValueError, match=r"data: split 'train' has no samples; name another"):
            opened(folder)


def test_find_by_key(folder):
    """Joins and media stores ask by key; a key of another part is not of this one."""
    set_split(folder, "split_parts: {train: [s/a_2.tar, s/a_0.tar], val: [s/a_1.tar]}")
    dataset = opened(folder)
    assert dataset.find(["f", "c", "e", "nowhere"]) == {"f": 0, "c": 4}
    assert dataset.find([]) == {}
    assert dataset.find([f"none {n}" for n in range(1200)] + ["a"]) == {"a": 2}
    with closing(sqlite3.connect(folder / ".nv-meta/index.sqlite")) as index, index:
        for key, number in (
            ("c", 25),
            ("f", -1),
        ):  # of no sample: one of the next file, or an IndexError
            index.execute("UPDATE samples SET sample_index = ? WHERE sample_key = ?", (number, key))
    assert dataset.find(["a", "c", "f"]) == {"a": 2}
    (folder / ".nv-meta" / "index.sqlite").unlink()
    with pytest.raises(
        ValueError, match=r"cannot be found by key without a local \.nv-meta/index\.sqlite"
    ):
        opened(folder).find(["a"])


def test_no_index_file_is_needed_but_missed(folder):
    """Data sets whose tar.idx was not copied."""
    for path in (folder / "s").glob("*.idx"):
        path.unlink()
    with pytest.warns(
        UserWarning, match=r"a_[0-2]\.tar\.idx: is not there; the archive is read through instead"
    ):
        assert keys(opened(folder)) == KEYS


@pytest.mark.parametrize(
    ("offsets", "fault"),
    [
        ([0, 2048, 4096], "has 2 samples instead of 3"),
        ([0, 2048, 4096, 60000], "goes beyond its end, byte 60000"),
        ([0, 2048, 90000, 6144], "goes beyond its end, byte 6144"),
        ([0, 2048, 4096, 5120], "ends at byte 5120, but the archive continues"),
    ],
)
def test_stale_index_is_seen_and_not_used(folder, offsets, fault):
    """Shards that were written again: neighbouring samples would be joined, or memory read that is
    not there.
    """
    (folder / "s" / "a_0.tar.idx").write_bytes(np.array(offsets, np.uint64).tobytes())
    with pytest.warns(UserWarning, match=rf"a_0\.tar\.idx: {fault}"):
        assert keys(opened(folder)) == KEYS


def test_offsets_between_samples_are_an_error_of_the_record(folder):
    """Whatever the index file says, a record is a whole sample, or an error that names its
    place."""
    (folder / "s" / "a_0.tar.idx").write_bytes(np.array([0, 1536, 4096, 6144], np.uint64).tobytes())
    records = opened(folder).read([0, 1, 2])
    for number in (0, 1):
        assert isinstance(records[number], RecordError)
        assert str(records[number]).startswith(f"{folder}/s/a_0.tar sample {number}: ")
    assert records[2]["__key__"] == "c"
    with pytest.raises(RecordError, match="sample 1"):
        opened(folder)[1]


@pytest.mark.filterwarnings("ignore:.*a_0")
def test_shards_that_changed_are_refused(folder):
    """The numbers of samples say which index is in which shard: one that grew would shift nothing,
    and be lost.
    """
    write_tar(folder / "s/a_0.tar", texts("a", "b"))
    dataset = opened(folder)
    with pytest.raises(ValueError, match=r"a_0\.tar: has 2 samples, but 3 when it was prepared"):
        dataset.read([0])


@pytest.mark.filterwarnings("ignore:.*a_0")
def test_cut_shard_is_refused(folder):
    """A download that broke off."""
    path = folder / "s/a_0.tar"
    os.truncate(path, 5000)
    dataset = opened(folder)
    with pytest.raises(ValueError, match=r"a_0\.tar: .* the file is cut"):
        dataset.read([0])


def test_opening_opens_no_shard(folder):
    """Ten thousand shards on a network file system take minutes to open, on every rank at once."""
    for path in (folder / "s").iterdir():
        path.unlink()
    dataset = opened(folder)
    assert len(dataset) == 6
    with pytest.raises(ValueError, match=r"a_0\.tar: cannot be opened: No such file"):
        dataset.read([0])


def test_files_replaced_after_opening_are_seen_by_the_next_who_opens(folder):
    """What is kept of a shard would otherwise be used for another of its name."""
    assert keys(opened(folder)) == KEYS
    replaced = {**SHARDS, "s/a_1.tar": texts("new")}
    write_folder(folder, replaced, force_overwrite=True)
    assert keys(opened(folder)) == ["a", "d/b", "c", "new", "f", "g"]


def test_pickled_small_and_read_by_forked_processes(folder):
    """Workers would be sent shards, or share what they must not."""
    dataset = opened(folder)
    assert keys(dataset) == KEYS
    sent = pickle.dumps(dataset)
    assert len(sent) < 2000
    assert keys(pickle.loads(sent)) == KEYS
    child = os.fork()
    if child == 0:
        os._exit(0 if all(keys(dataset) == KEYS for _ in range(30)) else 1)
    assert all(keys(dataset) == KEYS for _ in range(30))
    assert os.waitpid(child, 0)[1] == 0


def test_fingerprint(folder, tmp_path):
    """A run resumed on other data would go on as if nothing had happened; one on moved data would
    be refused.
    """
    before = opened(folder).fingerprint()
    assert len(before) == 32
    moved = folder.rename(tmp_path / "moved")
    assert opened(moved).fingerprint() == before
    set_split(moved, "split_parts: {train: [s/a_1.tar, s/a_0.tar, s/a_2.tar]}")
    assert opened(moved).fingerprint() != before
    set_split(moved, "split_parts: {train: ['s/a_{0..2}.tar']}\nexclude: [s/a_0.tar/a]")
    assert opened(moved).fingerprint() != before
    changed = {**SHARDS, "s/a_1.tar": {"e.txt": b"text of E", "e.json": b'{"key": "e"}'}}
    write_folder(moved, changed, force_overwrite=True)
    assert opened(moved).fingerprint() != before


def test_url(folder):
    """The same records from object storage."""
    system = pytest.importorskip("fsspec").filesystem("memory")
    system.put(str(folder), "/web", recursive=True)
    dataset = open_webdataset("memory://web", split_part="train")
    local = opened(folder)
    everything = [3, 0, 5, 1]
    assert dataset.read(everything) == local.read(everything)
    assert dataset.fields(dataset[3], decode_part) == {"__key__": "e", "text": "text of e"}
    assert dataset.fingerprint() == local.fingerprint()
    for name in ("/web/s/a_0.tar.idx", "/web/s/a_1.tar.idx", "/web/s/a_2.tar.idx"):
        system.rm(name)
    with pytest.warns(UserWarning, match="is not there"):
        assert keys(open_webdataset("memory://web", split_part="train")) == KEYS
    system.rm("/web", recursive=True)


def test_many_shards_stay_within_the_limit_of_maps(folder, monkeypatch):
    """The least recently read shard must go, and come back when it is asked for."""
    monkeypatch.setattr(webdataset, "open_local_shard", lru_cache(1)(open_shard))
    dataset = opened(folder)
    assert [record["__key__"] for record in dataset.read([0, 5, 1, 4, 3, 2])] == [
        "a",
        "g",
        "d/b",
        "f",
        "e",
        "c",
    ]


@pytest.mark.parametrize(
    "archive_format", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT]
)
def test_long_names(tmp_path, archive_format):
    """Keys with folders are often longer than a header has room for."""
    key = "a" * 70 + "/" + "b" * 70
    write_tar(tmp_path / "x.tar", texts("first", key, "last"), archive_format)
    folder = write_folder(tmp_path, {}, sample_type="CrudeWebdataset")
    dataset = opened(folder)
    assert keys(dataset) == ["first", key, "last"]
    assert dataset[1]["txt"] == b"text of " + key.encode()
    set_split(folder, f"split_parts: {{train: [x.tar]}}\nexclude: [x.tar/{key}]")
    assert keys(opened(folder)) == ["first", "last"]
