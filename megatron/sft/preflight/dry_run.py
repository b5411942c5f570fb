"""mcore. `megatron-sft train --dry-run`: does all that a run does before its first step, except for
building the model, and prints what the run would do.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch.distributed as dist

from megatron.sft.data.datasets import Datasets
from megatron.sft.data.stream import SampleStream, Share
from megatron.sft.distributed import process_groups
from megatron.sft.environment import world_from_environment
from megatron.sft.memory_estimate import MemoryEstimate, estimate_memory, gib
from megatron.sft.model.huggingface.companions import Companions
from megatron.sft.options.config import SFTConfig
from megatron.sft.preflight.output_check import check_output, num_weights
from megatron.sft.preflight.read_files import fingerprints

_SAMPLES = 200
"""Number of samples that are read for the mean length."""


class Sampled(NamedTuple):
    """Counts of the first training samples."""

    num_samples: int
    num_tokens: int
    num_trained: int


def dry_run(
    config: SFTConfig, datasets: Datasets, pretrained: object, store: dist.Store | None = None
) -> None:
    """Tries to write to all output folders, and prints what the run would do. Collective under a
    launcher.

    store: store at which the launcher's ranks met.
    """
    dtype = "bfloat16" if config.training.bf16 else "float32"
    companions = Companions(config, datasets.tokenizer, datasets.vocab_size, dtype)
    with _groups(config, datasets, pretrained, store):
        check_output(companions, None).release()
    if world_from_environment()[0] == 0:
        for line in summary(config, datasets, companions):
            print(line)


def _is_alone() -> bool:
    """Returns whether this is the only process, so that it checks for all of the run's."""
    return world_from_environment()[1] == 1


def _world_size(config: SFTConfig) -> int:
    """Returns the launcher's number of processes; without a launcher, the smallest number for the
    parallel layout.
    """
    if not _is_alone():
        return world_from_environment()[1]
    return config.parallel.least_world_size


@contextmanager
def _groups(
    config: SFTConfig, datasets: Datasets, pretrained: object, store: dist.Store | None
) -> Iterator[None]:
    """Context with process groups: those of the run under a launcher, else one of this process."""
    if not _is_alone():
        with process_groups(config, fingerprints(config, datasets, pretrained), store):  # type: ignore[arg-type]
            yield
        return
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def summary(config: SFTConfig, datasets: Datasets, companions: Companions) -> Iterator[str]:
    """Yields the lines of a dry run."""
    training, parallel = config.training, config.parallel
    sequences = training.train_iters * training.global_batch_size
    sampled = sample_lengths(config, datasets)
    mean = sampled.num_tokens / max(sampled.num_samples, 1)
    steps = f"{training.train_iters:,} steps of {training.global_batch_size:,} sequences"
    if datasets.tokenizer is not None:
        steps += f", {sequences / len(datasets.train):.2f} epochs"
        held_out = f"{len(datasets.valid):,} for validation, {len(datasets.test):,} for test"
        yield f"data       {len(datasets.train):,} records, {held_out}"
    yield (
        f"           {mean:,.0f} tokens per sequence, {_share(sampled):.0%} of them trained "
        f"(mean of {sampled.num_samples:,})"
    )
    yield f"training   {steps}, about {sequences * mean:,.0f} tokens"
    world = _world_size(config)
    if _is_alone():
        noun = "process" if world == 1 else "processes"
        yield f"layout     checked for {world:,} {noun}, the fewest that it takes"
    yield (
        f"           tensor {parallel.tensor_model_parallel_size}, pipeline "
        f"{parallel.pipeline_model_parallel_size}, context {parallel.context_parallel_size}, data "
        f"{parallel.data_parallel_size(world)}; packs of {config.capacity_per_rank:,} tokens per "
        "rank"
    )
    if companions.has_family():
        yield f"model      {num_weights(companions.weights()):,} parameters"
    estimate = estimate_memory(config, datasets.vocab_size, world, loss_share=_share(sampled))
    yield f"memory     {memory(estimate)}"
    output = config.output
    places = [place for place in (output.save, output.save_hf, output.run_dir) if place]
    yield f"writes     {', '.join(places) or 'runs/TIME'}: tried"
    yield "dry run: nothing is wrong; leave out --dry-run to train"


def memory(estimate: MemoryEstimate) -> str:
    """Returns a line with the estimated memory of the fullest GPU."""
    # Tracing may fail where the run itself would not, so that this is no error.
    if estimate.failure is not None:
        return f"not estimated ({' '.join(estimate.failure.split()):.200})"
    fullest = max(estimate.stages, key=lambda stage: stage.peak)
    return (
        f"{gib(fullest.peak + fullest.margin)} GiB on {fullest.name}, of which "
        f"{gib(fullest.margin)} are a margin (estimated; megatron-sft fit shows its parts)"
    )


def sample_lengths(config: SFTConfig, datasets: Datasets) -> Sampled:
    """Returns the lengths of the first training samples."""
    stream = SampleStream(
        datasets.train,
        Share(0, 1, 1, 1),
        max_bad_samples_in_a_row=config.data.bad_samples_in_a_row,
    )
    found = [sample for _ in range(min(_SAMPLES, len(datasets.train))) for sample in next(stream)]
    return Sampled(
        len(found),
        sum(len(sample["tokens"]) for sample in found),
        sum(int((sample["loss_mask"] > 0).sum()) for sample in found),
    )


def _share(sampled: Sampled) -> float:
    return sampled.num_trained / max(sampled.num_tokens, 1)
