"""pure. Named fields of samples and batches, which may be dataclasses, named tuples or dicts:
converts one class to another, and collates samples field by field.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from operator import attrgetter
from typing import Any

from megatron.blending.arguments import nearest, shown
from megatron.blending.energon._encoding.collate import generic_batch
from megatron.blending.energon._encoding.source_info import Sources


class FieldError(ValueError):
    """A sample cannot be converted: its class lacks a field of the other, or has no fields."""


def field_names(value: object) -> list[str]:
    """Returns the field names of an object or a class; raises FieldError if it has none."""
    if isinstance(value, Mapping):
        return list(value)
    if dataclasses.is_dataclass(value):
        return [field.name for field in dataclasses.fields(value) if field.init]
    if hasattr(value, "_fields"):
        return list(value._fields)
    name = value.__name__ if isinstance(value, type) else type(value).__name__
    raise FieldError(
        f"{name} must be a dataclass, a named tuple or a dict; override the method that makes it"
    )


def has_fields(value: object) -> bool:
    """Returns whether an object, or a class, has named fields."""
    kind = value if isinstance(value, type) else type(value)
    return dataclasses.is_dataclass(kind) or issubclass(kind, Mapping) or hasattr(kind, "_fields")


def required_names(kind: Any) -> set[str]:
    """Returns the fields of a class that have no default; none for a dict."""
    if issubclass(kind, Mapping):
        return set()
    if not dataclasses.is_dataclass(kind):
        return set(kind._fields) - kind._field_defaults.keys()
    missing = dataclasses.MISSING
    fields = [field for field in dataclasses.fields(kind) if field.init]
    return {
        field.name
        for field in fields
        if field.default is missing and field.default_factory is missing
    }


Action = Callable[[list[Any]], Any]


def batch_samples(
    samples: Sequence[Any],
    batch_type: Any,
    actions: Mapping[str, Action] | None = None,
    default_action: Action = generic_batch,
    **fields: Any,
) -> Any:
    """Returns a batch of samples, collated field by field. Raises FieldError if the samples lack a
    field without a default.

    Args:
        batch_type: class of the batch. If it is a dict, the batch has the fields of the first
            sample.
        actions: name of a field -> function from its values to the batch's value.
        default_action: function for all other fields.
        fields: fields of the batch that are not collated.
    """
    first = samples[0]
    is_mapping = isinstance(first, Mapping)
    names = field_names(first if issubclass(batch_type, Mapping) else batch_type)
    for name in names:
        if name in fields:
            continue
        if is_mapping and name in first:
            fields[name] = [sample[name] for sample in samples]
        elif not is_mapping and hasattr(first, name):
            fields[name] = list(map(attrgetter(name), samples))
        elif name in required_names(batch_type):
            raise _missing(name, batch_type, first)
        else:
            continue
        action = (actions or {}).get(name)
        fields[name] = (
            action(fields[name]) if action else _column(name, fields[name], default_action)
        )
    return batch_type(**fields)


def converted(value: object, kind: Any) -> Any:
    """Returns an object of the class `kind` with the fields of `value`, matched by name. Raises
    FieldError if `value` lacks a field without a default.
    """
    names = field_names(value)
    has = {
        name: value[name] if isinstance(value, Mapping) else getattr(value, name) for name in names
    }
    if issubclass(kind, Mapping):
        return kind(has)
    for name in sorted(required_names(kind) - has.keys()):
        raise _missing(name, kind, value)
    return kind(**{name: has[name] for name in field_names(kind) if name in has})


def is_made_of(kind: type, value: object) -> bool:
    """Returns whether the fields of `value` are exactly right for a class: it has all of them, and
    requires no other.
    """
    if not has_fields(kind) or not has_fields(value):
        return False
    names = set(field_names(value))
    return issubclass(kind, Mapping) or required_names(kind) <= names <= set(field_names(kind))


def _missing(name: str, kind: type, value: object) -> FieldError:
    hint = nearest(name, field_names(value), "its fields")
    return FieldError(
        f"{kind.__name__} has a field {shown(name)} that {type(value).__name__} lacks; {hint}"
    )


def _column(name: str, values: list[Any], action: Action) -> object:
    """Collates the values of one field. Fields about the origin (`__key__`) become lists, or None
    if all are None.
    """
    if not name.startswith("__"):
        return action(values)
    if all(value is None for value in values):
        return None
    if name == "__sources__":
        return Sources(chain.from_iterable(filter(None, values)))
    return tuple(values) if name == "__restore_key__" else values
