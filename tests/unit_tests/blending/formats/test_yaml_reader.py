"""Scalars as energon reads them, with the line of every key."""

import pytest

from megatron.blending.formats.yaml_reader import YamlLimits, read_scalar, read_yaml


@pytest.mark.parametrize(
    ("word", "value"),
    [
        ("train", "train"),
        ("12", 12),
        ("-3", -3),
        ("012", 12),
        ("0.5", 0.5),
        (".5", 0.5),
        ("1e3", 1000.0),
        ("1.", 1.0),
        ("yes", True),
        ("False", False),
        ("on", "on"),
        ("null", None),
        ("~", None),
        ("", None),
        ("1_000", 1000),
        ("1_0.5e1_0", 10.5e10),
        ("1__0", "1__0"),
        ("+3", 3),
        (".inf", ".inf"),
        ("1e", "1e"),
        ("1:30", "1:30"),
        ("0x10", "0x10"),
        ("2024-01-01", "2024-01-01"),
        ("50%", "50%"),
        ("e", "e"),
        ("1.2.3", "1.2.3"),
        ("nan", "nan"),
    ],
)
def test_plain_scalars(word, value):
    """YAML 1.1 makes a bool of `on`, 90 of `1:30` and a date of a version: subflavors would change
    between readers.
    """
    read = read_yaml("a.yaml", f"key: {word}")["key"]
    assert (read, type(read)) == (value, type(value))
    assert read_scalar(word) == read


def test_quotes_make_text():
    assert read_yaml("a.yaml", "a: '1'\nb: \"yes\"\nc: |\n  2\n") == {
        "a": "1",
        "b": "yes",
        "c": "2\n",
    }


def test_lines_are_remembered():
    table = read_yaml("a.yaml", "# c\na:\n  - 1\n\n  - x: 2\nb: {c: 3}\n")
    assert table == {"a": [1, {"x": 2}], "b": {"c": 3}}
    assert table.lines == {"a": 2, "b": 6}
    assert table["a"].lines == [3, 5]


def test_anchors_and_merge_keys():
    """energon's own reader fails on these; files are shorter with them."""
    text = (
        "base: &b {x: 1, y: 2}\nother: &o {y: 9, z: 3}\nuse:\n  <<: [*b, *o]\n  x: 5\nagain: *b\n"
    )
    table = read_yaml("a.yaml", text)
    assert table["use"] == {"x": 5, "y": 2, "z": 3}
    assert table["again"] == {"x": 1, "y": 2}


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("a: 1\nb: 2\na: 3\n", "a.yaml:3: key 'a' is given twice, first in line 1; remove one"),
        ("a: [1\n", "a.yaml:2: not YAML: "),
        ("a: !!python/tuple [x]", "a.yaml:1: tag 'tag:yaml.org,2002:python/tuple'"),
        ("a: !mine x", "a.yaml:1: tag '!mine' has no meaning here; remove it"),
        ("a: &a [*a]", "a.yaml:1: an anchor holds itself"),
        ("a: *b", "a.yaml:1: not YAML: "),
        ("[a]: b", "a.yaml:1: a key must be a word"),
        ("<<: 3", "a.yaml:1: what << merges must be a mapping or a list of them"),
        ("a: 1\n---\nb: 2\n", "a.yaml:2: not YAML: "),
        ("a: \x00", "a.yaml"),
        ("[" * 5, "a.yaml:1: not YAML: over 4 levels"),
        (
            "b0: &b0 [1, 1]\n"
            + "".join(f"b{n}: &b{n} [*b{n - 1}, *b{n - 1}]\n" for n in range(1, 6)),
            "a.yaml:4: not YAML: more than 50 values",
        ),
        ("a: 1\nb: -1" + "0" * 400, "a.yaml:2: the number -1000000000000000000... is too large"),
    ],
)
def test_faults_name_the_line(text, fault):
    with pytest.raises(ValueError, match=r"^a\.yaml") as error:
        read_yaml("a.yaml", text, YamlLimits(values=50, depth=4))
    assert str(error.value).startswith(fault)
    assert "\n" not in str(error.value)


def test_an_empty_file_is_nothing():
    assert read_yaml("a.yaml", "# only a comment\n") is None
