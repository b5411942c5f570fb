"""Preparation: the files that energon 7.4.1 writes for the same archives, literally."""

import json
import os
import re
import sqlite3
import struct
from typing import Any

import pytest
import yaml

from megatron.blending.__main__ import main
from megatron.blending.energon._prepare import (
    Preparation,
    prepare_jsonl,
    prepare_webdataset,
)
from megatron.blending.formats.prepared.webdataset import open_webdataset
from tests.unit_tests.blending.archives import texts, write_folder, write_tar

TEXT: dict[str, Any] = {"sample_type": "TextSample", "field_map": {"text": "txt"}}


def content_of(folder):
    """Every file that preparation wrote but the random uuid; databases as their rows."""
    files = {}
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        if path.suffix == ".sqlite":
            with sqlite3.connect(path) as connection:
                files[name] = [
                    connection.execute(f"SELECT * FROM {t}").fetchall()
                    for t in ("samples", "sample_parts")
                ]
        elif path.is_file() and path.suffix not in (".tar", ".uuid"):
            files[name] = path.read_bytes()
    return files


def test_files_are_energons(tmp_path):
    """Literals from `energon prepare --split-ratio 3,1,1 ...` on the same archives: its users read
    ours, we theirs.
    """
    shards = {
        "sub/s_0.tar": {"a.txt": b"hello", "a.json": b"{}", "dir/b.seg.v2.txt": b"b2"},
        "sub/s_1.tar": texts("c"),
        "sub/s_11.tar": {"q.txt": b"1"},
        "sub/s_2.tar": {"r..txt": b"3", "t.": b"5"},
    }
    folder = write_folder(tmp_path, shards, split_ratio=(3, 1, 1), **TEXT)
    files = content_of(folder)
    assert files.pop(".nv-meta/.info.json").decode() == (
        '{\n  "energon_version": "7.4.1",\n  "shard_counts": {\n    "sub/s_0.tar": 2,\n    '
        '"sub/s_1.tar": 1,\n'
        '    "sub/s_11.tar": 1,\n    "sub/s_2.tar": 2\n  }\n}'
    )
    assert files.pop(".nv-meta/split.yaml").decode() == (
        "split_parts:\n  train:\n  - sub/s_{0..1}.tar\n  val:\n  - sub/s_11.tar\n  test:\n  - "
        "sub/s_2.tar\n"
        "exclude: []\n"
    )
    assert files.pop(".nv-meta/dataset.yaml").decode() == (
        "sample_type:\n  __module__: megatron.energon\n  __class__: TextSample\nfield_map:\n  "
        "text: txt\n"
    )
    assert files.pop(".nv-meta/index.sqlite") == [
        [
            *(
                (0, "a", 0, 0, 2048),
                (0, "dir/b", 1, 2048, 1024),
                (1, "c", 0, 0, 2048),
                (2, "q", 0, 0, 1024),
            ),
            *((3, "r", 0, 0, 1024), (3, "t", 1, 1024, 1024)),
        ],
        [
            *(
                (0, 0, "txt", 512, 5),
                (0, 0, "json", 1536, 2),
                (0, 1, "seg.v2.txt", 2560, 2),
                (1, 0, "txt", 512, 9),
            ),
            *(
                (1, 0, "json", 1536, 12),
                (2, 0, "txt", 512, 1),
                (3, 0, ".txt", 512, 1),
                (3, 1, "", 1536, 1),
            ),
        ],
    ]
    assert {name: struct.unpack(f"{len(raw) // 8}Q", raw) for name, raw in files.items()} == {
        "sub/s_0.tar.idx": (0, 2048, 3072),
        "sub/s_1.tar.idx": (0, 2048),
        "sub/s_11.tar.idx": (0, 1024),
        "sub/s_2.tar.idx": (0, 1024, 2048),
    }
    assert re.fullmatch(
        r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", (folder / ".nv-meta/index.uuid").read_text()
    )


def test_indexes_of_the_database(tmp_path):
    """Energon's look-ups would scan the tables without them; it asks for them by name nowhere, but
    by column.
    """
    folder = write_folder(tmp_path, {"a.tar": texts("a")}, **TEXT)
    with sqlite3.connect(folder / ".nv-meta/index.sqlite") as connection:
        names = {
            row[0]
            for row in connection.execute("SELECT name FROM sqlite_master WHERE type = 'index'")
        }
    assert names >= {"idx_samples_by_tar_and_idx", "idx_sample_parts_seq", "idx_sample_parts_full"}


def test_processes_change_nothing(tmp_path):
    """Rows and numbers must come in order of the shards, whoever is done first."""
    shards = {f"s_{n}.tar": texts(*(f"{n}-{k}" for k in range(n % 3 + 1))) for n in range(9)}
    alone = write_folder(tmp_path / "alone", shards, num_workers=0, **TEXT)
    together = write_folder(tmp_path / "together", shards, num_workers=2, **TEXT)
    assert content_of(alone) == content_of(together)


@pytest.mark.parametrize(
    ("shards", "fault"),
    [
        (
            {"a.tar": texts("x", "y"), "b.tar": texts("z", "y")},
            "key 'y' is in a.tar and in b.tar; keys must be unique",
        ),
        (
            {"a.tar": [*texts("x").items(), *texts("y").items(), ("x.jpg", b"")]},
            "key 'x' is twice in a.tar",
        ),
    ],
)
def test_duplicate_keys_are_refused_and_named(tmp_path, shards, fault):
    """Energon refuses them too: a look-up by key would give either."""
    with pytest.raises(ValueError, match=re.escape(fault)):
        write_folder(tmp_path, shards, **TEXT)
    assert os.listdir(tmp_path / ".nv-meta") == []


def test_a_failure_leaves_what_was_there(tmp_path):
    """A second preparation that fails must not take the first away."""
    folder = write_folder(tmp_path, {"a.tar": texts("x"), "b.tar": texts("y")}, **TEXT)
    before = {name: raw for name, raw in content_of(folder).items() if name.startswith(".nv-meta")}
    (folder / "b.tar").write_bytes((folder / "b.tar").read_bytes()[:700])
    with pytest.raises(
        ValueError, match=r"b\.tar: .*the file is cut; write the shard again, or pass --exclude"
    ):
        prepare_webdataset(str(folder), Preparation(force_overwrite=True, **TEXT))
    assert {
        name: raw for name, raw in content_of(folder).items() if name.startswith(".nv-meta")
    } == before
    prepare_webdataset(str(folder), Preparation(force_overwrite=True, exclude="b", **TEXT))
    assert len(open_webdataset(str(folder), split_part="train")) == 1


def test_shards_without_samples_are_left_out(tmp_path):
    """Energon fails on them; a list of shards with one of no samples cannot be sampled from."""
    for name, members in {
        "a.tar": texts("x"),
        "b.tar": {},
        "c.tar": {"none": b""},
        "d.tar": texts("y"),
    }.items():
        write_tar(tmp_path / name, members)
    done = prepare_webdataset(str(tmp_path), Preparation(**TEXT))
    assert (done.counts, done.empty_shards, done.part_names) == (
        {"a.tar": 1, "d.tar": 1},
        ["b.tar", "c.tar"],
        ["txt", "json"],
    )
    assert open_webdataset(str(tmp_path), split_part="train").find(["y"]) == {"y": 1}


@pytest.mark.parametrize(
    ("asked", "parts"),
    [
        ({}, {"train": "0123456789", "val": "", "test": ""}),
        ({"split_ratio": (8, 1, 1)}, {"train": "01234567", "val": "8", "test": "9"}),
        ({"split_ratio": (0.5, 0.25, 0.25)}, {"train": "01234", "val": "56", "test": "789"}),
        ({"split_ratio": (0, 0, 2)}, {"train": "", "val": "", "test": "0123456789"}),
        ({"split_parts": ["a:s_[0-2]", "b:s_{4,6}"]}, {"a": "012", "b": "46"}),
        ({"exclude": "[5-9]"}, {"train": "01234", "val": "", "test": ""}),
        # The order that energon's --shuffle-tars gives.
        (
            {"shuffle_tars": True, "split_ratio": (4, 3, 3)},
            {"train": "7328", "val": "569", "test": "401"},
        ),
    ],
)
def test_splits(tmp_path, asked, parts):
    """A model would be evaluated on what it was trained on."""
    for number in range(10):
        write_tar(tmp_path / f"s_{number}.tar", texts(str(number)))
    done = prepare_webdataset(str(tmp_path), Preparation(**asked))
    assert {
        part: "".join(name[2] for name in shards) for part, shards in done.split_parts.items()
    } == parts


@pytest.mark.parametrize(
    ("asked", "fault"),
    [
        ({"split_ratio": (1, 1)}, "--split-ratio must be 3 shares"),
        ({"split_ratio": (0, 0, 0)}, "--split-ratio must be 3 shares"),
        ({"split_ratio": (2, -1, 0)}, "--split-ratio must be 3 shares"),
        ({"split_parts": ["train"]}, "--split-parts must be like 'train:train/.*'"),
        ({"sample_type": "TextSampel"}, "but is 'TextSampel'; did you mean 'TextSample'?"),
        ({"field_map": {"text": "txt"}}, "--field-map needs --sample-type"),
        (
            {"sample_type": "TextSample", "field_map": {"text": "txt["}},
            "--field-map: text must be like txt",
        ),
    ],
)
def test_wrong_options_are_refused_before_anything_is_read(asked, fault):
    """An hour of indexing comes before the first use of some of them."""
    with pytest.raises(ValueError, match=re.escape(fault)):
        Preparation(**asked)


def test_index_only(tmp_path):
    """Copied data sets often lack the .idx files; split and dataset are the user's by then."""
    folder = write_folder(tmp_path, {"a.tar": texts("x"), "b.tar": texts("y")}, **TEXT)
    before = content_of(folder)
    (folder / ".nv-meta/split.yaml").write_text("split_parts: {own: [b.tar]}")
    before[".nv-meta/split.yaml"] = b"split_parts: {own: [b.tar]}"
    for name in ("a.tar.idx", "b.tar.idx", ".nv-meta/index.sqlite"):
        (folder / name).unlink()
    prepare_webdataset(str(folder), Preparation(tar_index_only=True))
    assert content_of(folder) == before
    write_tar(folder / "b.tar", texts("y", "z"))
    with pytest.raises(ValueError, match=r"b\.tar has 2 samples, but 1 when it was prepared"):
        prepare_webdataset(str(folder), Preparation(tar_index_only=True))


def test_legacy_info_is_replaced(tmp_path):
    """Two files that say different things, of which energon keeps both in step."""
    (tmp_path / ".nv-meta").mkdir()
    (tmp_path / ".nv-meta/.info.yaml").write_text("shard_counts: {old.tar: 7}")
    folder = write_folder(tmp_path, {"a.tar": texts("x")}, force_overwrite=True, **TEXT)
    assert not (folder / ".nv-meta/.info.yaml").exists()


def run(capsys, *arguments):
    code = main(["prepare", *map(str, arguments)])
    said = capsys.readouterr()
    return code, said.out, said.err


def test_command(tmp_path, capsys):
    """Energon's own command line, word for word."""
    for name in ("a.tar", "b.tar"):
        write_tar(tmp_path / name, texts(name[:1]))
    options = [
        "--non-interactive",
        "--no-progress",
        "--force-overwrite",
        "--split-ratio",
        "1,1,0",
        "--num-workers",
        "2",
    ]
    options += [
        "--sample-type",
        "TextSample",
        "--field-map",
        '{"text":"txt"}',
        "--exclude",
        "nothing",
    ]
    code, out, _ = run(capsys, *options, tmp_path)
    assert code == 0
    split = "  train: 1 shards\n  val: 1 shards\n  test: 0 shards\n"
    assert out == f"{tmp_path}: 2 samples in 2 shards\n{split}  parts: txt, json\n"
    config = yaml.safe_load((tmp_path / ".nv-meta/dataset.yaml").read_text())
    assert config == {
        "sample_type": {"__module__": "megatron.energon", "__class__": "TextSample"},
        "field_map": {"text": "txt"},
    }
    code, _, err = run(capsys, tmp_path)
    assert (code, err) == (
        1,
        f"python -m megatron.blending prepare: error: {tmp_path}: is prepared already; "
        "pass --force-overwrite to prepare it again\n",
    )
    code, _, _ = run(capsys, tmp_path, "--tar-index-only", "--no-progress")
    assert code == 0
    code, out, _ = run(
        capsys,
        tmp_path,
        "--force-overwrite",
        "--skip-dataset-yaml",
        "--split-parts",
        "own:a",
        "--no-progress",
    )
    assert code == 0
    assert yaml.safe_load((tmp_path / ".nv-meta/dataset.yaml").read_text()) == config
    assert yaml.safe_load((tmp_path / ".nv-meta/split.yaml").read_text())["split_parts"] == {
        "own": ["a.tar"]
    }


def test_command_without_a_sample_type_says_what_is_missing(tmp_path, capsys):
    """The folder cannot be read before a dataset.yaml is written."""
    write_tar(tmp_path / "a.tar", texts("a"))
    code, out, _ = run(capsys, tmp_path, "--no-progress")
    assert code == 0
    assert "dataset.yaml is to be written: pass --sample-type and --field-map" in out


@pytest.mark.parametrize(
    ("arguments", "fault"),
    [
        (["nowhere"], "nowhere: no such file or folder"),
        (["a.parquet"], "a.parquet: needs no preparation"),
        (["none"], "none: no .tar file is below it"),
        ([".", "--field-map", "{"], "--field-map is not JSON"),
        ([".", "--field-map", '{"a": 1}'], "--field-map must map fields to parts"),
        ([".", "--split-ratio", "a,b"], "--split-ratio must be 3 shares"),
        (["empty.jsonl"], "empty.jsonl: has no records"),
        (["zipped"], "zipped: a.tgz is compressed"),
        (["nosample"], "nosample: none of its 1 tar files has a sample"),
        (["typed", "--sample-type", "TextSample"], "--sample-type TextSample needs --field-map"),
    ],
)
def test_command_faults(tmp_path, capsys, monkeypatch, arguments, fault):
    """One line, no traceback, and a code that scripts see."""
    monkeypatch.chdir(tmp_path)
    for name in ("a.parquet", "empty.jsonl", "zipped/a.tgz", "none/a.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"")
    if arguments[0] == "nosample":
        write_tar(tmp_path / "nosample/a.tar", {})
    if arguments[0] == "typed":
        write_tar(tmp_path / "typed/a.tar", texts("a"))
    code, _, err = run(capsys, *arguments, "--no-progress")
    assert code == 1
    assert re.search(re.escape(fault), err)
    assert err.count("\n") == 1


def test_jsonl(tmp_path, capsys):
    """The index that energon writes for the same file."""
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"a":1}\r\n\n  \n{"b":2}\n{"c":3}')
    code, out, _ = run(capsys, path, "--no-progress")
    assert (code, out) == (0, f"{path}: 3 records indexed in {path}.idx\n")
    assert struct.unpack("4Q", (tmp_path / "a.jsonl.idx").read_bytes()) == (0, 13, 21, 28)
    assert prepare_jsonl(str(path)) == 3
    assert sorted(os.listdir(tmp_path)) == ["a.jsonl", "a.jsonl.idx"]


def test_shards_are_numbered_as_in_the_info_file(tmp_path):
    """The info file keeps the order of the shards, by which the database numbers them."""
    names = [f"{n}.tar" for n in (2, 10, 1)]
    for name in names:
        write_tar(tmp_path / name, texts(name[:-4]))
    prepare_webdataset(str(tmp_path), Preparation(**TEXT))
    info = json.loads((tmp_path / ".nv-meta/.info.json").read_text())
    assert list(info["shard_counts"]) == ["1.tar", "10.tar", "2.tar"]
    with sqlite3.connect(tmp_path / ".nv-meta/index.sqlite") as connection:
        rows = connection.execute(
            "SELECT tar_file_id, sample_key FROM samples ORDER BY 1"
        ).fetchall()
    assert rows == [(0, "1"), (1, "10"), (2, "2")]
