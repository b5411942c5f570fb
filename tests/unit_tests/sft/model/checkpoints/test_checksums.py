"""Checksums of a checkpoint's files: what is damaged, missing or foreign is named."""

import json
import os
import random
import zlib

import pytest

from megatron.sft.model.checkpoints import checksums
from megatron.sft.model.checkpoints.checksums import (
    CHECKSUMS,
    crc32,
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


@pytest.mark.parametrize("is_compiled", [True, False])
def test_sums_are_those_of_zlib(monkeypatch, is_compiled):
    """Other sums would call every checkpoint damaged that was written without the compiled core,
    before it was there, or on another processor.
    """
    if not is_compiled:
        monkeypatch.setattr(checksums, "_COMPILED", None)
    elif checksums._COMPILED is None:
        pytest.skip("megatron.sft.model.checkpoints._core is not built, or not for this processor")
    numbers = random.Random(1)
    lengths = [*range(70), *range(1000, 1160), 4096, 99_999]
    content = memoryview(numbers.randbytes(max(lengths) + 16))  # which cannot be written to
    for length in lengths:
        before, start = numbers.choice([0, 0xFFFFFFFF, numbers.getrandbits(32)]), length % 16
        data = content[start : start + length]
        assert crc32(data, before) == zlib.crc32(data, before)


def test_every_changed_bit_changes_the_sum():
    """A bit that no step of the compiled sum reads would be damage that nobody sees."""
    content = bytearray(random.Random(2).randbytes(1_100))
    sums = {crc32(memoryview(content))}
    for bit in range(8 * len(content)):
        content[bit // 8] ^= 1 << bit % 8
        sums.add(crc32(memoryview(content)))
        content[bit // 8] ^= 1 << bit % 8
    assert len(sums) == 1 + 8 * len(content)
