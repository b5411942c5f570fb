"""mcore. A run of this trainer as a subject: its own model, passes, data path and optimizer.

with process_groups(small) as device:
    diagnosis = examine(subject_of_run(small, device))
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.utils import unwrap_model
from torch import Tensor

from megatron.packing.batch.microbatches import Microbatch, layouts_of, pack
from megatron.packing.batch.samples import Samples
from megatron.packing.device import Device
from megatron.packing.doctor.gpt_subject import GPTScript, Microbatches, Trained, subject_from_gpt
from megatron.packing.doctor.subject import Sample, Subject, draw_weights
from megatron.packing.model.pipeline import PackedPasses
from megatron.packing.step.global_batch import PackedIterator
from megatron.packing.step.groups import is_data_rank
from megatron.sft.agreement import gathered
from megatron.sft.data.counts import Counts
from megatron.sft.doctor.shrink import declared_windows
from megatron.sft.model.build import build_training
from megatron.sft.model.forward import forward_step
from megatron.sft.options.config import SFTConfig
from megatron.sft.training.step_account import Reduction

_SLOW_DECAY = -3.0
"""Logarithm of the decay rate of delta nets."""


def subject_of_run(config: SFTConfig, device: Device, name: str = "this run") -> Subject:
    """Builds the model of a small run, with random weights; collective.

    Args:
        config: of `shrink.small_run`.
        device: of this rank; process groups are made.
        name: of the subject, for the report.
    """
    vocab_size = config.data.vocab_size
    assert vocab_size is not None
    training = build_training(config, vocab_size, device)
    for chunk in training.model:
        set_weights(unwrap_model(chunk))
    training.optimizer.reload_model_params()
    alignment = config.alignment
    stages = config.num_virtual_stages
    repeats = 1 if stages is None else parallel_state.get_pipeline_model_parallel_world_size()
    draws_data = is_data_rank(ProcessGroupCollection.use_mpu_process_groups(["tp", "cp", "pp"]))

    def pack_sequences(sequences: Sequence[Tensor], fill: int) -> Microbatches:
        packs = [one_pack(sequences, fill, config)] * repeats
        if stages is None:
            return Microbatches(PackedIterator(packs, device))
        return Microbatches([PackedIterator(packs, device) for _ in range(stages)], repeats)

    def train(packs: Sequence[Sequence[Sample]]) -> Trained:
        samples = [sample for of_pack in packs for sample in of_pack]
        rank = parallel_state.get_data_parallel_rank()
        num_ranks = parallel_state.get_data_parallel_world_size()
        num_fetches = -(-len(samples) // num_ranks)
        mine = [[_as_loaded(sample)] for sample in samples[rank::num_ranks]]
        fetches = iter(mine + [[]] * (num_fetches - len(mine)))
        losses = PackedPasses(get_forward_backward_func())(
            forward_step_func=forward_step,
            data_iterator=fetches if draws_data else None,
            model=training.model if len(training.model) > 1 else training.model[0],
            num_microbatches=num_fetches,
            seq_length=config.model.seq_length,
            micro_batch_size=1,
        )
        decision = losses.batch.decision
        replica: list[int] = next(
            filter(None, gathered(None if decision is None else decision.rank.tolist())), []
        )
        # Reports are in the order of ranks: samples 0 2 4 of rank 0, then 1 3 of rank 1.
        order = [i for r in range(num_ranks) for i in range(len(samples))[r::num_ranks]]
        by_sample = dict(zip(order, replica))
        numbers = iter(by_sample.get(index, 0) for index in range(len(samples)))
        return Trained(list(losses), tuple(tuple(next(numbers) for _ in p) for p in packs))

    def report_loss(losses: list[Any]) -> float:
        counts = Counts.none(1)
        return Reduction(losses, False, counts, device).result().loss

    return subject_from_gpt(
        GPTScript(
            name=name,
            model=training.model,
            vocab_size=vocab_size,
            forward_step=forward_step,
            pack=pack_sequences,
            alignment=(alignment.sequence, alignment.pack),
            train=train,
            optimizer=training.optimizer,
            report_loss=report_loss,
            windows=declared_windows(config.model),
            balances=bool(config.model.moe_aux_loss_coeff),
            has_further_losses=bool(config.model.mtp_num_layers),
        )
    )


def one_pack(sequences: Sequence[Tensor], fill: int, config: SFTConfig) -> Microbatch:
    """Returns one microbatch of the sequences, in order, as the trainer lays it out."""
    lengths = np.array([len(tokens) for tokens in sequences], np.int64)
    tokens = torch.cat(list(sequences)).numpy().astype(np.int32)
    labels = np.concatenate([np.roll(each.numpy(), -1) for each in sequences]).astype(np.int32)
    sources = np.zeros(lengths.size, np.int32)
    samples = Samples.of(lengths, sources, tokens, labels, np.ones(tokens.size, np.float32))
    num_sequences = np.array([lengths.size])
    layouts = layouts_of(lengths, num_sequences, config.alignment)
    (microbatch,) = pack(samples, num_sequences, layouts)
    padding = microbatch["padding_mask"]
    return {**microbatch, "tokens": microbatch["tokens"].masked_fill(padding, fill)}


def _as_loaded(sample: Sample) -> dict[str, Any]:
    """Returns a sample as data sets give it: labels shifted, weights in the mask."""
    tokens = sample.tokens.numpy()
    mask = sample.trained[1:].numpy().astype(np.float32) * np.float32(sample.weight)
    return {"tokens": tokens[:-1], "labels": tokens[1:], "loss_mask": mask}


@torch.no_grad()
def set_weights(gpt: torch.nn.Module) -> None:
    """Draws the weights: copies alike on all ranks that hold them, shards unlike one another."""
    stage = parallel_state.get_pipeline_model_parallel_rank()
    shards: dict[str, int] = {}
    for name, parameter in gpt.named_parameters():
        key = f"{stage} {name}"
        if name.endswith("word_embeddings.weight") or (
            name == "output_layer.weight"
            and getattr(gpt, "share_embeddings_and_output_weights", False)
        ):
            key = "embedding"  # tied weights live on the first and on the last stage
        if getattr(parameter, "tensor_model_parallel", False):
            key += f" tensor {parallel_state.get_tensor_model_parallel_rank()}"
        if not getattr(parameter, "allreduce", True):
            key += f" expert {parallel_state.get_expert_model_parallel_rank()}"
        shards[name] = zlib.crc32(key.encode())
    for name, holder in _each_alone(gpt):
        draw_weights(holder, seed=shards[name])
    for name, parameter in gpt.named_parameters():
        if name.endswith("A_log"):  # states that decay at once would not show that they are kept
            parameter.fill_(_SLOW_DECAY)


def _each_alone(gpt: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module]]:
    """Yields each parameter as the only one of a module, under its own name."""
    for name, parameter in gpt.named_parameters():
        holder = torch.nn.Module()
        holder.register_parameter(name.replace(".", "_"), parameter)
        yield name, holder
