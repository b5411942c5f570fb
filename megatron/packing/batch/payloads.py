"""pure. Payloads: named tensors of any shape that a sample has beside its columns of tokens, or the
key by which they can be made again.

    {"tokens": [...], "payloads": {"pixels": [image, image]}, "costs": {"vision": [256, 64]},
     "payload_key": key}

`payloads` has, by name, a tensor or an array, or a list of them in the order in which they stand in
the sequence. `costs` has the units of each by kind (see `scheduling.payload_cost`). A sample with a
`payload_key` and no `payloads` is decoded where it is trained. The key is any picklable value; an
energon loader's samples have theirs as `__restore_key__`, which counts where there are `payloads`.

In the table of columns a sequence has the number of its payload, and what it costs.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from megatron.packing.quoting import shown

Tensors = Mapping[str, Sequence[Any]]
"""Tensors or arrays by name, in order."""


class Payload(NamedTuple):
    """Tensors of one sequence beside its tokens, or the key that restores them."""

    tensors: Tensors | None
    """None where they are to be made by the key."""
    key: Any = None
    """None where nothing can make them again."""

    @property
    def num_bytes(self) -> int:
        """Bytes of the tensors that are there."""
        by_name = () if self.tensors is None else self.tensors.values()
        return sum(int(tensor.nbytes) for tensors in by_name for tensor in tensors)


def payload_of(item: Mapping[str, Any], num_sequences: int) -> Payload | None:
    """Returns the payload of a sample; None for one of tokens alone.

    Raises ValueError for what cannot travel, and for a sample that is not one sequence.
    """
    given, key = item.get("payloads"), item.get("payload_key")
    if given is None and key is None:
        if item.get("costs") is not None:
            raise ValueError(
                "a sample with 'costs' must have 'payloads' or a 'payload_key', but has neither"
            )
        return None
    if num_sequences != 1 or item.get("parents") is not None:
        raise ValueError(
            "a sample with payloads must be one sequence, as nothing says whose they are in a "
            "packed one or a tree; give each sequence as a sample"
        )
    if given is not None and key is None:
        key = item.get("__restore_key__") or None
    try:
        pickle.dumps(key)
    except Exception as failure:  # later it would fail on this rank alone, while others wait
        raise ValueError(f"a payload's key must be picklable, but is {shown(key)}") from failure
    return Payload(None if given is None else named_tensors(given), key)


def restored_tensors(given: Any) -> dict[str, list[Any]]:
    """Returns tensors by name, a list of each name's.

    Args:
        given: what the user's `restore` returned: a sample that has them as `payloads`, or the
            mapping alone.
    """
    if not isinstance(given, Mapping):
        return named_tensors(getattr(given, "payloads", given))
    if "payloads" not in given and not given.keys().isdisjoint(("tokens", "input_ids")):
        raise ValueError(
            "a sample that is restored must have 'payloads', but has none; return what the "
            "iterator gave, with its images"
        )
    return named_tensors(given.get("payloads", given))


def named_tensors(given: Any) -> dict[str, list[Any]]:
    """Returns a mapping of names to a tensor, an array or some of them, as lists of each name's."""
    if not isinstance(given, Mapping):
        raise ValueError(
            "payloads must be tensors by name, as {'pixels': [image, image]}, but are "
            f"{type(given).__name__}"
        )
    return {str(name): _tensors(name, value) for name, value in given.items()}


def _tensors(name: object, value: Any) -> list[Any]:
    found = list(value) if isinstance(value, (list, tuple)) else [value]
    for one in found:
        if not hasattr(one, "detach") and not isinstance(one, (np.ndarray, np.generic)):
            raise ValueError(
                f"payload '{name}' must be a tensor, an array, or a list of them, but has "
                f"{type(one).__name__}"
            )
        if not _is_plain(one):
            raise ValueError(
                f"payload '{name}' must be dense and of numbers in the machine's byte order of at "
                f"most 8 bytes, but is of {one.dtype}, {getattr(one, 'layout', 'an array')}"
            )
    return found


def _is_plain(one: Any) -> bool:
    """Returns whether a tensor or an array can travel. Torch is not imported for it."""
    dtype = one.dtype
    # Numpy's types have a kind; torch's are numbers all.
    is_number = getattr(dtype, "kind", "f") in "biuf" and dtype.itemsize <= 8
    is_dense = str(getattr(one, "layout", "torch.strided")) == "torch.strided"
    is_odd = any(getattr(one, name, False) for name in ("is_meta", "is_quantized", "is_nested"))
    return is_number and is_dense and not is_odd and bool(getattr(dtype, "isnative", True))
