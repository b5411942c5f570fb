"""mcore. Further figures of a step, with packing and without: the place to add a metric.

An entry of `FIGURES` computes this rank's part of a number, and says whether ranks are summed or
the maximum is taken (see `reduction`). By that alone it is in "figures" of `metrics.jsonl`, in
TensorBoard and in Weights & Biases. A number for log lines and the report is a field of
`sft.report.metrics` instead.

    "samples_of_one_token": Figure(lambda batch: batch.lengths.count(1), is_max=False)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from megatron.sft.training.step_account import StepFigures, counts_samples
from megatron.sft.training.step_batches import StepBatch


class Figure(NamedTuple):
    """A number of a step."""

    of: Callable[[StepBatch], float]
    """Function from this rank's batch to its part. A sum counts one rank of each replica."""
    is_max: bool
    """True to take the maximum over ranks, False to sum."""


FIGURES = {
    "longest_sequence": Figure(lambda batch: max(batch.lengths, default=0), is_max=True),
}
"""longest_sequence: tokens of the longest sequence, or of the longest path of a tree.

No entry may be a time: tests compare lines of equal steps to the bit.
"""


def figures_of(batch: StepBatch) -> StepFigures:
    """Returns this rank's part of all figures of a batch."""
    counts = counts_samples()
    return StepFigures(
        sums={
            name: figure.of(batch) if counts else 0.0
            for name, figure in FIGURES.items()
            if not figure.is_max
        },
        maxima={name: figure.of(batch) for name, figure in FIGURES.items() if figure.is_max},
    )
