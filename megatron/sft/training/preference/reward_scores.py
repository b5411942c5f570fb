"""mcore. Writes the scores that a reward model gives the answers of all records, for
`megatron-sft score --loss reward`: forward passes alone, through the scheduler of training.

A line of the file is a record: {"split", "record", "chosen", "rejected"}, where "record" is the
place of the record in the data, and "rejected" has a score for each rejected answer up to the last
one that was scored, null where an answer was dropped.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron.blending.streams.node import Binding, PlanBatch
from megatron.packing.folder_gate import open_output
from megatron.sft.agreement import gathered
from megatron.sft.data.datasets import Datasets
from megatron.sft.data.preference.encode import MARGIN, RANK
from megatron.sft.data.stream import POSITION, Share
from megatron.sft.options.config import SFTConfig
from megatron.sft.training.passes import Passes
from megatron.sft.training.preference.objective import ANSWER
from megatron.sft.training.preference.scoring import batches_of, scored_packs

if TYPE_CHECKING:
    from megatron.sft.data.sample_set import SampleSet

_COLUMNS = (POSITION, RANK, MARGIN)


class _Scored(NamedTuple):
    """A record with the scores of its answers."""

    place: str
    chosen: float
    rejected: list[float | None]
    """At the place of each answer; None where it was dropped."""


def write_reward_scores(
    config: SFTConfig,
    model_config: TransformerConfig,
    datasets: Datasets,
    share: Share,
    passes: Passes,
) -> str:
    """Scores the answers of all splits and writes them, on rank 0; returns a line for the user.
    Collective.
    """
    path = config.preference.write_scores
    assert path is not None
    splits = {"train": datasets.train, "valid": datasets.valid, "test": datasets.test}
    found: dict[str, list[_Scored]] = {}
    for split, samples in splits.items():
        rows = [np.empty((0, len(_COLUMNS) + 1))]
        batches = batches_of(config, model_config, samples, share)
        for fields, sums in scored_packs(batches, passes):
            columns = [fields[name].numpy() for name in _COLUMNS]
            rows.append(np.stack([*columns, sums[ANSWER]], 1).astype(np.float64))
        of_all = np.concatenate(gathered(np.concatenate(rows)))
        if torch.distributed.get_rank() == 0:
            found[split] = list(_records(of_all, samples))
    if torch.distributed.get_rank():
        return ""
    with open_output(path, "w") as file:
        for split, records in found.items():
            for one in records:
                line = {"split": split, "record": one.place, **one._asdict()}
                del line["place"]
                file.write(json.dumps(line) + "\n")
    return _summary(path, [one for records in found.values() for one in records])


def _records(rows: Any, samples: SampleSet) -> Iterator[_Scored]:
    """Yields the records of a split in the order of its positions, each once.

    rows: position, rank, margin and score of each path, float64 [n, 4].
    """
    if not len(rows):
        return
    # The last global batch goes on with records of the next pass.
    rows = rows[rows[:, 0] < len(samples)]
    rows = rows[np.lexsort((rows[:, 1], rows[:, 0]))]
    positions, starts = np.unique(rows[:, 0].astype(np.int64), return_index=True)
    assert samples.dataset is not None
    bound = samples.dataset.bind(Binding(seed=samples.seed))
    entries = bound.plan(positions, PlanBatch()).entries(0, len(positions))
    for (source, at), of_record in zip(entries, np.split(rows, starts[1:])):
        scores = dict(zip(of_record[:, 1].astype(int).tolist(), of_record[:, 3].tolist()))
        rejected = [scores.get(rank) for rank in range(1, max(scores) + 1)]
        yield _Scored(source.describe(at), scores[0], rejected)


def _summary(path: str, records: Sequence[_Scored]) -> str:
    pairs = np.array(
        [one.chosen - score for one in records for score in one.rejected if score is not None]
    )
    if not len(pairs):
        return f"no record in the data; {path} is empty"
    return (
        f"{len(records):,} records in {path}: the chosen answer has the higher score in "
        f"{(pairs > 0).mean():.1%} of {len(pairs):,} pairs, mean margin {pairs.mean():.4f}"
    )
