"""pure. The inner loops in C++ (core.cpp), which setup.py builds where there is a compiler.

Without them `placement` takes plainer, shorter heuristics, slower and a little worse. One
warning says so.
"""

from __future__ import annotations

import ctypes
import importlib.util
import warnings
from typing import Any

import numpy as np
import numpy.typing as npt

_INTERFACE_VERSION = 9
"""Must equal that of core.cpp."""
_INTEGER, _REAL, _ARRAY = ctypes.c_int64, ctypes.c_double, ctypes.c_void_p
_SIGNATURES: dict[str, tuple[str, Any]] = {
    # Function: arguments (n a number, r a real one, i and f arrays of either), and what it returns.
    "place_longest_first": ("nfinnnrfi", _REAL),
    "first_fit": ("nfinnnrrrri", _INTEGER),
    "best_fit": ("nini", _INTEGER),
    "complete_packs": ("ninnnni", _INTEGER),
    "keep": ("nfiinnnri", None),
    "trade": ("nfinnnfrnnni", None),
    "split_ranks": ("nfiinnnfni", None),
    "simulate": ("nnfnnnff", _INTEGER),
    "match": ("niini", None),
}
_KINDS = {"n": _INTEGER, "r": _REAL, "i": _ARRAY, "f": _ARRAY}
_NO_BYTES = ctypes.c_char * 0


class Core:
    """The functions of core.cpp, which take numbers and contiguous int64 or float64 arrays, and
    write into the last.
    """

    def __init__(self, library: ctypes.CDLL) -> None:
        self._functions = {}
        for name, (arguments, result) in _SIGNATURES.items():
            function = getattr(library, name)
            function.argtypes, function.restype = [_KINDS[kind] for kind in arguments], result
            self._functions[name] = function

    def call(self, name: str, *arguments: object) -> Any:
        """Calls the function and returns its result."""
        passed = [_address(each) if isinstance(each, np.ndarray) else each for each in arguments]
        return self._functions[name](*passed)


def _address(array: npt.NDArray[Any]) -> int:
    """Address of the array's numbers."""
    assert array.flags.c_contiguous
    assert array.dtype in (np.int64, np.float64)
    if array.flags.writeable:  # several times as fast as the `ctypes` of an array
        return ctypes.addressof(_NO_BYTES.from_buffer(array.data))
    return array.ctypes.data


def _load() -> Core | None:
    found = importlib.util.find_spec("megatron.packing.scheduling._core")
    if found is None or found.origin is None:
        return None
    library = ctypes.CDLL(found.origin)
    if (
        not hasattr(library, "interface_version")
        or library.interface_version() != _INTERFACE_VERSION
    ):
        warnings.warn(
            f"{found.origin} was built of another version of the code: scheduling is slow without "
            "it; install the project again (pip install --editable .)",
            stacklevel=2,
        )
        return None
    return Core(library)


CORE = _load()
"""The compiled loops; None where core.cpp is not built, or was not rebuilt after a change."""
