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
