"""pure. Turns blend weights in tokens into weights in samples, by the mean length of each source.

    weights 1 and 1 in tokens, mean lengths 100 and 400    ->    0.01 and 0.0025 in samples

The mean is estimated from 64 evenly spread samples, the same on every rank. If the sizes of all
records in bytes are known, a linear regression of tokens on bytes gives the mean: the plain mean of
64 samples with very different lengths would be a poor estimate.
"""

import math
from collections.abc import Callable, Sequence
from typing import Protocol, runtime_checkable

from megatron.blending.formats.record import Record, RecordSource
from megatron.blending.loading.sources import LoadedDataset, source_of
from megatron.blending.order.weights import Weight, WeightSchedule
from megatron.blending.streams.failures import SkipSample
from megatron.blending.streams.source import SourceDataset

_PROBES = 64


Count = Callable[[SourceDataset, Record, int], int]
"""Function (source data set, record, its number) -> tokens of all samples of the record. It raises
SkipSample for a record without a sample.
"""


@runtime_checkable
class KnowsBytes(RecordSource, Protocol):
    """A source that may know the sizes of its records."""

    def num_bytes(self, records: range) -> int | None:
        """Returns the bytes of consecutive records in sum; None if they are not known."""


def by_tokens(
    loaded: Sequence[LoadedDataset],
    schedule: WeightSchedule | None,
    mean: Callable[[LoadedDataset], float],
) -> tuple[list[LoadedDataset], WeightSchedule | None]:
    """Returns the sources and the schedule with their weights in tokens turned into weights in
    samples.

    mean: function from a source to its mean number of tokens per record, such as `mean_tokens`. It
        is called only for sources with a weight.
    """
    means = [mean(one) if one.weight or schedule else 1.0 for one in loaded]
    weights = weights_by_tokens([one.weight for one in loaded], means)
    changed = [
        LoadedDataset(one.dataset, weight, one.entry, one.repetitions)
        for one, weight in zip(loaded, weights)
    ]
    if schedule is not None:
        points = tuple(
            (step, weights_by_tokens(weights, means)) for step, weights in schedule.points
        )
        schedule = WeightSchedule(
            points, schedule.outputs_per_step, schedule.kind, schedule.num_pieces
        )
    return changed, schedule


def weights_by_tokens(weights: Sequence[Weight], mean_tokens: Sequence[float]) -> tuple[float, ...]:
    """Returns the weights in samples for `weights` in tokens: each divided by its mean length."""
    if len(weights) != len(mean_tokens):
        raise ValueError(
            f"there must be a mean for each of {len(weights)} weights, but there are "
            f"{len(mean_tokens)}"
        )
    for number, (weight, mean) in enumerate(zip(weights, mean_tokens)):
        if weight and not 0 < mean < math.inf:
            raise ValueError(
                f"mean tokens of source {number} must be above 0, but are {mean}; check its samples"
            )
    return tuple(
        float(weight) / mean if weight else 0.0 for weight, mean in zip(weights, mean_tokens)
    )


def mean_tokens(loaded: LoadedDataset, count: Count) -> float:
    """Returns the estimated mean number of tokens per record of a source, in milliseconds. Raises
    ValueError if none of the probed samples can be used.
    """
    entry = source_of(loaded.dataset)
    # Every tenth of 640 records; all of 3 records, which a set names once.
    places = sorted({probe * len(entry.source) // _PROBES for probe in range(_PROBES)})
    lengths: list[int] = []
    probed, fault = [], ""
    for place in places:
        try:
            lengths.append(count(entry, entry.source[place], place))
            probed.append(place)
        except SkipSample:
            lengths.append(0)
            probed.append(place)
        except NotImplementedError as error:
            raise ValueError(str(error)) from None
        except Exception as error:  # as in the stream: a sample that fails is left out
            fault = f"; the last: {type(error).__name__}: {' '.join(str(error).split())}"
    if not any(lengths):
        raise ValueError(
            f"{loaded.entry.where}: none of {len(places)} probed samples has tokens{fault}"
        )
    return _mean_by_bytes(entry.source, probed, lengths) or sum(lengths) / len(lengths)


def _mean_by_bytes(
    source: RecordSource, places: Sequence[int], lengths: Sequence[int]
) -> float | None:
    """Returns the mean length by a regression of lengths on bytes; None if bytes are not known, or
    the regression is not reliable.
    """
    if (
        not isinstance(source, KnowsBytes)
        or (total := source.num_bytes(range(len(source)))) is None
    ):
        return None
    sizes = [source.num_bytes(range(place, place + 1)) or 0 for place in places]
    estimate = _on_line(sizes, lengths, total / len(source))
    # The slope of few samples is unreliable. A mean below the shortest of them must be wrong.
    if estimate is None or len(sizes) <= 2:
        return None
    return estimate if estimate >= min(lengths) and estimate > 0 else None


def _on_line(sizes: Sequence[int], lengths: Sequence[int], size: float) -> float | None:
    """Returns the length at a size on the regression line; None if all sizes are equal."""
    mean, mean_size = sum(lengths) / len(lengths), sum(sizes) / len(sizes)
    variance = sum((each - mean_size) ** 2 for each in sizes)
    if not variance:
        return None
    slope = sum((each - mean_size) * length for each, length in zip(sizes, lengths)) / variance
    return mean + slope * (size - mean_size)
