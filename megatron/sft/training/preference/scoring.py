"""mcore. Scores the answers of all records under the model that a run begins with, for
--reference-file: forward passes alone, through the scheduler of training.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from megatron.core import parallel_state
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron.sft.agreement import gathered
from megatron.sft.data.datasets import Datasets
from megatron.sft.data.preference.encode import KEYS
from megatron.sft.data.preference.score_file import (
    SOURCE,
    ScoreFile,
    check_can_write,
    is_list_of_scores,
    is_score_file,
    write_scores,
)
from megatron.sft.data.stream import Share
from megatron.sft.model.checkpoints.folder import latest_iteration
from megatron.sft.model.huggingface.read import MegatronCheckpoint, Pretrained
from megatron.sft.options.config import SFTConfig
from megatron.sft.options.preference import PreferenceConfig
from megatron.sft.preflight.read_files import weights_at_start, weights_in_words
from megatron.sft.training.passes import Passes
from megatron.sft.training.preference.objective import ANSWER, HEAD, Scores
from megatron.sft.training.preference.rows import PER_PATH
from megatron.sft.training.step_batches import StepBatch, StepBatches

if TYPE_CHECKING:
    from megatron.sft.data.sample_set import SampleSet

SECONDS_PER_LINE = 30.0
"""Time after which rank 0 says how far it is: minutes without a line are taken for a hang."""


def header_of(
    config: SFTConfig, datasets: Datasets, pretrained: Pretrained | MegatronCheckpoint | None
) -> dict[str, Any]:
    """Returns what a file of log-probabilities must agree in with a run."""
    assert datasets.tokenizer is not None  # a rule: --loss needs --data-path
    return {
        "weights": weights_at_start(config, pretrained),
        SOURCE: weights_in_words(config),
        "tokenizer": datasets.tokenizer.fingerprint,
        "precision": "bfloat16" if config.training.bf16 else "float32",
    }


def check_files_of_score(options: PreferenceConfig) -> None:
    """Raises ValueError if a file to write cannot be written, or would replace another one."""
    if options.write_reference_file is not None:
        check_can_write("--reference-file", options.write_reference_file, is_score_file)
    if options.write_scores is not None:
        check_can_write("--write-scores", options.write_scores, is_list_of_scores)


def check_reference(
    config: SFTConfig, datasets: Datasets, pretrained: Pretrained | MegatronCheckpoint | None
) -> dict[str, Any]:
    """Returns the header of a run's file of log-probabilities, {} if it has none. Raises ValueError
    if --reference-file has another one, or if other weights than these would be scored.
    """
    options, load = config.preference, config.output.load
    if options.write_reference_file is not None and load and latest_iteration(load) is not None:
        raise ValueError(
            f"--load {load} has a checkpoint, but --reference-file is of the weights that a run "
            "begins with; give them as --pretrained-checkpoint and --lora-adapter, and drop --load"
        )
    if options.reference_file is None and options.write_reference_file is None:
        return {}
    header = header_of(config, datasets, pretrained)
    if options.reference_file is not None:
        ScoreFile.read(options.reference_file).check(header)
    return header


def write_reference(
    config: SFTConfig,
    model_config: TransformerConfig,
    datasets: Datasets,
    share: Share,
    passes: Passes,
    header: Mapping[str, Any],
) -> str:
    """Scores the answers of all splits and writes them, on rank 0; returns a line for the user.
    Collective.
    """
    path = config.preference.write_reference_file
    assert path is not None
    packs = itertools.chain.from_iterable(
        scored_packs(batches_of(config, model_config, samples, share), passes)
        for samples in (datasets.train, datasets.valid, datasets.test)
    )
    count = write_log_probs(path, header, packs)
    if torch.distributed.get_rank():
        return ""
    return f"{count:,} log-probabilities of answers in {path}; train with --reference-file {path}"


def write_log_probs(path: str, header: Mapping[str, Any], packs: Iterable[tuple[Any, Any]]) -> int:
    """Writes the log-probabilities of the answers in `packs` (see `scored_packs`) of all ranks, on
    rank 0; returns how many there are, on other ranks 0. Collective.
    """
    keys, sums = [np.empty((0, 2), np.int64)], [np.empty(0)]
    for fields, of_paths in packs:
        for own_keys, own_sums in _rows(fields, of_paths):
            keys.append(own_keys)
            sums.append(own_sums)
    found = gathered((np.concatenate(keys), np.concatenate(sums)))
    if torch.distributed.get_rank():
        return 0
    all_keys, all_sums = (np.concatenate([one[part] for one in found]) for part in (0, 1))
    return write_scores(path, header, all_keys, all_sums)


def batches_of(
    config: SFTConfig, model_config: TransformerConfig, samples: SampleSet, share: Share
) -> Iterator[StepBatch]:
    """Yields the global batches of one pass over a split; the last one goes on with records of the
    next pass.
    """
    num_batches = -(-len(samples) // config.training.global_batch_size)
    if not num_batches:
        return
    batches = StepBatches(config, model_config, samples, share, num_batches)
    said = time.monotonic()
    for number in range(num_batches):
        yield next(batches)
        if time.monotonic() - said > SECONDS_PER_LINE and torch.distributed.get_rank() == 0:
            said = time.monotonic()
            print(f"scored {number + 1:,} of {num_batches:,} global batches", flush=True)
    batches.close()


def scored_packs(batches: Iterable[StepBatch], passes: Passes) -> Iterator[tuple[Any, Any]]:
    """Yields fields and sums of the paths of each pack that this rank counts; none on most ranks.

    The sums are `objective.PathSums`, float64 [3, n]. All ranks must come to the end. Collective.
    """
    counts = (
        parallel_state.get_tensor_model_parallel_rank() == 0
        and parallel_state.get_context_parallel_rank() == 0
    )
    with passes.without_training():
        for batch in batches:
            assert batch.packed is not None
            logs = passes.run(batch, Scores(), forward_only=True)
            for microbatch, log in zip(batch.packed.microbatches, logs if counts else ()):
                if log["paths"] is not None:
                    yield microbatch[PER_PATH], log["paths"].cpu().numpy()


def _rows(fields: Mapping[str, Any], sums: Any) -> Iterator[tuple[Any, Any]]:
    for names, row in ((KEYS[:2], ANSWER), (KEYS[2:], HEAD)):
        if all(name in fields for name in names):
            yield np.stack([fields[name].numpy() for name in names], 1), sums[row]
