"""pure. The inner loop of a blend's order in C++ (core.cpp), which setup.py builds where there is a
compiler.

Without it `shares` takes the same way in Python, a hundred times slower, to the same order.
"""

from __future__ import annotations

import ctypes
import importlib.util
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

_INTERFACE_VERSION = 1
"""Must equal that of core.cpp."""

Ints = npt.NDArray[np.int64]


def _load() -> Callable[..., None] | None:
    found = importlib.util.find_spec("megatron.blending.order._core")
    if found is None or found.origin is None:
        return None
    library = ctypes.CDLL(found.origin)
    if library.interface_version() != _INTERFACE_VERSION:  # built of another version of the code
        return None
    function: Any = library.earliest_deadline_first
    number, array = ctypes.c_int64, np.ctypeslib.ndpointer(np.int64, flags="C_CONTIGUOUS")
    function.argtypes = [number] * 3 + [array] * 3 + [number] * 2 + [array, ctypes.c_void_p]
    function.restype = None

    def call(*arguments: object, found: Ints | None) -> None:
        function(*arguments, None if found is None else found.ctypes.data)

    return call


EARLIEST_DEADLINE_FIRST = _load()
"""The compiled loop; None where core.cpp is not built, or was not rebuilt after a change."""
