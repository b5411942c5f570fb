"""Names of sources in logs: short, and no two alike."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.sft.data.source_names import short_names


@pytest.mark.parametrize(
    ("paths", "names"),
    [
        (["data/chats.jsonl"], ["chats"]),
        (["data/a/chats.jsonl", "data/b/chats.jsonl", "web/"], ["a/chats", "b/chats", "web"]),
        (["chats.jsonl", "chats.parquet", "v1.2"], ["chats.jsonl", "chats.parquet", "v1.2"]),
        (["/x/chats.jsonl", "/x/chats.jsonl"], ["chats", "chats#2"]),
        (["s3://bucket/a/docs.bin", "docs/b/docs"], ["docs.bin", "docs"]),
        ([], []),
    ],
)
def test_literal(paths, names):
    """Names that nobody can tell apart, or whole paths in every log line."""
    assert short_names(paths) == names


@given(st.lists(st.lists(st.sampled_from(["a", "b", "a.jsonl", "b.json"]), min_size=1, max_size=3), max_size=6))
def test_no_two_alike(parts):
    """Two sources under one name would be one source in the metrics."""
    names = short_names(["/".join(path) for path in parts])
    assert len(set(names)) == len(names) == len(parts)
