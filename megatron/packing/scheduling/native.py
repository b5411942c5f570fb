"""pure. The inner loops of scheduling in C++ (native.cpp), which setup.py builds where there is a compiler.

The same loops stand in Python, in `loops` and `step_time`. Both count in integers and break ties
by number, so that they give the same result to the last bit (tested): ranks with and without the library agree.
"""

from __future__ import annotations

import ctypes
import importlib.util
from typing import Any

import numpy as np
import numpy.typing as npt


def address(array: npt.NDArray[np.int64] | None) -> int | None:
    """Where the array's numbers lie, for C; None for none."""
    if array is None:
        return None
    assert array.dtype == np.int64
    assert array.flags.c_contiguous
    return array.ctypes.data


def _load() -> Any:
    found = importlib.util.find_spec("megatron.packing.scheduling._native")
    if found is None or found.origin is None:
        return None
    library = ctypes.CDLL(found.origin)
    number, array = ctypes.c_int64, ctypes.c_void_p
    signatures: dict[str, list[Any]] = {
        "spread": [number, array, array, number, number, number, array, array, array],
        "split": [number, array, array, array, number, number, array, array],
        "first_fit": [number, array, array, number, number, number, number, number, number, number, array],
        "best_fit": [number, array, number, array],
        "keep": [number, array, array, array, number, number, number, number, array],
        "trade": [number, array, array, number, number, number, array, number, number, number, array],
        "simulate": [number, number, array, number, number, number, array],
    }
    for name, arguments in signatures.items():
        function = getattr(library, name)
        function.argtypes, function.restype = arguments, None if name in ("keep", "trade") else number
    return library


LIBRARY = _load()
"""Functions of native.cpp by name; None where it is not built."""
