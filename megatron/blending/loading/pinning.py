"""pure. Batches in page-locked memory, where there is CUDA: the copy to the device then need not be waited for."""

import sys
from typing import Any

from megatron.blending.encoding.collate import map_tensors


def may_pin() -> bool:
    """Whether it can be done. Torch is not imported to find out: without it there are no tensors."""
    torch = sys.modules.get("torch")
    return torch is not None and torch.cuda.is_available()


def pinned(value: Any) -> Any:
    """Return a copy whose tensors are page-locked: by its own `pin_memory()`, if it has one."""
    if hasattr(value, "pin_memory"):
        return value.pin_memory()
    return map_tensors(value, lambda tensor: tensor.pin_memory())
