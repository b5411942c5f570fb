"""pure. Turns weights in tokens into weights in samples, by the mean length of each source's
samples.

The lengths of 64 evenly spread samples are taken, encoded as the stream will encode them, so the
result is the same on every rank. If the index says how many bytes each record has, the mean comes
from the mean of the bytes, by linear regression of tokens on bytes: the plain mean of few samples
of very different lengths would be a poor estimate. The index of token files has their mean itself.
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
"""(source data set, record, its number) -> tokens of all samples that the record makes. Raises
SkipSample for a record that makes none.
"""


@runtime_checkable
class KnowsBytes(RecordSource, Protocol):
    """Its index tells the sizes of its records."""

    def num_bytes(self, records: range) -> int | None:
        """Returns the bytes of consecutive records together; None where they are not known after
        all.
        """


def by_tokens(
    loaded: Sequence[LoadedDataset],
    schedule: WeightSchedule | None,
    mean: Callable[[LoadedDataset], float],
) -> tuple[list[LoadedDataset], WeightSchedule | None]:
    """Returns sources, and a schedule, with the weights in samples that give the weights that they
    have in tokens.

    mean: mean tokens per record of a source, such as by `mean_tokens`. It is asked only of sources
    with weight.
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
    """Returns weights in samples that give `weights` in tokens, where samples of each source have
    `mean_tokens`.
    """
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
    """Returns the mean number of tokens per record of a source, by probing.

    ValueError if none of the probed samples can be used. Milliseconds.
    """
    entry = source_of(loaded.dataset)
    # Of 3 records all, of 640 every tenth; a set, as fewer records than probes would repeat.
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
    """Returns the mean length of all, by how the lengths of a few follow their bytes; None where
    bytes don't tell.
    """
    if (
        not isinstance(source, KnowsBytes)
        or (total := source.num_bytes(range(len(source)))) is None
    ):
        return None
    sizes = [source.num_bytes(range(place, place + 1)) or 0 for place in places]
    estimate = _on_line(sizes, lengths, total / len(source))
    # The slope of few samples is unreliable. A mean below the shortest of them shows that it is
    # wrong.
    if estimate is None or len(sizes) <= 2:
        return None
    return estimate if estimate >= min(lengths) and estimate > 0 else None


def _on_line(sizes: Sequence[int], lengths: Sequence[int], size: float) -> float | None:
    """Returns the length at a size on the regression line; None where all sizes are equal."""
    mean, mean_size = sum(lengths) / len(lengths), sum(sizes) / len(sizes)
    variance = sum((each - mean_size) ** 2 for each in sizes)
    if not variance:
        return None
    slope = sum((each - mean_size) * length for each, length in zip(sizes, lengths)) / variance
    return mean + slope * (size - mean_size)
