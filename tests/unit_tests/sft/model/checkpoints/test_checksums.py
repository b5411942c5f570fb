"""Checksums of a checkpoint's files: what is damaged, missing or foreign is named."""

import json
import os
import zlib

import pytest

from megatron.sft.model.checkpoints.checksums import (
    CHECKSUMS,
    faults_in,
    file_names,
    read_checksums,
    sum_of,
)
from tests.unit_tests.sft.model.checkpoints.small_checkpoints import checkpoint, flip


def faults(path):
    sums = read_checksums(path)
    assert sums is not None
    return faults_in(path, sorted({*sums, *file_names(path)}), sums)


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (flip, "is damaged"),
        (lambda file: os.truncate(file, 99), "has 99 bytes, but "),
        (lambda file: file.unlink(), "is missing"),
    ],
)
@pytest.mark.parametrize("name", ["__0_0.distcp", ".metadata", "huggingface/config.json"])
def test_damage_is_named(tmp_path, name, damage, told):
    """Three of ten flipped bits load without a word, as other weights."""
    path = checkpoint(tmp_path, 5)
    assert faults(path) == []
    damage(path / name)
    (fault,) = faults(path)
    assert str(path / name) in fault
    assert told in fault


def test_a_foreign_file_is_named(tmp_path):
    """A shard of another checkpoint beside the others may be read instead of one of them."""
    path = checkpoint(tmp_path, 5)
    (path / "__1_0.distcp").write_text("of another run")
    assert faults(path) == [f"{path}/__1_0.distcp was not saved with this checkpoint"]


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"crc32": 5}', '{"crc32": {"a": 5}}', '{"crc32": {"a": [1]}}', "\xff"]
)
def test_damaged_checksums_are_an_error(tmp_path, text):
    """Read as none, they would let everything pass."""
    path = checkpoint(tmp_path, 5)
    (path / CHECKSUMS).write_text(text, encoding="latin-1")
    with pytest.raises(ValueError, match=CHECKSUMS):
        read_checksums(path)
    (path / CHECKSUMS).unlink()
    assert read_checksums(path) is None  # of a version that wrote none


def test_checksums_are_json(tmp_path):
    """Other tools may want to read them."""
    path = checkpoint(tmp_path, 5)
    found = json.loads((path / CHECKSUMS).read_text())["crc32"]
    assert found["__0_0.distcp"] == [12_000, sum_of(path / "__0_0.distcp").crc]


@pytest.mark.parametrize(
    "forged",
    [
        {},
        {"../common.pt": [1, 2]},
        {"/etc/passwd": [1, 2]},
        {"common.pt": None},
        {"common.pt": [1.5, 2]},
        {"common.pt": [1, 2, 3]},
        {"common.pt": [True, 2]},
        [],
    ],
)
def test_forged_checksums_are_refused(tmp_path, forged):
    """Of none at all the checkpoint passed as one of an earlier version, unchecked; others named
    files elsewhere. Python's own words ("'crc32'") say nothing of the file.
    """
    said = r"checksums\.json must hold the sizes and checksums of the checkpoint's files: (it|of) "
    for content in ({"crc32": forged}, forged):
        (tmp_path / CHECKSUMS).write_text(json.dumps(content))
        with pytest.raises(ValueError, match=said):
            read_checksums(tmp_path)


def test_sums_are_those_of_zlib(tmp_path):
    """Checkpoints of before would be called damaged."""
    content = bytes(range(256)) * 3_000 + b"end"
    (tmp_path / "file").write_bytes(content)
    assert sum_of(tmp_path / "file") == (len(content), zlib.crc32(content))
