"""pure. The cost of a pack in seconds, as `calibrate` fits it to measured packs, and the file that
training reads it from.

    {"linear": 4.1e-05, "quadratic": 2.3e-09, "fixed": 0.0021,
     "relative_error": {"mean": 0.03, "worst": 0.08}, "model": {"num_layers": 4, ...},
     "points": [{"num_sequences": 1, "sequence_length": 2048, "seconds": 0.1}, ...],
     "device": "NVIDIA H100", "versions": {"torch": "2.13.0", ...}, "date": "2026-11-20"}

Training needs the first three and `model`; the rest says how they came about.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import combinations
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from megatron.packing.quoting import shown
from megatron.packing.scheduling.cost import PackCost
from megatron.packing.user_files import read_json

_TERMS = ("linear", "quadratic", "fixed")
_REQUIRED = (*_TERMS, "model")
_REMARKS = ("relative_error", "points", "device", "versions", "date")
_REMEASURE = "measure it again with megatron-sft calibrate"


@dataclass(frozen=True, kw_only=True)
class Point:
    """A pack of equal sequences, and the time of its forward and backward pass."""

    num_sequences: int
    sequence_length: int
    seconds: float


class Fit(NamedTuple):
    """A pack cost in seconds, and its relative errors at the points it was fitted to."""

    cost: PackCost
    mean_error: float
    worst_error: float


def fit_pack_cost(points: Sequence[Point], dummy: Point) -> Fit:
    """Fits the non-negative coefficients with the least sum of squared relative errors.

    Args:
        dummy: a pack of next to nothing. The fixed cost is at least its time without its sequences'
            cost, or a hundredth of its time: at a fixed cost of 0 empty packs would be free.

    Raises ValueError where points do not determine the terms, or time does not grow with tokens.
    """
    terms = np.array([_terms_of(point) for point in points]).reshape(-1, len(_TERMS))
    seconds = np.array([point.seconds for point in points])
    if len(points) < len(_TERMS) or np.linalg.matrix_rank(terms / terms.max(axis=0)) < len(_TERMS):
        raise ValueError(
            "the measured packs do not determine linear, quadratic and fixed cost; "
            "measure longer packs"
        )
    least = min(float(seconds.min()), dummy.seconds)
    if least <= 0:
        raise ValueError(f"each measured time must be above 0, but the least is {least}")
    # Divided by the measured time, each residual is a relative error: else the longest packs, which
    # take a thousand times as long as the shortest, would decide alone.
    coefficients = _non_negative_least_squares(terms / seconds[:, None], np.ones(len(points)))
    if coefficients[0] == 0:
        raise ValueError(
            "the measured times do not grow with the number of tokens; measure longer packs, on a "
            "machine at rest"
        )
    of_sequences = float(np.dot(_terms_of(dummy)[:2], coefficients[:2]))
    coefficients[2] = max(coefficients[2], dummy.seconds - of_sequences, dummy.seconds / 100)
    errors = np.abs(terms @ coefficients / seconds - 1)
    return Fit(PackCost(*coefficients.tolist()), float(errors.mean()), float(errors.max()))


def _terms_of(point: Point) -> tuple[float, float, float]:
    num_tokens = point.num_sequences * point.sequence_length
    return float(num_tokens), float(num_tokens * point.sequence_length), 1.0


def _non_negative_least_squares(matrix: np.ndarray, target: np.ndarray) -> np.ndarray:
    """Solves exactly, by trying all sets of columns that may be above 0: there are seven."""
    # Columns are numbers of tokens, their squares and ones: of like size they are solved well.
    scale = np.linalg.norm(matrix, axis=0)
    scaled, num_columns = matrix / scale, matrix.shape[1]
    best, best_residual = np.zeros(num_columns), math.inf
    for size in range(1, num_columns + 1):
        for columns in map(list, combinations(range(num_columns), size)):
            solution = np.zeros(num_columns)
            solution[columns] = np.linalg.lstsq(scaled[:, columns], target, rcond=None)[0]
            residual = float(np.linalg.norm(scaled @ solution - target))
            if (solution >= 0).all() and residual < best_residual:
                best, best_residual = solution, residual
    return best / scale


@dataclass(frozen=True, kw_only=True)
class FittedCost:
    """Pack cost of the whole model on one device, as a file of `calibrate` holds it."""

    cost: PackCost
    """In seconds."""
    model: Mapping[str, Any]
    """The measured model, as `settings.model_of` names it."""
    path: Path

    def of_rank(self, *, tensor_parallel_size: int, context_parallel_size: int) -> PackCost:
        """Returns the seconds of a pack where each layer and each sequence is shared by so many
        ranks.

        Work is assumed to be shared evenly and communication to be hidden: a lower bound. The fixed
        cost is mostly moving weights through memory: tensor parallel divides them, context parallel
        does not. Pipeline stages are in the step-time model.
        """
        ranks = tensor_parallel_size * context_parallel_size
        return self.cost.shared_by(ranks, tensor_parallel_size)

    def check_model(self, model: Mapping[str, Any]) -> None:
        """Raises ValueError with the differences if the run's `model` is not the measured one."""
        differing = [
            f"{name} is {json.dumps(self.model.get(name, 'missing'))} there, but "
            f"{json.dumps(mine)} here"
            for name, mine in model.items()
            if self.model.get(name, "missing") != mine
        ]
        if differing:
            raise ValueError(
                f"--pack-cost {self.path} was measured for another model: "
                f"{'; '.join(differing)}; {_REMEASURE}"
            )


def write_fitted_cost(
    path: Path | str,
    fit: Fit,
    points: Sequence[Point],
    model: Mapping[str, Any],
    circumstances: Mapping[str, Any],
) -> None:
    """Writes the file; `circumstances` are device, versions and date."""
    content = {
        **{name: getattr(fit.cost, name) for name in _TERMS},
        "relative_error": {"mean": fit.mean_error, "worst": fit.worst_error},
        "model": dict(model),
        **circumstances,
        "points": [asdict(point) for point in points],
    }
    Path(path).write_text(json.dumps(content, indent=2, allow_nan=False) + "\n", encoding="utf-8")


def read_fitted_cost(path: Path | str) -> FittedCost:
    """Reads what `write_fitted_cost` wrote.

    Raises ValueError, naming file and key, for anything else.
    """
    path = Path(path)
    try:
        content = read_json(path)
    except ValueError as failure:
        raise ValueError(f"--pack-cost {path} cannot be read: {failure}; {_REMEASURE}") from None
    if not isinstance(content, dict):
        raise ValueError(
            f"--pack-cost {path} must hold an object, but holds {type(content).__name__}; "
            f"{_REMEASURE}"
        )
    for key in _REQUIRED:
        if key not in content:
            raise ValueError(f"--pack-cost {path}: key '{key}' is missing; {_REMEASURE}")
    for key in content:
        if key not in (*_REQUIRED, *_REMARKS):
            raise ValueError(f"--pack-cost {path}: unknown key {shown(key)}; {_REMEASURE}")
    for key in _TERMS:
        _check_term(path, key, content[key])
    if not isinstance(content["model"], dict):
        raise ValueError(
            f"--pack-cost {path}: 'model' must be an object, but is {shown(content['model'])}; "
            f"{_REMEASURE}"
        )
    terms: dict[str, Any] = {key: float(content[key]) for key in _TERMS}
    cost = PackCost(**terms)
    return FittedCost(cost=cost, model=content["model"], path=path)


def _check_term(path: Path, key: str, value: Any) -> None:
    is_number = (
        isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    )
    if not is_number or value < 0 or (key == "linear" and value == 0):
        limit = "above 0" if key == "linear" else "of at least 0"
        raise ValueError(
            f"--pack-cost {path}: '{key}' must be a number {limit}, but is {shown(value)}; "
            f"{_REMEASURE}"
        )
