"""Images of a pack, shared out over the ranks that hold it; exact in tests/functional_tests."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron.packing.model.shared_tower import SharedTower, shares
from tests.unit_tests.packing.stubs import Ranks


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


@pytest.mark.parametrize(
    ("num_rows", "costs", "said"),
    [
        ([2], None, "num_rows must be one for each of 2 images"),
        ([2, 2], [1.0], "costs must be one for each of 2 images"),
        ([2, 3], None, "the tower made 2 rows of images .1., but num_rows says 3"),
    ],
)
def test_numbers_that_do_not_fit_are_refused(
    num_rows: list[int], costs: list[float] | None, said: str
) -> None:
    """An image that no rank encodes would be a row of zeros, without an error."""
    config: Any = SimpleNamespace(sequence_parallel=False)
    groups: Any = SimpleNamespace(tp=Ranks(), cp=Ranks(2))
    tower = SharedTower(_TwoRows(), config, groups)
    with pytest.raises(ValueError, match=said):
        tower([torch.ones(1), torch.ones(1)], num_rows, costs)


class _TwoRows(torch.nn.Module):
    """Makes two rows of each image."""

    def forward(self, images: list[torch.Tensor]) -> torch.Tensor:
        """Returns [2 * images, 1]."""
        return torch.cat([image.expand(2, 1) for image in images])
