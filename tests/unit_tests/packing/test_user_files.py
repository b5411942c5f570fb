"""Small files that a user names: what is no such file is refused at once, in a line, and at no
price.
"""

import json
import os
import time
import tracemalloc

import pytest

from megatron.packing.user_files import parse_json, read_json, read_text, read_yaml

DOUBLED = "b0: &b0 [1, 1]\n" + "".join(f"b{n}: &b{n} [*b{n - 1}, *b{n - 1}]\n" for n in range(1, 5))


@pytest.fixture
def is_cheap():
    """A line of a file must cost neither a run's memory nor its patience."""
    tracemalloc.start()
    start = time.process_time()
    yield
    seconds, (_, peak) = time.process_time() - start, tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 100e6
    assert seconds < 3  # of the processor, with tracing, which takes twice the time


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("[" * 500 + "]" * 500, "nested more than 64 deep"),
        ("[" * 100_000, "nested too deep"),
        ("1" + "0" * 400, "the number 10000000000000000000... does not fit 64 bits"),
        ("1" * 10_000, "does not fit 64 bits"),
        ("9223372036854775808", "does not fit 64 bits"),
        ("[" + "[]," * 1_000_000 + "[]]", "more than 1,000,000 values"),
        ('{"a": }', "not JSON: Expecting value in line 1, column 7"),
    ],
)
def test_json_that_is_refused(is_cheap, text, fault):
    with pytest.raises(ValueError, match=fault) as error:
        parse_json(text)
    assert type(error.value) is ValueError


def test_json_that_is_read():
    """A limit that is too low refuses files that are in use."""
    assert parse_json('{"a": [9223372036854775807, -9223372036854775808, 1e3, null]}') == {
        "a": [2**63 - 1, -(2**63), 1000.0, None]
    }
    assert parse_json("[" * 60 + "]" * 60)


def test_integers_of_any_size_are_kept_where_they_are_written_again(is_cheap):
    """Released tokenizers have such a model_max_length; a run would end without its model."""
    text = (
        '{"model_max_length": 1000000000000000019884624838656, "a": [1e30, NaN, -Infinity, 1'
        + "0" * 3999
        + "]}"
    )
    assert json.dumps(parse_json(text, any_integer=True)) == text.replace("1e30", "1e+30")
    with pytest.raises(ValueError, match=r"the number 11111111111111111111\.\.\. has 5,000 digits"):
        parse_json("1" * 5000, any_integer=True)
    parse_json("[" + ",".join(["1" * 4000] * 4000) + "]", any_integer=True)


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("a: " + "[" * 20 + "]" * 20, ":1: nested more than 8 deep"),
        ("a: " + "[" * 100, ":1: (nested more than 8 deep|exceeded maximum nesting depth)"),
        (DOUBLED, r":2: \*b0 stands for a list or mapping; write it out"),
        ("a: &a {b: 1}\nc: {<<: *a}", r":2: \*a stands for a list or mapping; write it out"),
        ("\n".join(f"a{n}: 1" for n in range(60_000)), "more than 50,000 values"),
        ("a: 1" + "0" * 5000, "not YAML: "),
        ("a: 2001-99-99", "not YAML: month must be in 1..12"),
        ("a: 1\na: 2", ":2: 'a' is given twice"),
        ("a: !!python/tuple [x]", ":1: could not determine a constructor"),
    ],
)
def test_yaml_that_is_refused(is_cheap, tmp_path, text, fault):
    (tmp_path / "a.yaml").write_text(text)
    with pytest.raises(ValueError, match=fault) as error:
        read_yaml(tmp_path / "a.yaml")
    assert type(error.value) is ValueError


def test_what_is_no_file_is_refused_and_not_waited_for(is_cheap, tmp_path):
    """A pipe without a writer would hang every rank, and a device that never ends fill their
    memory.
    """
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", "/dev/null", tmp_path):
        with pytest.raises(ValueError, match="no regular file"):
            read_text(path)
    with open(tmp_path / "long", "wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(ValueError, match="it has more than 16,777,216 bytes"):
        read_json(tmp_path / "long")
    with pytest.raises(ValueError, match="No such file"):
        read_text(tmp_path / "absent")
