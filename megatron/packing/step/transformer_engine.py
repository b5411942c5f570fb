"""tensor. Test for Transformer Engine's attention, which decides how packs are described."""

from __future__ import annotations

from functools import cache
from importlib import import_module
from importlib.util import find_spec

from packaging.version import Version

from megatron.packing.device import Device


@cache
def transformer_engine_installed() -> bool:
    """Returns whether attention will be Transformer Engine's, which wants `cu_seqlens` on the
    device.

    ValueError for one before 2.9, under which packs are known not to converge.
    """
    if not Device.here().is_gpu or find_spec("transformer_engine") is None:
        return False
    found = import_module("transformer_engine").__version__
    if Version(found) < Version("2.9"):
        raise ValueError(
            f"packs need Transformer Engine 2.9 or later, but {found} is installed; pip install "
            "'transformer-engine[pytorch]>=2.9', or uninstall transformer-engine: torch's kernels "
            "do without"
        )
    return True
