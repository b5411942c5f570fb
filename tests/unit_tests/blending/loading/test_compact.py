import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.blending.loading.compact import compact, expanded

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


@pytest.mark.parametrize("text", ["", "!!!", "abc", "\u00e9", compact({"a": 1})[:-2], "A" + compact({"a": 1})[1:]])
def test_a_damaged_text_is_called_that(text):
    """An error of zlib says nothing of the checkpoint that it came from."""
    with pytest.raises(ValueError, match="this is no state of a loader, or a damaged one: "):
        expanded(text)
