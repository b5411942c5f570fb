"""pure. Readers of the small files that a user names: text, JSON and YAML of bounded size and
depth.

Each fault is a ValueError that says what is the matter, without the path: whoever asked names the
file or flag. A pipe or a device is refused and not waited for, and what would take more than a
second or 100 MB to understand is not begun.
"""

from __future__ import annotations

import errno
import json
import os
import stat
from collections.abc import Mapping
from typing import Any

import yaml

from megatron.packing.quoting import shown

MAX_BYTES = 1 << 24
_MAX_VALUES = 1_000_000
_MAX_DEPTH = 64
_MAX_DIGITS = 20
_MAX_DIGITS_KEPT = 4000
_MAX_YAML_EVENTS = 50_000
_MAX_YAML_DEPTH = 8

Kind = type | tuple[type, ...]
"""Types of a value that JSON holds."""


def disk_fault(error: OSError) -> str:
    """Returns what is wrong with the place that could not be written, in the words of its owner."""
    full = {errno.ENOSPC: "the disk is full", errno.EDQUOT: "the quota of the disk is used up"}
    cause = error.strerror or str(error)
    return f"{full[error.errno]} ({cause})" if error.errno in full else cause


def read_text(path: str | os.PathLike[str], most_bytes: int = MAX_BYTES) -> str:
    """Returns the content of a UTF-8 file, without a byte-order mark."""
    try:
        # O_NONBLOCK: opening a pipe returns at once, instead of waiting for a writer.
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise ValueError("it is no regular file")
            with open(descriptor, "rb", closefd=False) as file:
                content = file.read(most_bytes + 1)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise ValueError(error.strerror or type(error).__name__) from None
    if len(content) > most_bytes:
        raise ValueError(f"it has more than {most_bytes:,} bytes")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8 at byte {error.start + 1}") from None


def read_json(
    path: str | os.PathLike[str], most_bytes: int = MAX_BYTES, *, any_integer: bool = False
) -> Any:
    """Returns what a JSON file holds; see `parse_json`."""
    return parse_json(read_text(path, most_bytes), any_integer=any_integer)


def parse_json(text: str, *, any_integer: bool = False) -> Any:
    """Returns what JSON stands for. Integers fit 64 bits, so that arithmetic with them cannot fail.

    any_integer: accept longer ones too, for files of other libraries that are written again as they
    are: transformers writes a `model_max_length` of 1000000000000000019884624838656. Whoever
    computes with one checks `fits_64_bits`.
    """
    if sum(map(text.count, "[{,")) > _MAX_VALUES:
        raise ValueError(f"not JSON that can be read: more than {_MAX_VALUES:,} values")
    try:
        value = (_decode_any if any_integer else _decode)(text)
    except json.JSONDecodeError as error:
        raise ValueError(
            f"not JSON: {error.msg.removesuffix(' at')} in line {error.lineno}, column "
            f"{error.colno}"
        ) from None
    except RecursionError:
        raise ValueError("not JSON that can be read: nested too deep") from None
    level = [value]
    for _ in range(_MAX_DEPTH):
        inner = (part for part in level if isinstance(part, (dict, list)))
        level = [part for one in inner for part in (one.values() if isinstance(one, dict) else one)]
        if not level:
            return value
    raise ValueError(f"not JSON that can be read: nested more than {_MAX_DEPTH} deep")


def check_types(
    values: object, kinds: Mapping[Kind, str], where: object, *, any_integer: bool = False
) -> None:
    """Raises ValueError unless `values`, the content of the file `where`, is an object whose values
    have these types. A key may be missing or null, and a float may be written as an integer.

    kinds: types that are allowed -> keys, with spaces between them. any_integer: whether integers
    may have more than 64 bits.
    """
    if not isinstance(values, Mapping):
        raise ValueError(f"{where} must hold a JSON object, but holds {type(values).__name__}")
    for kind, names in kinds.items():
        allowed = kind if isinstance(kind, tuple) else (kind,)
        for name in names.split():
            value = values.get(name)
            is_number = float in allowed and type(value) is int
            what = f"{where} has {name} {shown(value)}, but it must"
            if value is not None and type(value) not in allowed and not is_number:
                raise ValueError(
                    f"{what} be of type {' or '.join(each.__name__ for each in allowed)}"
                )
            if type(value) is int and not any_integer and not fits_64_bits(value):
                raise ValueError(f"{what} fit 64 bits; correct it")


def fits_64_bits(number: int) -> bool:
    """Returns whether a signed 64-bit integer can hold it."""
    return -(2**63) <= number < 2**63


def _integer(digits: str) -> int:
    number = int(digits[:_MAX_DIGITS])
    if len(digits) > _MAX_DIGITS or not fits_64_bits(number):
        raise ValueError(
            f"not JSON that can be read: the number {digits[:20]}... does not fit 64 bits"
        )
    return number


def _any_integer(digits: str) -> int:
    # Conversion takes quadratic time. Python itself converts no more than 4300 digits.
    if len(digits) > _MAX_DIGITS_KEPT:
        raise ValueError(
            f"not JSON that can be read: the number {digits[:20]}... has {len(digits):,} digits"
        )
    return int(digits)


_decode = json.JSONDecoder(parse_int=_integer).decode
_decode_any = json.JSONDecoder(parse_int=_any_integer).decode

_SafeLoader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class _Loader(_SafeLoader):
    """Refuses a key that is given twice; YAML itself lets the last one win."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            name = str(self.construct_object(key)).replace("_", "-")
            if name in seen:
                raise yaml.MarkedYAMLError(
                    problem=f"'{key.value}' is given twice", problem_mark=key.start_mark
                )
            seen.add(name)
        return super().construct_mapping(node, deep)


def read_yaml(path: str | os.PathLike[str]) -> Any:
    """Returns what a YAML file of options holds. Messages begin with ":7: ", the line, where there
    is one.
    """
    text = read_text(path)
    try:
        _check_events(text)
        return yaml.load(text, Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        line = f":{error.problem_mark.line + 1}: " if error.problem_mark else ""
        raise ValueError(f"{line}{error.problem}") from None
    except RecursionError:
        raise ValueError("nested too deep") from None
    except (yaml.YAMLError, ValueError, OverflowError) as error:
        # ValueError and OverflowError come from scalars that look like dates or numbers.
        raise ValueError(f"not YAML: {' '.join(str(error).split())}") from None


def _check_events(text: str) -> None:
    """Raises before anything is built of YAML that is deep, long, or grows by aliases of
    collections.
    """
    depth, collections = 0, set[str]()
    event: Any
    for number, event in enumerate(yaml.parse(text, Loader=_SafeLoader)):
        anchor = getattr(event, "anchor", None)
        begins = isinstance(event, (yaml.SequenceStartEvent, yaml.MappingStartEvent))
        depth += begins - isinstance(event, (yaml.SequenceEndEvent, yaml.MappingEndEvent))
        if begins and anchor is not None:
            collections.add(anchor)
        fault = f"more than {_MAX_YAML_EVENTS:,} values" if number > _MAX_YAML_EVENTS else ""
        fault = f"nested more than {_MAX_YAML_DEPTH} deep" if depth > _MAX_YAML_DEPTH else fault
        if isinstance(event, yaml.AliasEvent) and anchor in collections:
            fault = f"*{anchor} stands for a list or mapping; write it out"
        if fault:
            raise yaml.MarkedYAMLError(problem=fault, problem_mark=event.start_mark)
