"""mcore. The training steps of one rank as the trainer takes them, and the bytes of each phase.

    build -> [forward and backward -> optimizer] x steps

`run_step` runs the trainer's own `build_training`, `forward_step` and optimizer on real tensors as
well as in a fake world (see `fake.world`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.utils import get_model_config
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import _disable_current_modes

from megatron.packing.batch.columns import AXIS_POSITIONS
from megatron.packing.batch.layout import PackLayout
from megatron.packing.batch.microbatches import FIELDS, layout_microbatches, layouts_of, pack
from megatron.packing.batch.payload_bytes import PackPayloads
from megatron.packing.batch.samples import Samples
from megatron.packing.device import CPU, Device
from megatron.packing.model.attention.zigzag import shard_index
from megatron.packing.step.global_batch import PackedIterator
from megatron.sft.fit.counter import ByteCounter
from megatron.sft.fit.fake.host_reads import HostReads
from megatron.sft.fit.fake.optimizers import MAIN_PARAMETER
from megatron.sft.images.model import PIXELS
from megatron.sft.images.sizes import grid_of
from megatron.sft.images.source import ImageSize
from megatron.sft.model.build import Training, build_training, vision_of
from megatron.sft.model.forward import PaddedBatch, forward_step, padded_batches
from megatron.sft.model.module_parts import part_of_module
from megatron.sft.options.config import SFTConfig


@dataclass(frozen=True, kw_only=True)
class StepData:
    """The sequences of a step on each replica: lengths, by microbatch.

    All microbatches must have equally many tokens: a stage does not receive others' shapes.
    """

    lengths: tuple[tuple[int, ...], ...]
    loss_share: float = 1.0
    """Part of each sequence's tokens that counts for the loss, from its end."""
    images: tuple[tuple[ImageSize, ...], ...] = ()
    """Images of each microbatch, whose tokens are its first; () for none."""
    parents: tuple[int, ...] | None = None
    """Number of the sequence of its microbatch that each continues, -1 for none: each microbatch
    is then a pack of trees, of whose nodes these are the lengths. None: they are sequences.
    """

    def loss_mask(self) -> np.ndarray[Any, np.dtype[np.float32]]:
        """Returns one weight per token of all sequences: `(4,)` at 0.5 -> `[0, 0, 1, 1]`."""
        lengths = [length for one in self.lengths for length in one]
        masks = [np.arange(size) >= round(size * (1 - self.loss_share)) for size in lengths]
        return np.concatenate(masks).astype(np.float32)


class Prepared(NamedTuple):
    """One microbatch, as the trainer's iterators give it."""

    batch: Any
    num_tokens: int
    """Tokens of this context-parallel rank, padding included."""
    num_loss_tokens: int
    """Tokens of this context-parallel rank."""


def iterated(prepared: Sequence[Prepared], reads: HostReads, device: Device) -> Iterator[Any]:
    """Yields microbatches of a fake world; notes for `HostReads` how many tokens of each count
    here. They are copied to a GPU, each while the one before it is computed.
    """
    copied: Any = None
    for one, following in zip(prepared, (*prepared[1:], None)):
        batch = one.batch
        if device.is_gpu:
            batch = copied or _copied(batch, device)
            copied = None if following is None else _copied(following.batch, device)
        reads.num_loss_tokens = one.num_loss_tokens
        yield batch


def on_device(prepared: Sequence[Prepared], device: Device) -> Iterator[Any]:
    """Yields microbatches on a device, as the trainer's iterators do."""
    if isinstance(prepared[0].batch, PaddedBatch):
        return (one.batch.on(device) for one in prepared)
    return PackedIterator([one.batch for one in prepared], device)


def _copied(batch: Any, device: Device) -> Any:
    if isinstance(batch, PaddedBatch):
        return batch.on(device)
    return {name: value.clone() if name in FIELDS else value for name, value in batch.items()}


def prepare(config: SFTConfig, data: StepData) -> list[Prepared]:
    """Returns this rank's microbatches, on the host; tokens are zero."""
    size = parallel_state.get_context_parallel_world_size()
    rank = parallel_state.get_context_parallel_rank()
    mask = data.loss_mask()
    if not config.packing.sequence_packing:
        return _rows(config, data, mask)
    lengths = np.array([length for one in data.lengths for length in one], np.int64)
    num_sequences = np.array([len(one) for one in data.lengths])
    layouts = layouts_of(lengths, num_sequences, config.alignment)
    if data.parents is not None:
        layouts = [
            PackLayout.of(np.array(one), config.alignment, *_parents_and_depths(one, data.parents))
            for one in data.lengths
        ]
    stage = parallel_state.get_pipeline_model_parallel_rank()
    num_stages = parallel_state.get_pipeline_model_parallel_world_size()
    samples = None
    if stage in (0, num_stages - 1) or config.images.images:
        tokens, sources = np.zeros(lengths.sum(), np.int32), np.zeros(lengths.size, np.int32)
        samples = Samples.of(lengths, sources, tokens, tokens, mask)
    if samples is not None and config.images.images:  # each stage makes its rotary embedding
        samples = samples.with_schema((AXIS_POSITIONS,))
    if samples is not None and stage in (0, num_stages - 1):
        packs = pack(samples, num_sequences, layouts)
    else:
        packs = layout_microbatches(layouts, samples=samples)
    found = []
    for number, (one, layout) in enumerate(zip(packs, layouts)):
        num_loss_tokens = 0
        if data.images and data.images[number] and stage == 0:
            one = _with_images(config, one, data.images[number])
        if "loss_mask" in one:
            index = shard_index(tuple(layout.padded_lengths.tolist()), size, rank)
            shard = one["loss_mask"] if index is None else one["loss_mask"][index]
            num_loss_tokens = int(shard.count_nonzero())
        found.append(Prepared(one, layout.num_tokens // size, num_loss_tokens))
    return found


def _with_images(config: SFTConfig, batch: Any, sizes: Sequence[ImageSize]) -> Any:
    """Returns a microbatch with images, all of its first sequence."""
    vision = vision_of(config)
    assert vision is not None
    num_tokens = sum(grid_of(size, vision).num_tokens for size in sizes)
    tokens = batch["tokens"].clone()
    tokens[:num_tokens] = vision.image_token
    pixels = [torch.zeros(*size, 3, dtype=torch.uint8) for size in sizes]
    payloads = PackPayloads({PIXELS: pixels}, {PIXELS: np.zeros(len(sizes), np.int64)})
    return {**batch, "tokens": tokens, "payloads": payloads, "host_tokens": tokens}


def _parents_and_depths(
    lengths: Sequence[int], parents: Sequence[int]
) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Returns both for each node: lengths 3 2 4, parents -1 0 1 -> depths 0 3 5."""
    depths: list[int] = []
    for parent in parents:
        depths.append(depths[parent] + lengths[parent] if parent >= 0 else 0)
    return np.array(parents), np.array(depths)


def _rows(config: SFTConfig, data: StepData, mask: Any) -> list[Prepared]:
    fetches, start = [], 0
    for one in data.lengths:
        samples = []
        for length in one:
            tokens = np.zeros(length, np.int64)
            own = mask[start : start + length]
            samples.append({"tokens": tokens, "labels": tokens, "loss_mask": own})
            start += length
        fetches.append(samples)
    rows = padded_batches(iter(fetches), config.training.micro_batch_size, config.alignment.pack)
    return [Prepared(row, row.tokens.numel(), int(row.loss_mask.count_nonzero())) for row in rows]


def to_fake(prepared: Sequence[Prepared], mode: FakeTensorMode) -> list[Prepared]:
    """Returns microbatches of fake tensors. What says where sequences start stays real: the host
    reads it.
    """

    def faked(batch: Any) -> Any:
        if isinstance(batch, PaddedBatch):
            fields: dict[str, Any] = {
                name: mode.from_tensor(getattr(batch, name)) for name in FIELDS
            }
            return batch._replace(**fields)
        fake = {
            name: mode.from_tensor(value) if name in FIELDS else value
            for name, value in batch.items()
        }
        if "payloads" in batch:
            tensors, segments = batch["payloads"]
            pixels = {name: [mode.from_tensor(one) for one in tensors[name]] for name in tensors}
            fake["payloads"] = PackPayloads(pixels, segments)
        return fake

    return [one._replace(batch=faked(one.batch)) for one in prepared]


def run_step(
    config: SFTConfig,
    vocab_size: int,
    data: StepData,
    counter: ByteCounter,
    world: tuple[FakeTensorMode, HostReads] | None = None,
    *,
    num_steps: int = 2,
    passes: bool = True,
    device: Device = CPU,
) -> Training:
    """Returns what it has built and trained for `num_steps` on the same data; what was alive is in
    `counter.phases`.

    From the second step on there is the optimizer's state. world: where this runs in a fake one.
    passes: without, only the optimizer steps.
    """
    with _disable_current_modes():
        prepared = prepare(config, data)
    if world is not None:
        prepared = to_fake(prepared, world[0])
    with counter:
        with counter.phase("build"):
            training = build_training(config, vocab_size, device)
            reference = reference_of(config, training)
        counter.count_as("reference weights", reference)
        counter.part = "gradients of activations and temporaries"
        watch_parts(training, counter)
        count_by_part(training, counter)
        for number in range(1, num_steps + 1):
            iterators = [
                on_device(prepared, device)
                if world is None
                else iterated(prepared, world[1], device)
                for _ in range(config.num_virtual_stages or 1)
            ]
            if passes:
                with counter.phase(f"forward and backward {number}"):
                    forward_backward(config, training, iterators, prepared)
            with counter.phase(f"optimizer {number}"):
                training.optimizer.step()
            count_by_part(training, counter)
    return training


def reference_of(config: SFTConfig, training: Training) -> list[Tensor]:
    """Returns tensors like the copy of the trained weights that a loss with a reference keeps (see
    `training.preference.references`); [] for others.
    """
    if not config.preference.computes_reference:
        return []
    parameters = (p for chunk in training.model for p in chunk.parameters() if p.requires_grad)
    return [torch.empty_like(parameter) for parameter in parameters]


def forward_backward(
    config: SFTConfig,
    training: Training,
    iterators: list[Iterator[Any]],
    prepared: Sequence[Prepared],
) -> None:
    """Runs the passes of one step, as `Trainer` does."""
    model_config: Any = get_model_config(training.model[0])
    tokens = prepared[0].num_tokens
    rows = 1 if config.packing.sequence_packing else config.training.micro_batch_size
    if model_config.sequence_parallel:
        tokens //= config.parallel.tensor_model_parallel_size
    model_config.fit_shape = [tokens // rows, rows, model_config.hidden_size]  # for `world`
    for chunk in training.model:
        chunk.zero_grad_buffer()
    training.optimizer.zero_grad()
    get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=iterators if config.num_virtual_stages else iterators[0],
        model=training.model if len(training.model) > 1 else training.model[0],
        num_microbatches=len(prepared),
        seq_length=config.model.seq_length,
        micro_batch_size=config.training.micro_batch_size,
        forward_only=False,
    )


def watch_parts(training: Training, counter: ByteCounter) -> None:
    """Lets storages that modules make in the forward pass count for the modules' parts."""
    parts = [counter.part]

    def enter(part: str) -> Callable[..., None]:
        def begin(*_: Any) -> None:
            parts.append(part)
            counter.part = part

        return begin

    def leave(*_: Any) -> None:
        parts.pop()
        counter.part = parts[-1]

    for module in (module for chunk in training.model for module in chunk.modules()):
        part = part_of_module(module)
        if part is not None:
            module.register_forward_pre_hook(enter(part))
            module.register_forward_hook(leave)


def count_by_part(training: Training, counter: ByteCounter) -> None:
    """Counts what lives from step to step as what it is."""
    optimizer: Any = training.optimizer
    states: list[Tensor] = []
    mains: list[Tensor] = []
    for one in getattr(optimizer, "chained_optimizers", [optimizer]):
        groups, state = one.optimizer.param_groups, one.optimizer.state
        mains += [p for group in groups for p in group["params"]]
        for own in state.values():
            for name, value in own.items():
                if isinstance(value, Tensor):
                    (mains if name == MAIN_PARAMETER else states).append(value)
    counter.count_as("main parameters", mains)
    counter.count_as("optimizer state", states)
    buffers = [b for chunk in training.model for b in chunk.buffers + chunk.expert_parallel_buffers]
    counter.count_as("gradients", [buffer.grad_data for buffer in buffers])
    # Last: without float32 copies the optimizer's parameters are these.
    counter.count_as("weights", [p for chunk in training.model for p in chunk.parameters()])
