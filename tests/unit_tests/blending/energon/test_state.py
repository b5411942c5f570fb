"""Saved states that are not whole."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.blending.energon._loading.loader import get_savable_loader
from megatron.blending.energon._loading.state import (
    checked_states,
    compact,
    expanded,
    with_checksum,
)
from tests.unit_tests.blending.number_streams import config, drawn, endless, loaders

STATE = get_savable_loader(endless(), config()).state_dict()


def refused(state):
    with pytest.raises(ValueError, match=r".") as error:
        get_savable_loader(endless(), config()).load_state_dict(state)
    return str(error.value)


@pytest.mark.parametrize("name", STATE)
def test_a_state_that_lacks_a_key_is_called_damaged(name):
    """Its name alone, as a KeyError, would be taken for a fault of the program."""
    state = {key: value for key, value in STATE.items() if key != name}
    if name == "version":
        assert "load_state_dict takes what state_dict" in refused(state)
    else:
        assert (
            refused(state) == f"this is no state of a loader, or a damaged one: it has no {name!r}"
        )


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("count", "3"),
        ("cells", []),
        ("held", {"lane 0": {"1": [[2, 3, 4]]}}),
        ("stream", STATE["stream"][:-3]),
        ("checksum", STATE["checksum"] + 1),
        ("count", {1, 2}),
    ],
)
def test_a_damaged_state_is_called_that(name, value):
    """Before the loader changed: it goes on where it was."""
    loader = get_savable_loader(endless(), config())
    expected, _ = drawn(loaders(endless()), 2)
    assert next(loader) == expected[0]
    with pytest.raises(
        ValueError, match="this is no state of a loader, or a damaged one: its checksum is"
    ):
        loader.load_state_dict({**STATE, name: value})
    assert next(loader) == expected[1]


@pytest.mark.parametrize("state", [None, [], {}, 3, "x", [3], {"rank": 2}])
def test_what_is_no_state_is_called_that(state):
    assert (
        "load_state_dict takes what state_dict or save_state_rank gave, or a list of these"
        in refused(state)
    )


@pytest.mark.parametrize(
    "state", [{"version": 2}, {**STATE, "version": 4}, [STATE, {**STATE, "version": 7}]]
)
def test_a_state_of_another_version_names_both(state):
    """Said to be damaged, it would be thrown away, and not be taken to the release that can read
    it.
    """
    assert re.search(
        r"the state is of version [247], but this release reads version 5; continue with",
        refused(state),
    )


def test_two_states_of_a_rank_are_refused_if_they_differ():
    """The last would win, and the order of a gather decide what is trained on twice."""
    _, states = drawn(loaders(endless(), 2), 3)
    assert checked_states([*states, states[1]]) == [*states, states[1]]
    other = with_checksum({**states[1], "count": states[1]["count"] + 2})
    assert (
        "there must be one state of each rank, but two that differ are of rank 1; pass one"
        in refused([*states, other])
    )


values = st.recursive(
    st.none() | st.integers(-(2**63), 2**63) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=20,
)


@given(values)
def test_what_is_expanded_is_what_was_compacted(value):
    """Else a restored stream would stand elsewhere."""
    assert expanded(compact(value)) == value


def test_numbers_that_are_alike_take_about_a_byte():
    assert len(compact([[3, 1], [5, 1]] * 10_000)) < 1000


@pytest.mark.parametrize(
    "text", ["", "!!!", "abc", "\u00e9", compact({"a": 1})[:-2], "A" + compact({"a": 1})[1:]]
)
def test_a_damaged_text_is_called_that(text):
    """An error of zlib says nothing of the checkpoint that it came from."""
    with pytest.raises(ValueError, match="this is no state of a loader, or a damaged one: "):
        expanded(text)
