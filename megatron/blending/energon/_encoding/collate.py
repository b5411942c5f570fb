"""tensor. Collates several values into one: stacks samples into a batch, and concatenates batches.

torch is imported only when there is a tensor: a stream of text never imports it.
"""

import dataclasses
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeGuard, TypeVar

if TYPE_CHECKING:
    import torch

T = TypeVar("T")


def generic_batch(values: Sequence[Any]) -> Any:
    """Returns one value for several samples. Tensors are padded and stacked; dicts, dataclasses and
    named tuples with the same fields are collated field by field; anything else becomes a list.

    `[{"a": "x"}, {"a": "y"}] -> {"a": ["x", "y"]}`.
    """
    return _collated(values, batch_pad_stack)


def generic_concat(values: Sequence[Any]) -> Any:
    """Returns one batch for several batches, like `generic_batch`, with tensors concatenated by
    `concat_pad`.

    Other values become a list with an entry per batch: two batches with one caption each give
    `[["a"], ["b"]]`.
    """
    return _collated(values, concat_pad)


def homogeneous_concat_mix(samples: Sequence[Any]) -> Any:
    """Returns one batch for several batches of the same type: a `batch_mix_fn` of MixBatchDataset.
    Raises ValueError if types differ.
    """
    first = type(samples[0])
    for sample in samples:
        if type(sample) is not first:
            raise ValueError(
                f"samples to mix must be of one type, but are {first.__name__} and "
                f"{type(sample).__name__}; pass a batch_mix_fn that mixes them"
            )
    return generic_concat(samples)


def batch_list(values: Sequence[Any]) -> list[Any]:
    """Returns the values as a list."""
    return list(values)


def batch_stack(values: "Sequence[torch.Tensor]") -> "torch.Tensor":
    """Stacks tensors of equal shape along a new first dimension."""
    import torch

    return torch.stack(list(values))


def batch_pad_stack(values: "Sequence[torch.Tensor]") -> "torch.Tensor":
    """Stacks tensors along a new first dimension; smaller ones get zeros at the end of each
    dimension.
    """
    import torch

    if all(value.shape == values[0].shape for value in values):
        return torch.stack(list(values))
    return _padded([value[None] for value in values])


def concat_pad(batch: "Sequence[torch.Tensor]") -> "torch.Tensor":
    """Concatenates along the first dimension; in the others, smaller tensors get zeros at the end.

    Shapes `[2, 3]` and `[1, 5]` give `[3, 5]`.
    """
    import torch

    if all(value.shape[1:] == batch[0].shape[1:] for value in batch):
        return torch.cat(list(batch)) if batch[0].dim() else torch.stack(list(batch))
    return _padded(batch)


def map_tensors(value: object, change: "Callable[[torch.Tensor], torch.Tensor]") -> Any:
    """Returns `value` with each tensor in it changed; lists, dicts, tuples and dataclasses are
    copied on the way.
    """
    if is_tensor(value):
        return change(value)
    if isinstance(value, dict):
        changed = {key: map_tensors(item, change) for key, item in value.items()}
        return changed if type(value) is dict else type(value)(changed)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(map_tensors(item, change) for item in value))
    if isinstance(value, (list, tuple)):
        return type(value)(map_tensors(item, change) for item in value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in dataclasses.fields(value) if field.init]
        return dataclasses.replace(
            value, **{name: map_tensors(getattr(value, name), change) for name in names}
        )
    return value


def pinned(value: T) -> T:
    """Returns a copy with tensors in page-locked memory, by `value.pin_memory()` if it exists."""
    if hasattr(value, "pin_memory"):
        return value.pin_memory()
    return map_tensors(value, lambda tensor: tensor.pin_memory())


def is_tensor(value: object) -> "TypeGuard[torch.Tensor]":
    """Returns whether a value is a tensor. It is False as long as torch is not imported."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def _collated(values: Sequence[Any], join: Callable[[Any], Any]) -> Any:
    """Returns one value of the type of `values`, or a list if they differ in type or fields."""
    first = values[0]
    kind = type(first)
    if kind is str or any(type(value) is not kind and not is_tensor(value) for value in values):
        return list(values)
    if is_tensor(first):
        return join(values) if all(map(is_tensor, values)) else list(values)
    if isinstance(first, dict):
        if any(value.keys() != first.keys() for value in values):
            return list(values)
        fields = {key: _collated([value[key] for value in values], join) for key in first}
        return fields if kind is dict else kind(fields)
    if dataclasses.is_dataclass(first):
        names = [field.name for field in dataclasses.fields(first) if field.init]
        return kind(
            **{
                name: _field(name, [getattr(value, name) for value in values], join)
                for name in names
            }
        )
    if isinstance(first, tuple) and hasattr(first, "_fields"):
        return kind(*(_collated(column, join) for column in zip(*values)))
    return list(values)


def _field(name: str, values: list[Any], join: Callable[[Any], Any]) -> Any:
    """Collates the values of one field. Fields about the origin of samples (`__key__`) become
    lists, or None if all are None.
    """
    if name.startswith("__"):
        return None if all(value is None for value in values) else values
    return _collated(values, join)


def _padded(values: "Sequence[torch.Tensor]") -> "torch.Tensor":
    """Concatenates along the first dimension. In each other dimension the result is as large as the
    largest tensor, filled up with zeros.
    """
    shapes = [value.shape[1:] for value in values]
    if any(len(shape) != len(shapes[0]) for shape in shapes):
        raise ValueError(
            "tensors must have equally many dimensions, but have shapes "
            f"{[tuple(s) for s in shapes]}"
        )
    size = [max(extents) for extents in zip(*shapes)]
    # Shapes [2, 3] and [1, 5] -> [3, 5]: the first fills [0:2, :3], the second [2:3, :5].
    result = values[0].new_zeros([sum(len(value) for value in values), *size])
    start = 0
    for value in values:
        region = (slice(start, start + len(value)), *map(slice, value.shape[1:]))
        result[region] = value
        start += len(value)
    return result
