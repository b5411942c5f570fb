"""The user's iterator, and the loader within it."""

from types import SimpleNamespace
from typing import Any

import pytest

from megatron.packing.step.payload_store import restore_of


class Loader:
    def restore_sample(self, key: int) -> int:
        return key + 1


@pytest.mark.parametrize(
    "wrap",
    [
        lambda loader: loader,
        lambda loader: SimpleNamespace(iterable=loader),
        lambda loader: SimpleNamespace(_dataloader=loader, iterable=None),
        lambda loader: SimpleNamespace(iterable=SimpleNamespace(_dataloader=loader)),
    ],
)
def test_the_loader_within_wrappers_restores(wrap: Any) -> None:
    """Megatron-LM's training loop has its own iterators round the user's: without the loader within
    them every image would travel as pixels.
    """
    restore = restore_of(wrap(Loader()))
    assert restore is not None
    assert restore(1) == 2


def test_an_iterator_that_restores_nothing() -> None:
    """Its payloads are sent themselves."""
    ring = SimpleNamespace()
    ring.iterable = ring
    given: list[Any] = [None, iter([]), ring, SimpleNamespace(restore_sample=None)]
    for iterator in given:
        assert restore_of(iterator) is None
