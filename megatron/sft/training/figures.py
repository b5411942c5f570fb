"""mcore. Figures of a step of which each rank has a part, with packing and without.

An entry of `FIGURES` is summed up over all ranks, or the largest is taken (see `reduction`). It
needs nothing else to be part of "figures" in `metrics.jsonl` and to be drawn by TensorBoard and
Weights & Biases. The log's lines and the report of a run show none of them: what stands there is a
field of `sft.report.metrics`.

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
    """Part of this rank. A sum takes that of one rank per data-parallel replica."""
    is_max: bool


FIGURES = {
    "longest_sequence": Figure(lambda batch: max(batch.lengths, default=0), is_max=True),
}
"""longest_sequence: tokens of the longest sequence; of a tree, of its longest path.

No times: lines of equal steps are compared to the bit.
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
