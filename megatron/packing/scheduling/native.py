"""pure. The inner loops of scheduling in C++ (native.cpp), which setup.py builds where there is a compiler.

The same loops stand in Python, beside each call or in `loops`. Both count in integers and break ties by number, so that
they give the same result to the last bit (tested): ranks with and without the library agree. `simplex` alone and
what it serves count in fractions, and round alike in both.
"""

from __future__ import annotations

import ctypes
import importlib.util
import warnings
from typing import Any

import numpy as np
import numpy.typing as npt

_INTERFACE_VERSION = 5
"""That of native.cpp."""
_NO_BYTES = ctypes.c_char * 0


def address(array: npt.NDArray[np.int64] | None) -> int | None:
    """Where the array's numbers lie, for C; None for none. A third of a microsecond."""
    if array is None:
        return None
    assert array.dtype == np.int64
    assert array.flags.c_contiguous
    if array.flags.writeable:  # several times as fast as the `ctypes` of an array
        return ctypes.addressof(_NO_BYTES.from_buffer(array.data))
    return array.ctypes.data


def _load() -> Any:
    found = importlib.util.find_spec("megatron.packing.scheduling._native")
    if found is None or found.origin is None:
        return None
    library = ctypes.CDLL(found.origin)
    if not hasattr(library, "interface_version") or library.interface_version() != _INTERFACE_VERSION:
        warnings.warn(
            f"{found.origin} was built of another version of the code: scheduling is slow without it; "
            "install the project again (pip install --editable .)",
            stacklevel=2,
        )
        return None
    number, array = ctypes.c_int64, ctypes.c_void_p
    signatures: dict[str, list[Any]] = {
        "spread": [number, array, array, number, number, number, array, array, array],
        "spread_rest": [number, array, array, number, number, number, array, array],
        "first_fit": [number, array, array, number, number, number, number, number, number, number, array],
        "fill": [number, array, array, number, number, number, array],
        "best_fit": [number, array, number, array],
        "keep": [number, array, array, array, number, number, number, number, array],
        "trade": [number, array, array, number, number, number, array, number, number, number, array],
        "simulate": [number, number, array, number, number, number, array],
        "stable_order": [number, array, array],
        "pack_costs": [number, array, array, number, number, array],
        "fill_empty": [number, number, array],
        "deal": [number, array, array, number, number, array],
        "split_ranks": [number, array, array, array, number, number, number, array, number, array],
        "place_by_cost": [number, number, array, array, array],
        "match": [number, array, array, array, number, number, array],
        "packs_needed": [number, array, number, array],
        "search_packing": [number, array, number, array, *[number] * 7, array],
        "pack_values": [number, array, *[number] * 3, array],
        "repartition": [number, array, array, *[number] * 4, array, *[number] * 3, array],
        "anneal": [number, array, array, *[number] * 11, array],
        "holds": [number, array, array, array, *[number] * 8],
    }
    counts = {"spread", "spread_rest", "first_fit", "best_fit", "simulate", "pack_costs"}
    counts |= {"search_packing", "pack_values", "repartition", "holds"}
    for name, arguments in signatures.items():
        function = getattr(library, name)
        function.argtypes, function.restype = arguments, number if name in counts else None
    return library


LIBRARY = _load()
"""Functions of native.cpp by name; None where it is not built, or was not built again after a change."""
