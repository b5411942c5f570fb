"""pure. Weights that are shares of tokens: the mean length of each source's samples, and the weights in samples.

The lengths of 64 evenly spread samples are taken, encoded as the stream will encode them, so the result is the same on
every rank; of token files as they are, the mean is in their index.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from megatron.blending.encoding.samples import SkipSample
from megatron.blending.encoding.task_encoder import TaskEncoder
from megatron.blending.formats.indexed import IndexedSource
from megatron.blending.loading.dataset_loader import LoadedDataset
from megatron.blending.streams.weights import WeightSchedule, weights_by_tokens

_PROBES = 64

Encoder = TaskEncoder[Any, Any, Any, Any]


def by_tokens(
    loaded: Sequence[LoadedDataset], schedule: WeightSchedule | None, encoder: Encoder
) -> tuple[list[LoadedDataset], WeightSchedule | None]:
    """Return sources, and a schedule, with the weights in samples that give the weights that they have in tokens.

    ValueError if none of the probed samples of a source with weight can be used. Milliseconds per source.
    """
    means = [mean_tokens(one, encoder) if one.weight or schedule else 1.0 for one in loaded]
    weights = weights_by_tokens([one.weight for one in loaded], means)
    changed = [LoadedDataset(one.dataset, weight, one.leaf, one.repetitions) for one, weight in zip(loaded, weights)]
    if schedule is not None:
        points = tuple((step, weights_by_tokens(weights, means)) for step, weights in schedule.points)
        schedule = WeightSchedule(points, schedule.outputs_per_step, schedule.kind, schedule.num_pieces)
    return changed, schedule


def mean_tokens(loaded: LoadedDataset, encoder: Encoder) -> float:
    """Return the mean number of tokens per record of a source, as it comes out of the encoder."""
    leaf = loaded.dataset
    while leaf.children:
        leaf = leaf.children[0]
    step = next((step for step in ("encode_sample", "preencode_sample") if encoder.uses(step)), None)
    if isinstance(leaf.source, IndexedSource) and step is None and not encoder.uses("num_tokens"):
        return float(np.mean(leaf.source.lengths))
    places = sorted({probe * len(leaf.source) // _PROBES for probe in range(_PROBES)})
    lengths, fault = [], ""
    for place in places:
        try:
            sample = leaf.load(leaf.source[place], ("probe", place, place))
            made = sample if step is None else getattr(encoder, step)(sample)
            many = made if hasattr(made, "__next__") else [made]
            lengths.append(sum(encoder.num_tokens(one) for one in many))
        except SkipSample:
            lengths.append(0)
        except NotImplementedError as error:
            raise ValueError(str(error)) from None
        except Exception as error:  # as in the stream: a sample that fails is left out
            fault = f"; the last: {type(error).__name__}: {' '.join(str(error).split())}"
    if not any(lengths):
        raise ValueError(f"{loaded.leaf.where}: none of {len(places)} probed samples has tokens{fault}")
    return sum(lengths) / len(lengths)
