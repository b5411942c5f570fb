"""mcore. A script that trains packed by the plug-in, as a subject: its own forward step, model and
optimizer, and the plug-in's scheduler.

    script = PluginScript(
        model=[model], optimizer=optimizer, forward_step=forward_step, vocab_size=1000
    )
    examine_here(lambda: subject_from_plugin(script))  # in front of the loop, on all ranks
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.utils import get_model_config, unwrap_model
from torch import Tensor, nn

from megatron.packing.batch.layout import Alignment
from megatron.packing.batch.microbatches import Microbatch, layouts_of, pack
from megatron.packing.batch.samples import Samples
from megatron.packing.device import Device
from megatron.packing.doctor.subject import Sample, Subject
from megatron.packing.doctor.subjects.gpt_subject import (
    GPTScript,
    Microbatches,
    Trained,
    subject_from_gpt,
)
from megatron.packing.doctor.subjects.gpt_weights import set_weights
from megatron.packing.model.pipeline import PackedLosses, PackedPasses
from megatron.packing.plugin import PackingSchedule
from megatron.packing.step.global_batch import GROUPS, PackedIterator
from megatron.packing.step.groups import device_of, is_data_rank
from megatron.packing.step.settings import PackingSettings


@dataclass(frozen=True, kw_only=True)
class PluginScript:
    """A script with the plug-in, as the doctor needs it."""

    name: str = "this script"
    model: Sequence[nn.Module]
    """Chunks of this rank, in DistributedDataParallel: one, or one for each virtual stage."""
    vocab_size: int
    """Token ids below it may be fed."""
    forward_step: Callable[[Any, Any], tuple[Tensor, Callable[..., Any]]]
    """The forward step that the script gives to `get_forward_backward_func()`, packed."""
    optimizer: MegatronOptimizer | None = None
    """None leaves the step out."""
    report_loss: Callable[[list[Any]], float] | None = None
    """Takes what the forward-backward function returned, and returns the loss that the script
    reports. Collective; None does not examine it.
    """
    takes_weights: bool = False
    """True if weights in the loss mask multiply the tokens' losses, but not their number."""
    windows: Sequence[int] = ()
    """Tokens that each layer sees, itself included; 0 for all (default: unknown)."""


def subject_from_plugin(script: PluginScript) -> Subject:
    """Draws random weights, and returns the script as a subject. Collective over all ranks.

    The step is the script's from its samples on: the plug-in packs them, as it does in training.
    Random weights stay in the model.

    Raises:
        ValueError: for a config that does not ask for packing.
    """
    config: Any = get_model_config(script.model[0])
    if getattr(config, "sequence_packing_scheduler", None) is None:
        raise ValueError(
            "the doctor examines packs, and this script's config asks for none; run it with "
            "--sequence-packing, and call plugin.install before the hook"
        )
    for chunk in script.model:
        set_weights(unwrap_model(chunk))
    if script.optimizer is not None:
        script.optimizer.reload_model_params()
    groups = ProcessGroupCollection.use_mpu_process_groups(GROUPS)
    alignment = PackingSettings.of(config, groups).alignment
    stages = config.virtual_pipeline_model_parallel_size
    repeats = 1 if stages is None else parallel_state.get_pipeline_model_parallel_world_size()
    device = Device.at(device_of(groups.pp))
    loads_data = is_data_rank(ProcessGroupCollection.use_mpu_process_groups(["tp", "cp", "pp"]))

    def pack_sequences(sequences: Sequence[Tensor], fill: int) -> Microbatches:
        packs = [one_pack(sequences, fill, alignment)] * repeats
        if stages is None:
            return Microbatches(PackedIterator(packs, device))
        return Microbatches([PackedIterator(packs, device) for _ in range(stages)], repeats)

    return subject_from_gpt(
        GPTScript(
            name=script.name,
            model=script.model,
            vocab_size=script.vocab_size,
            forward_step=script.forward_step,
            pack=pack_sequences,
            schedule=get_forward_backward_func,
            alignment=(alignment.sequence, alignment.pack),
            train=lambda packs: _train(script, packs, loads_data),
            optimizer=script.optimizer,
            report_loss=script.report_loss,
            windows=script.windows,
            takes_weights=script.takes_weights,
            balances=bool(config.moe_aux_loss_coeff),
            has_further_losses=bool(config.mtp_num_layers),
        )
    )


def _train(script: PluginScript, packs: Sequence[Sequence[Sample]], loads_data: bool) -> Trained:
    """Runs the passes of one step, as the plug-in runs them: samples in, packs by the scheduler."""
    samples = [sample for of_pack in packs for sample in of_pack]
    rank = parallel_state.get_data_parallel_rank()
    num_ranks = parallel_state.get_data_parallel_world_size()
    num_fetches = -(-len(samples) // num_ranks)
    mine = [[_as_loaded(sample)] for sample in samples[rank::num_ranks]]
    fetches = iter(mine + [[]] * (num_fetches - len(mine)))
    function = get_forward_backward_func()
    # Of this trainer, which has no plug-in, the passes are wrapped here.
    run = function if isinstance(function, PackingSchedule) else PackedPasses(function)
    losses = run(
        forward_step_func=script.forward_step,
        data_iterator=fetches if loads_data else None,
        model=list(script.model) if len(script.model) > 1 else script.model[0],
        num_microbatches=num_fetches,
        seq_length=sum(len(sample.tokens) for sample in samples),
        micro_batch_size=1,
    )
    if not isinstance(losses, PackedLosses):
        raise ValueError(
            "the script's forward-backward function did not pack; call plugin.install before the "
            "hook"
        )
    decision = losses.batch.decision
    own = None if decision is None else decision.rank.tolist()
    of_ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(of_ranks, own)
    replica: list[int] = next(filter(None, of_ranks), [])
    # Reports are in the order of ranks: samples 0 2 4 of rank 0, then 1 3 of rank 1.
    order = [i for r in range(num_ranks) for i in range(len(samples))[r::num_ranks]]
    by_sample = dict(zip(order, replica))
    numbers = iter(by_sample.get(index, 0) for index in range(len(samples)))
    return Trained(list(losses), tuple(tuple(next(numbers) for _ in p) for p in packs))


def one_pack(sequences: Sequence[Tensor], fill: int, alignment: Alignment) -> Microbatch:
    """Returns one microbatch of the sequences, in order, as the plug-in lays it out."""
    lengths = np.array([len(tokens) for tokens in sequences], np.int64)
    tokens = torch.cat(list(sequences)).numpy().astype(np.int32)
    labels = np.concatenate([np.roll(each.numpy(), -1) for each in sequences]).astype(np.int32)
    sources = np.zeros(lengths.size, np.int32)
    samples = Samples.of(lengths, sources, tokens, labels, np.ones(tokens.size, np.float32))
    num_sequences = np.array([lengths.size])
    layouts = layouts_of(lengths, num_sequences, alignment)
    (microbatch,) = pack(samples, num_sequences, layouts)
    padding = microbatch["padding_mask"]
    return {**microbatch, "tokens": microbatch["tokens"].masked_fill(padding, fill)}


def _as_loaded(sample: Sample) -> dict[str, Any]:
    """Returns a sample as data sets give it: labels shifted, weights in the mask."""
    tokens = sample.tokens.numpy()
    mask = sample.trained[1:].numpy().astype(np.float32) * np.float32(sample.weight)
    return {"tokens": tokens[:-1], "labels": tokens[1:], "loss_mask": mask}
