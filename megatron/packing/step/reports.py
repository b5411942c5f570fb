"""tensor. Reports of data ranks to the scheduling rank: what each has to schedule in a step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from megatron.packing.batch.columns import PAYLOAD_COSTS, IntArray, Schema
from megatron.packing.batch.layout import Alignment
from megatron.packing.batch.nodes import SampleSizes
from megatron.packing.batch.tree_shapes import ShapedSamples
from megatron.packing.step.delay import Delayed
from megatron.packing.step.load import Loaded

FloatArray = npt.NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class RankReport:
    """The sequences that a data rank has to schedule in a step; int64 [n] each."""

    lengths: IntArray
    fetch: IntArray
    """Number of the `next` call of this step that gave each sequence; 0 for those that waited."""
    steps_delayed: IntArray
    num_loss_tokens: IntArray
    schema: Schema
    ragged: Mapping[str, IntArray] = field(default_factory=dict)
    """Rows of each sequence in columns of further scopes (`Sizes.ragged`); empty without any."""
    trees: SampleSizes | None = None
    """Sizes of each sequence, if any is a tree."""
    part: IntArray | None = None
    """0 for a whole sample, 1, 2, ... for the parts of one that was cut, which are trained in one
    step; None if all are whole.
    """
    payload_costs: FloatArray | None = None
    """float64 [n], if any has a payload."""
    num_dropped: int = 0
    num_truncated: int = 0
    ended: bool = False
    error: str | None = None

    @classmethod
    def of(
        cls,
        loaded: Loaded,
        delayed: Delayed | None,
        shaped_samples: ShapedSamples,
        alignment: Alignment,
    ) -> RankReport:
        """Returns the report of a rank with these sequences: those that waited, then those that it
        loaded.
        """
        waited = np.empty(0, np.int64) if delayed is None else delayed.steps
        samples, original_index = shaped_samples
        # 1 waited and 2 loaded, of which a tree is cut in two: original_index 0 1 2 2. All parts
        # have the fetch of their tree.
        return cls(
            lengths=samples.lengths,
            fetch=np.concatenate((np.zeros_like(waited), loaded.fetch))[original_index],
            steps_delayed=np.concatenate((waited, np.zeros_like(loaded.fetch)))[original_index],
            num_loss_tokens=samples.num_loss_tokens,
            schema=samples.schema,
            ragged=samples.sizes.ragged,
            trees=SampleSizes.of_trees(samples, alignment),
            part=shaped_samples.parts(),
            payload_costs=samples.columns.get(PAYLOAD_COSTS),
            num_dropped=loaded.num_dropped,
            num_truncated=loaded.num_truncated,
            ended=loaded.ended,
            error=loaded.error,
        )

    @property
    def parts(self) -> IntArray:
        """`part`, 0 for all if all are whole."""
        return np.zeros_like(self.lengths) if self.part is None else self.part


class Reports(NamedTuple):
    """The reports of all ranks, one after the other: int64 [N] each."""

    source_rank: IntArray
    lengths: IntArray
    fetch: IntArray
    steps_delayed: IntArray
    num_loss_tokens: IntArray
    part: IntArray
    trees: SampleSizes | None
    """None if no rank has trees."""
    payload_costs: FloatArray | None
    """float64 [N]; None if no rank has payloads."""

    @classmethod
    def of(cls, reports: Sequence[RankReport], alignment: Alignment) -> Reports:
        """Returns them joined."""
        of_sequences = {
            name: np.concatenate([getattr(report, name) for report in reports])
            for name in ("lengths", "fetch", "steps_delayed", "num_loss_tokens")
        }
        parts = [report.parts for report in reports]
        sizes = [report.lengths.size for report in reports]
        return cls(
            source_rank=np.repeat(np.arange(len(reports)), sizes),
            part=np.concatenate(parts),
            trees=_joined_trees(reports, alignment),
            payload_costs=_joined_costs(reports),
            **of_sequences,
        )

    def padded(self, alignment: Alignment) -> tuple[IntArray, IntArray | None]:
        """Returns the tokens that each occupies, and the squares if they are not L^2."""
        if self.trees is None:
            return alignment.padded_length(self.lengths), None
        return self.trees.padded, self.trees.padded_squares

    def kept(self, is_kept: npt.NDArray[np.bool_]) -> Reports:
        """Returns some of the sequences."""
        trees = self.trees
        if trees is not None:
            trees = SampleSizes(*(values[is_kept] for values in trees))
        columns = {
            name: values[is_kept]
            for name, values in self._asdict().items()
            if name != "trees" and values is not None
        }
        return self._replace(**columns, trees=trees)


def _joined_trees(reports: Sequence[RankReport], alignment: Alignment) -> SampleSizes | None:
    if all(report.trees is None for report in reports):
        return None
    whole = [
        report.trees or SampleSizes.of_sequences(report.lengths, alignment) for report in reports
    ]
    return SampleSizes(*(np.concatenate(values) for values in zip(*whole)))


def _joined_costs(reports: Sequence[RankReport]) -> FloatArray | None:
    if all(report.payload_costs is None for report in reports):
        return None
    return np.concatenate(
        [
            np.zeros(report.lengths.size) if report.payload_costs is None else report.payload_costs
            for report in reports
        ]
    )
