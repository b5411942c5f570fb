"""Fingerprints of files, and what ranks say of those that differ."""

import os

import pytest

from megatron.sft.agreement import differences
from megatron.sft.data.datasets import build_datasets
from megatron.sft.preflight import read_files
from megatron.sft.preflight.read_files import fingerprint_of, fingerprints
from tests.unit_tests.sft.command_line import BASE, parse
from tests.unit_tests.sft.texts import text_line

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


def test_fingerprints_are_of_content_alone(tmp_path, monkeypatch):
    """Copies differ in their times, and revisions of a model in anything but their sizes."""
    monkeypatch.setattr(read_files, "_SMALL", 1 << 20)
    for size in (1000, 1 << 20, 3 << 20):
        path, copy = tmp_path / "a.safetensors", tmp_path / "b.safetensors"
        content = (20_000).to_bytes(8, "little") + os.urandom(size)
        path.write_bytes(content)
        copy.write_bytes(content)
        os.utime(copy, (1, 1))
        own = fingerprint_of(path)
        assert fingerprint_of(copy) == own
        assert own.startswith(f"{len(content):,} bytes (")
        for place in (8, min(size, 19_000), len(content) - 1):  # the header's, and the last one
            copy.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
            assert fingerprint_of(copy) != own
    assert fingerprint_of(tmp_path / "c") == "missing"


def test_differences_name_what_is_other_where():
    """A run of 64 ranks would be told of 63 of them, or of none that can be found."""
    same = {"the data a": "1", "--lr": 0.1}
    assert differences([same] * 4) == []
    other = {**same, "--lr": 0.2}
    assert differences([same, other, same, other, other, {"--lr": 0.3}]) == [
        "the data a is not read on rank 5, but 1 on rank 0",
        "--lr is 0.2 on ranks 1, 3-4, but 0.1 on rank 0",
        "--lr is 0.3 on rank 5, but 0.1 on rank 0",
    ]


def test_what_is_continued_is_compared(tmp_path, write_lines):
    """A tracker with another step on one machine mixes two checkpoints; checksums of another save
    pass each its own.
    """
    data = write_lines("a.jsonl", *[text_line(f"text {number}") for number in range(10)])
    options = f"--data-path 1 {data} 2 {data} --load {tmp_path} --save {tmp_path}"

    def found(options=options):
        config = parse(options, base=BASE)
        return fingerprints(config, build_datasets(config), None)

    new = found()
    assert [name for name in new if str(tmp_path / "latest") in name] == [
        f"{tmp_path}/latest_checkpointed_iteration.txt"
    ]
    for step in (10, 20):
        path = tmp_path / f"iter_{step:07d}"
        path.mkdir()
        (path / "common.pt").write_bytes(b"x")
        (path / "checksums.json").write_text(f"sums of step {step}")
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("10")
    ten = found()
    assert not [name for name in ten if "common.pt" in name]  # it has a checksum
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("20")
    changes = differences([ten, found()])
    assert (
        f"{tmp_path}/latest_checkpointed_iteration.txt is step 20 on rank 1, but step 10 on rank 0"
        in changes
    )
    (tmp_path / "iter_0000020" / "checksums.json").unlink()
    assert found()[str(tmp_path / "iter_0000020" / "common.pt")].startswith("1 bytes (")
    told = "the blend is 1/4 of a, 3/4 of a#2 on rank 1, but 1/3 of a, 2/3 of a#2 on rank 0"
    assert told in differences([ten, found(options.replace(f"1 {data} 2", f"1 {data} 3"))])
