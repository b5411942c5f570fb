"""What stands in for megatron-core's objects where one process is enough, and short ways to write
tests' inputs.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from unittest import mock

import numpy as np
import numpy.typing as npt
import pytest

from megatron.packing.scheduling import compiled

needs_compiled = pytest.mark.skipif(
    compiled.CORE is None,
    reason="megatron.packing.scheduling._core is not built (setup.py found no C++ compiler)",
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
    """Scheduling as it is without a compiler, whatever is compiled."""
    with mock.patch.object(compiled, "CORE", None):
        yield
