"""Images of a pack, shared out over the ranks that hold it; exact in tests/functional_tests."""

import pytest

from megatron.packing.model.shared_tower import shares


@pytest.mark.parametrize(
    ("costs", "num_ranks", "expected"),
    [
        ([5, 1, 3, 3], 2, [[0, 1], [2, 3]]),
        ([4], 3, [[0], [], []]),
        ([2, 2, 2, 2, 8], 2, [[4], [0, 1, 2, 3]]),
        ([0, 0, 0], 2, [[0, 1, 2], []]),
    ],
)
def test_images_are_shared_out_by_cost(
    costs: list[float], num_ranks: int, expected: list[list[int]]
) -> None:
    """Each once, in order: twice would count its gradient twice, and the dearest one alone sets how
    long the ranks wait.
    """
    assert shares(costs, num_ranks) == expected
