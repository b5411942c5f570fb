"""Bytes at other depths."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.sft.fit.affine import NotAffineError, fitted

POINTS = ((1, 1), (2, 1), (3, 1), (4, 1), (1, 2), (2, 2), (3, 3))


@given(*[st.integers(0, 10**12)] * 4, st.integers(1, 200), st.integers(1, 32))
def test_a_surface_is_found_again(
    a: int, b: int, c: int, d: int, layers: int, microbatches: int
) -> None:
    """Floats would round tens of GiB."""

    def size(x: int, y: int) -> int:
        return a + b * x + c * y + d * x * y

    surface = fitted({point: size(*point) for point in POINTS})
    assert surface.at(layers, microbatches) == size(layers, microbatches)
    line = fitted({(x, 1): size(x, 1) for x in (1, 2, 3, 4)})
    assert line.at(layers, 1) == size(layers, 1)


@pytest.mark.parametrize("point", POINTS)
def test_one_byte_off_is_refused(point: tuple[int, int]) -> None:
    """A peak that moves elsewhere with depth would be extrapolated wrongly."""
    sizes = {(x, y): 7 + 5 * x + 3 * y + 2 * x * y for x, y in POINTS}
    sizes[point] += 1
    with pytest.raises(NotAffineError):
        fitted(sizes)
