"""Values of users' files in messages: recognisable, and short whatever they are."""

import functools
from typing import Any, cast

import pytest

from megatron.packing.quoting import cut, shortened, shown

MANY: Any = dict.fromkeys(range(99))
NESTED: Any = functools.reduce(lambda inner, _: [inner], range(100_000), cast(Any, []))


@pytest.mark.parametrize(
    "value",
    [
        "a" * 10**6,
        "a b " * 250_000,
        10**4000,
        ["a b " * 1000] * 99,
        {"a b " * 1000: ["c"] * 99, **MANY},
        [[[["a b " * 99] * 9] * 9] * 9] * 9,
        b"\0" * 10**6,
        NESTED,
    ],
)
def test_large_values_are_not_printed_whole(value):
    """A megabyte of one value of a file hides the line that says what is wrong with it."""
    assert len(shown(value)) <= 200
    text = "a b " * 250_000
    assert len(shortened(f"x.json has a {text} but must not; correct it")) <= 1000


@pytest.mark.parametrize("value", ["x", 7, True, None, [1, 2], {"a": [0.5]}, "a\nb"])
def test_small_values_are_shown_as_they_are(value):
    assert shown(value) == repr(value)


def test_both_ends_are_kept():
    """Where it is stands at the begin, and the way out at the end."""
    assert cut("begin" + "x" * 100 + "end!!", 15) == "begin ... end!!"
    assert cut("as it is", 8) == "as it is"
    message = shortened("a.json: " + "y" * 400 + "; correct it")
    assert message.startswith("a.json: yyy")
    assert message.endswith("yyy; correct it")
    assert len(message) < 320


def test_messages_show_little_of_what_a_file_holds():
    """A value of 50,000 characters pushed what is wrong, and where, out of the terminal."""
    fault = "a.jsonl:7: role must be user, but is {}; correct it"
    found = shortened(fault.format("x" * 50_000))
    assert found.startswith("a.jsonl:7: role must be user, but is xxx")
    assert found.endswith("xxx; correct it")
    assert found.count("x") < 300
    assert shortened(fault.format("x" * 200)) == fault.format("x" * 200)
    assert len(shortened(fault.format("x y " * 50_000))) < 1010
