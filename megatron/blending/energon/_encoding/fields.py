"""pure. Samples and batches have named fields in common: of a dataclass, a named tuple or a
dict."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from operator import attrgetter
from typing import Any

from megatron.blending.arguments import nearest
from megatron.blending.energon._encoding.collate import generic_batch
from megatron.blending.energon._encoding.source_info import Sources


class FieldError(ValueError):
    """Two types do not fit: no sample of the one makes the other."""


def field_names(value: object) -> list[str]:
    """Returns the names of the fields of an object, or of those of a class; FieldError if it has
    none.
    """
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
    """Returns whether an object, or the objects of a class, are made of named fields."""
    kind = value if isinstance(value, type) else type(value)
    return dataclasses.is_dataclass(kind) or issubclass(kind, Mapping) or hasattr(kind, "_fields")


def required_names(kind: Any) -> set[str]:
    """Returns the fields of a class that have no default; a dict needs none."""
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
    """Returns a `batch_type` of `samples`: each of its fields collated from theirs, except those
    given as `fields`.

    `actions` say for fields by name how several values become one. A dict holds all that the first
    sample has. FieldError for a field without default that the samples lack.
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
    """Returns `value` as a `kind`, by the names of fields; FieldError for one without default that
    it lacks.
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
    """Returns whether a class has a field for each that `value` has, and needs no other."""
    if not has_fields(kind) or not has_fields(value):
        return False
    names = set(field_names(value))
    return issubclass(kind, Mapping) or required_names(kind) <= names <= set(field_names(kind))


def _missing(name: str, kind: type, value: object) -> FieldError:
    hint = nearest(name, field_names(value), "its fields")
    return FieldError(
        f"{kind.__name__} has a field {name!r} that {type(value).__name__} lacks; {hint}"
    )


def _column(name: str, values: list[Any], action: Action) -> object:
    """Collates a field of all samples; what says where they came from is listed, or None if there
    is nothing to say.
    """
    if not name.startswith("__"):
        return action(values)
    if all(value is None for value in values):
        return None
    if name == "__sources__":
        return Sources(chain.from_iterable(filter(None, values)))
    return tuple(values) if name == "__restore_key__" else values
