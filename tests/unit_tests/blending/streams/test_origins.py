from hypothesis import given
from hypothesis import strategies as st

from megatron.blending.streams.origins import columns_of, origins_of

leaves = st.tuples(st.integers(0, 3), st.integers(0, 2**40)).map(list)
several = st.tuples(st.integers(-3, -1), st.lists(leaves, min_size=1), st.integers(0, 5)).map(list)


@given(st.lists(leaves | several))
def test_columns_hold_all_origins(origins):
    """What a buffer held back is made again from them."""
    assert origins_of(columns_of(origins)) == origins


def test_columns():
    assert columns_of([(3, 7), (5, 2), (3, 8), [-1, [5, 9], 0]]) == [[3, 5, 3, [-1, [5, 9], 0]], [7, 2, 1, 0]]
