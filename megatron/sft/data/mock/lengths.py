"""pure. Reads a distribution of lengths for mock data from the keys of a JSON object.

    {"type": "lognormal", "min_seq_len": 64, "max_seq_len": 8192, "mean_seq_len": 900,
     "lognormal_sigma": 1.1}
    {"type": "empirical", "preset": "chat"}

A new type is a function in `DISTRIBUTIONS`, and a class in `distributions`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from megatron.blending.arguments import nearest
from megatron.packing.quoting import shortened, shown
from megatron.sft.data.mock.distributions import (
    EmpiricalLengths,
    FloatArray,
    LengthDistribution,
    LognormalLengths,
    MixtureLengths,
    UniformLengths,
)

FLAG = "--sft-mock-dataset-config-json"

PRESETS: dict[str, tuple[tuple[float, int], ...]] = {
    "chat": (
        (0, 16),
        (0.1, 90),
        (0.25, 190),
        (0.5, 400),
        (0.75, 850),
        (0.9, 1600),
        (0.99, 4600),
        (1, 16384),
    ),
    "long_documents": (
        (0, 256),
        (0.1, 1700),
        (0.25, 3500),
        (0.5, 7200),
        (0.75, 14500),
        (0.9, 29000),
        (1, 131072),
    ),
}
"""Quantile tables, (share of samples, tokens). Made by hand: roughly the shape of public
instruction and chat corpora (many short answers, a long tail) and of public collections of long
documents; not measured on any one of them.
"""

_MIN_SIGMA, _MAX_SIGMA = 0.001, 1e6
_JSON_NAMES = {int: "an integer", float: "a number", str: "a string", list: "a list"}


def parse_distribution(config: Mapping[str, Any], path: str = "") -> LengthDistribution:
    """Returns the distribution of a JSON object: "type" names it, the other keys are its
    parameters. Raises ValueError, naming flag and key, if one is wrong.

    path: text before keys in errors, for an object inside another: "components[0].".
    """
    name, keys = take_key(config, "type", str, path)
    if name not in DISTRIBUTIONS:
        raise config_error(
            f"{path}type must be one of {', '.join(DISTRIBUTIONS)}, but is {shown(name)}"
        )
    return DISTRIBUTIONS[name](keys, path)


def read_keys(
    config: Mapping[str, Any],
    required: Mapping[str, type],
    optional: Mapping[str, type] | None = None,
    path: str = "",
) -> dict[str, Any]:
    """Returns `config` after checking its keys and their types. Raises ValueError, with flag, key
    and the most similar known key, if one is wrong.

    Integers must be at least 1, floats finite and above 0. An int is accepted as a float.
    """
    known = {**required, **(optional or {})}
    for key in config:
        if key not in known:
            raise config_error(f"unknown key {path}{key}; {nearest(key, known, 'known here')}")
    for key in required:
        take_key(config, key, known[key], path)
    for key, value in config.items():
        _check_value(value, known[key], path + key)
    return dict(config)


def take_key(
    config: Mapping[str, Any], key: str, kind: type, path: str = ""
) -> tuple[Any, dict[str, Any]]:
    """Returns the value of `key`, and a dict of the other keys. Raises ValueError if the key is
    missing, or its value has another type.
    """
    if key not in config:
        raise config_error(f"key {path}{key} is missing; {nearest(key, config, 'given here')}")
    rest = dict(config)
    value = rest.pop(key)
    _check_value(value, kind, path + key)
    return value, rest


def config_error(text: str) -> ValueError:
    """Returns an error that begins with the flag."""
    return ValueError(f"{FLAG}: {shortened(text)}")


def _check_value(value: object, kind: type, name: str) -> None:
    accepted = (int, float) if kind is float else kind
    if not isinstance(value, accepted) or isinstance(value, bool):
        raise config_error(f"{name} must be {_JSON_NAMES[kind]}, but is {shown(value)}")
    if isinstance(value, (int, float)) and not 0 < value < math.inf:
        raise config_error(f"{name} must be above 0 and finite, but is {shown(value)}")


def _check_order(values: Mapping[str, Any], path: str) -> None:
    if values["min_seq_len"] > values["max_seq_len"]:
        raise config_error(
            f"{path}min_seq_len {values['min_seq_len']} must be at most {path}max_seq_len "
            f"{values['max_seq_len']}"
        )


def _parse_lognormal(config: Mapping[str, Any], path: str) -> LengthDistribution:
    kinds = {
        "min_seq_len": int,
        "max_seq_len": int,
        "mean_seq_len": float,
        "lognormal_sigma": float,
    }
    values = read_keys(config, kinds, path=path)
    _check_order(values, path)
    shortest, longest, mean, sigma = (values[key] for key in kinds)
    if not (shortest < mean < longest or shortest == mean == longest):
        raise config_error(
            f"{path}mean_seq_len must lie between {path}min_seq_len {shortest} and "
            f"{path}max_seq_len {longest}, the means that lengths in that range can have, but is "
            f"{mean}"
        )
    if sigma < _MIN_SIGMA:
        raise config_error(
            f"{path}lognormal_sigma must be at least {_MIN_SIGMA}, but is {sigma}; use type "
            "constant"
        )
    if sigma > _MAX_SIGMA:
        raise config_error(f"{path}lognormal_sigma must be at most {_MAX_SIGMA}, but is {sigma}")
    return LognormalLengths(shortest, longest, mean, sigma)


def _parse_uniform(config: Mapping[str, Any], path: str) -> LengthDistribution:
    values = read_keys(config, {"min_seq_len": int, "max_seq_len": int}, path=path)
    _check_order(values, path)
    return UniformLengths(values["min_seq_len"], values["max_seq_len"])


def _parse_constant(config: Mapping[str, Any], path: str) -> LengthDistribution:
    length = read_keys(config, {"seq_len": int}, path=path)["seq_len"]
    return UniformLengths(length, length)


def _parse_mixture(config: Mapping[str, Any], path: str) -> LengthDistribution:
    components = read_keys(config, {"components": list}, path=path)["components"]
    if len(components) != 2 or not all(isinstance(component, dict) for component in components):
        raise config_error(
            f"{path}components must be two distributions, each with a weight, but "
            f"is {shown(components)}"
        )
    parsed, weights = [], []
    for i, component in enumerate(components):
        inner = f"{path}components[{i}]."
        weight, keys = take_key(component, "weight", float, inner)
        weights.append(weight)
        parsed.append(parse_distribution(keys, inner))
    return MixtureLengths(parsed[0], parsed[1], weights[0] / sum(weights))


def _parse_empirical(config: Mapping[str, Any], path: str) -> LengthDistribution:
    values = read_keys(config, {}, {"preset": str, "quantiles": list, "max_seq_len": int}, path)
    if ("preset" in values) == ("quantiles" in values):
        raise config_error(f"give either {path}preset or {path}quantiles")
    if "preset" in values:
        if values["preset"] not in PRESETS:
            raise config_error(
                f"{path}preset must be one of {', '.join(PRESETS)}, but is "
                f"{shown(values['preset'])}"
            )
        table = np.array(PRESETS[values["preset"]], np.float64)
    else:
        table = _parse_quantiles(values["quantiles"], path)
    shares, tokens = table.T
    if "max_seq_len" not in values:
        return EmpiricalLengths(shares, tokens)
    longest = values["max_seq_len"]
    if not tokens[0] < longest <= tokens[-1]:
        raise config_error(
            f"{path}max_seq_len must be above {tokens[0]:.0f} and at most {tokens[-1]:.0f}, the "
            f"ends of the table, but is {longest}"
        )
    # Truncate at `longest`: scale the shares below it so that they end at 1. Clipping would instead
    # make many samples exactly `longest` tokens long.
    share_kept = np.interp(longest, tokens, shares)
    inside = tokens < longest
    return EmpiricalLengths(
        np.append(shares[inside] / share_kept, 1.0), np.append(tokens[inside], longest)
    )


def _parse_quantiles(rows: list[Any], path: str) -> FloatArray:
    """Returns float64 [n, 2]: share of samples, tokens."""
    is_table = len(rows) > 1 and all(
        isinstance(row, list)
        and len(row) == 2
        and all(type(number) in (int, float) for number in row)
        for row in rows
    )
    table = np.array(rows if is_table else [[0.0, 0.0]], np.float64)
    shares, tokens = table.T
    ascending = bool((np.diff(table, axis=0) > 0).all())
    if not (
        is_table
        and ascending
        and shares[0] == 0
        and shares[-1] == 1
        and tokens[0] >= 1
        and (tokens % 1 == 0).all()
    ):
        raise config_error(
            f"{path}quantiles must be pairs [share of samples, tokens], both ascending, shares "
            f"from 0 to 1, tokens whole and at least 1, but are {shown(rows)}"
        )
    return table


DISTRIBUTIONS: dict[str, Callable[[Mapping[str, Any], str], LengthDistribution]] = {
    "lognormal": _parse_lognormal,
    "uniform": _parse_uniform,
    "constant": _parse_constant,
    "mixture": _parse_mixture,
    "empirical": _parse_empirical,
}
"""Reader of the other keys of an object with this "type": (keys, path for errors) -> distribution.
"""
