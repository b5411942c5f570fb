"""pure. Weights of a blend that change over training steps, as the user writes them down.

    {"kind": "linear", "points": [[0, [5, 3, 2]], [1000, [1, 1, 1]]]}

At each point stand the step and a weight for every source, in the order of the metadataset; `kind` is linear between
points, or step. Before the first point there is none: it is at step 0.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from megatron.blending.order.weights import WeightSchedule

_FLAG = "--blend-weight-schedule"
_FORM = '{"kind": "step" or "linear", "points": [[step, [weight of each source]], ...]}'


def parse_schedule(text: str, samples_per_step: int) -> WeightSchedule:
    """Read JSON, or the file of that name; ValueError, one line, for what is no schedule."""
    try:
        written = json.loads(text if text.lstrip().startswith("{") else Path(text).read_text(encoding="utf-8"))
    except (OSError, ValueError) as failure:
        raise ValueError(f"{_FLAG} must be {_FORM}, or a file with it, but: {failure}") from None
    try:
        if not set(written) <= {"kind", "points"}:
            raise TypeError
        points = tuple((_step(step), tuple(weights)) for step, weights in written["points"])
        return WeightSchedule(points, samples_per_step, written.get("kind", "step"))
    except (KeyError, TypeError):
        raise ValueError(f"{_FLAG} must be {_FORM}, but is {json.dumps(written):.100}") from None
    except ValueError as failure:
        raise ValueError(f"{_FLAG}: {failure}") from None


def _step(step: Any) -> int:
    if type(step) is not int:
        raise TypeError
    return step
