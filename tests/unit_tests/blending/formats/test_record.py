"""Fingerprints of files of records."""

from typing import Any

import pytest

from megatron.blending.formats.record import count_probes, fingerprint_file
from megatron.blending.formats.sources import open_source

SIZE = 100_000_000


class FileWithHole:
    """A file of one letter, with a megabyte of zeros somewhere."""

    location, size = "a", SIZE

    def __init__(self, hole):
        self.hole = range(hole, hole + 1_000_000) if hole is not None else range(0)

    def read(self, start, end):
        num_lost = max(min(end, self.hole.stop) - max(start, self.hole.start), 0)
        return bytes(num_lost) + b"x" * (end - start - num_lost)


@pytest.mark.parametrize("hole", [0, 1_580_000, 50_003_000, 77_777_777, SIZE - 1_000_000])
def test_a_lost_megabyte_is_noticed(hole):
    """What a copy over a broken network leaves: records of zeros on one machine alone."""

    def fingerprint(hole):
        file: Any = FileWithHole(hole)
        return fingerprint_file(file, 1000, count_probes(SIZE))

    assert fingerprint(hole) != fingerprint(None)


def test_the_first_half_is_that_of_earlier_versions(tmp_path):
    """Their checkpoints, and states of energon's loaders, would be those of other data."""
    (tmp_path / "a.jsonl").write_text('{"a": 1}\n{"a": 2}\n')
    fingerprint = open_source(tmp_path / "a.jsonl").fingerprint()
    assert (fingerprint[:32], len(fingerprint)) == ("85c1880ff82381e910f23320a62ace62", 64)


@pytest.mark.parametrize(
    ("size", "count"), [(0, 64), (1 << 25, 64), (SIZE, 191), (1 << 27, 256), (1 << 40, 256)]
)
def test_large_files_are_not_read_at_length(size, count):
    assert count_probes(size) == count
