"""What stands in for megatron-core's objects where one process is enough, and short ways to write tests' inputs."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from unittest import mock

import numpy as np
import numpy.typing as npt
import pytest

from megatron.packing.scheduling import native

needs_compiled = pytest.mark.skipif(
    native.LIBRARY is None, reason="megatron.packing.scheduling._native is not built (setup.py found no C++ compiler)"
)


@dataclass(frozen=True)
class Ranks:
    """Stands for a process group."""

    num_ranks: int = 1
    mine: int = 0

    def size(self) -> int:
        return self.num_ranks

    def rank(self) -> int:
        return self.mine


def array(*values: int) -> npt.NDArray[np.int64]:
    return np.array(values, np.int64)


@contextmanager
def in_python() -> Iterator[None]:
    """The Python form of scheduling's inner loops, whatever is compiled; simulations stay as they are."""
    with mock.patch.object(native, "LIBRARY", None):
        yield
