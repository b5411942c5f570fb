"""Names with braces, as bash expands them (the literals were taken from it)."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.blending.formats.prepared import braces
from megatron.blending.formats.prepared.braces import collapse_numbers, expand_braces


@pytest.mark.parametrize(
    ("pattern", "names"),
    [
        ("s_{000..002}.tar", ["s_000.tar", "s_001.tar", "s_002.tar"]),
        ("{8..11}", ["8", "9", "10", "11"]),
        ("{08..11}", ["08", "09", "10", "11"]),
        ("{01..3}", ["01", "02", "03"]),
        ("{3..1}", ["3", "2", "1"]),
        ("{1..10..4}", ["1", "5", "9"]),
        ("{-1..1}", ["-1", "0", "1"]),
        ("{a..c}", ["a", "b", "c"]),
        ("{a,b}{1..2}", ["a1", "a2", "b1", "b2"]),
        ("{a,{b,c}}", ["a", "b", "c"]),
        ("x{,y}", ["x", "xy"]),
        ("{a}", ["{a}"]),
        ("{a,b", ["{a,b"]),
        ("{a,b}}", ["a}", "b}"]),
        ("{}{1..2}", ["{}1", "{}2"]),
        ("{{1..2}}", ["{1}", "{2}"]),
        ("plain", ["plain"]),
        ("", [""]),
    ],
)
def test_expands_as_bash_does(pattern, names):
    """Shards would be missing, or looked for under names that do not exist."""
    assert expand_braces(pattern) == names


@pytest.mark.parametrize(
    ("names", "patterns"),
    [
        (["s_0.tar", "s_1.tar", "s_11.tar"], ["s_{0..1}.tar", "s_11.tar"]),
        (["s_08", "s_09", "s_10", "s_11"], ["s_{08..11}"]),
        (["8", "9", "10"], ["{8..10}"]),
        (["98", "99", "100"], ["{98..100}"]),
        (["099", "100", "0101"], ["{099..100}", "0101"]),
        (["99", "100", "0101"], ["{99..100}", "0101"]),
        (["09", "10", "100"], ["{09..10}", "100"]),
        (["a/0/1", "a/0/2", "a/1/1"], ["a/0/{1..2}", "a/1/1"]),
        (["b", "a", "a"], ["b", "a", "a"]),
        (["2", "1"], ["2", "1"]),
        (["{1}", "{2}"], ["{1}", "{2}"]),
        ([], []),
    ],
)
def test_collapses_runs(names, patterns):
    """A split file of a hundred thousand lines would take seconds to read at every start."""
    assert collapse_numbers(names) == patterns


@pytest.mark.slow
@given(
    st.lists(st.from_regex(r"(s_|d/)?[0-9]{0,3}(_|\.tar)?[0-9]{0,2}", fullmatch=True), max_size=20)
)
def test_expanding_undoes_collapsing(names):
    """Order and names must survive: they say which sample is which."""
    assert [name for pattern in collapse_numbers(names) for name in expand_braces(pattern)] == names


@given(start=st.integers(0, 1200), count=st.integers(1, 150), width=st.integers(1, 4))
def test_one_run_is_one_range(start, count, width):
    """Numbers that outgrow their zeros start a range of their own, and none but these."""
    names = [f"shard-{number:0{width}d}.tar" for number in range(start, start + count)]
    collapsed = collapse_numbers(names)
    assert [name for pattern in collapsed for name in expand_braces(pattern)] == names
    assert len(collapsed) <= 2


@pytest.mark.parametrize(
    "pattern",
    [
        "s{0..2000}",
        "{0..9}{0..9}{0..9}",
        "{" * 20,
        "a" * 500,
        f"{{0{'0' * 200}..1}}",
        "{1..100000}",
    ],
)
def test_what_stands_for_too_many_is_refused(pattern, monkeypatch):
    """One line of a file would fill the memory of every rank."""
    for name, limit in (("BRACES", 10), ("CHARACTERS", 100), ("NAMES", 200)):
        monkeypatch.setattr(f"{braces.__name__}._MAX_{name}", limit)
    with pytest.raises(ValueError, match=r"(has|stands for) more than"):
        expand_braces(pattern)
