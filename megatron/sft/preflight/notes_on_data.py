"""pure. Notes on data that are hardly meant: records twice, none to validate with, few in all."""

from __future__ import annotations

import os
from collections.abc import Iterator

from megatron.sft.data.datasets import Datasets
from megatron.sft.data.sample_set import SampleSet
from megatron.sft.options.config import SFTConfig
from megatron.sft.options.data import DataConfig
from megatron.sft.options.training import TrainingConfig


def notes_on_data(config: SFTConfig, datasets: Datasets) -> list[str]:
    """Returns lines to print, before --train-epochs become steps."""
    if config.data.mock_data:
        return []
    return [
        *notes_on_repeats(config.training, len(datasets.train)),
        *notes_on_same_records(config.data, datasets),
        *notes_on_evaluations(config, len(datasets.valid)),
    ]


def notes_on_repeats(training: TrainingConfig, num_records: int) -> Iterator[str]:
    """Yields a line if a step trains some of the records more than once."""
    batch = training.global_batch_size
    if num_records >= batch:
        return
    steps = training.for_records(num_records).train_iters
    epochs = f"{steps * batch / max(num_records, 1):,.1f} epochs"
    yield (
        f"note: {num_records} records to train on are fewer than --global-batch-size {batch}: a "
        f"step trains records more than once ({epochs} in {steps:,} step{'s' * (steps != 1)}); "
        "lower it"
    )


def notes_on_evaluations(config: SFTConfig, num_records: int) -> Iterator[str]:
    """Yields a line if a run evaluates, and has no records for it.

    `--split 100,0,0` leaves none on purpose, unless options of evaluations were changed.
    """
    training, defaults = config.training, TrainingConfig
    is_meant = (training.eval_iters, training.eval_interval) == (
        defaults.eval_iters,
        defaults.eval_interval,
    ) and not config.data.split_shares[1]
    if num_records or not training.eval_iters or is_meant:
        return
    why, way = f"--split {config.data.split} leaves none", "raise its second share"
    if config.data.valid_data_path:
        why, way = "--valid-data-path has none", "name another"
    yield (
        f"note: no evaluations, as there are no records to validate with: {why}; {way}, or pass "
        "--eval-iters 0"
    )


def notes_on_same_records(data: DataConfig, datasets: Datasets) -> Iterator[str]:
    """Yields a line for each file that is read twice, and for copies of files.

    Price: a look at 64 blocks of sources that have equally many records.
    """
    effect = "its weights add up" if data.is_blend else "an epoch trains its records twice"
    train = [os.path.realpath(path) for path in data.paths if "://" not in path]
    for path in sorted({path for path in train if train.count(path) > 1}):
        yield f"note: {path} stands in --data-path more than once: {effect}"
    both = [path for path in data.valid_paths if os.path.realpath(path) in train]
    for path in both:
        yield f"note: {path} is trained, too: its validation loss says nothing about other records"
    for name, other in _copies(datasets.train, datasets.train):
        if len(set(train)) == len(train):
            yield f"note: {name} and {other} have the same records: they are trained twice"
    for name, other in _copies(datasets.valid, datasets.train) if not both else ():
        yield (
            f"note: {name} has the records of {other}, which are trained: its validation loss says "
            "nothing about other records"
        )


def _copies(samples: SampleSet, others: SampleSet) -> Iterator[tuple[str, str]]:
    """Yields the names of sources of `samples`, each with one of `others` that has the same
    records, or with an earlier one if both are the same.
    """
    those = list(zip(others.names, others.sources))
    for number, (name, source) in enumerate(zip(samples.names, samples.sources)):
        for other, candidate in those[:number] if samples is others else those:
            if len(candidate) == len(source) and candidate.fingerprint() == source.fingerprint():
                yield name, other
                break
