"""What a step must come to: each sequence alone, unpacked, in one process, by megatron-core's own attention and
torch's Adam.

`train_packed` runs the same sequences through the product in some layout. Both start from weights that are functions of
their names, and return per step the loss and all gradients as full tensors, in float64.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.models.common.language_module.language_module import LanguageModule
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region
from torch import Tensor
from torch.nn.functional import cross_entropy

from megatron.packing.data_schedule import owns_data
from megatron.packing.pipeline import packed
from megatron.sft import cpu_support, mcore_fixes
from megatron.sft.chat_encoder import EncodedSample
from megatron.sft.config import SFTConfig, parse_config
from megatron.sft.data import SampleStream, Share
from megatron.sft.forward import forward_step
from megatron.sft.model import (
    build_model,
    build_optimizer,
    build_scheduler,
    build_transformer_config,
    connect,
    padded_vocab_size,
)

VOCAB_SIZE = 96
CPU = torch.device("cpu")
Tensors = dict[str, Tensor]


class Step(NamedTuple):
    """One step's loss and gradients, full tensors by global name."""

    loss: float
    gradients: Tensors


@dataclass(frozen=True)
class Piece:
    """A rank's part of a full tensor: `dim` None for all of it; `gated` for [gates; values] halves, each cut on its
    own.
    """

    tensor: Tensor
    dim: int | None
    index: int
    count: int
    gated: bool


def sequences(step: int, lengths: Sequence[int]) -> list[EncodedSample]:
    """Samples with masked stretches and weights other than one."""
    random = np.random.default_rng(step)
    samples = []
    for length in lengths:
        stream = random.integers(0, VOCAB_SIZE, length + 1)
        mask = (random.random(length) < 0.7) * random.choice([1.0, 0.5, 1.25])
        samples.append(EncodedSample(stream[:-1], stream[1:], mask.astype(np.float32), False))
    return samples


class Listed:
    """Batches of samples as a data set: position after position."""

    def __init__(self, batches: Sequence[Sequence[EncodedSample]]) -> None:
        self._samples = [sample for batch in batches for sample in batch]

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, index: int) -> EncodedSample:
        return self._samples[index]


def options(text: str, batches: Sequence[Sequence[EncodedSample]], world_size: int) -> SFTConfig:
    """The run's options; everything that the layouts share, and `text`."""
    common = (
        "--num-layers 4 --hidden-size 32 --num-attention-heads 4 --ffn-hidden-size 48 --seq-length 64 --mock-data "
        f"--vocab-size {VOCAB_SIZE} --make-vocab-size-divisible-by 8 --add-qkv-bias --init-method-std 0.1 "
        f"--train-iters {len(batches)} --global-batch-size {len(batches[0])} --lr 1e-3 --lr-decay-style constant "
        f"--clip-grad 0 --eval-iters 0"
    )
    return parse_config([*common.split(), *text.split()], world_size)


def train_one_by_one(config: SFTConfig, batches: Sequence[Sequence[EncodedSample]]) -> list[Step]:
    """The reference; in a world of one process."""
    _prepare(config)
    transformer_config = build_transformer_config(config, CPU, params_dtype=torch.float64)
    model = GPTModel(
        config=transformer_config,
        transformer_layer_spec=get_gpt_decoder_block_spec(
            transformer_config, use_transformer_engine=False, normalization=transformer_config.normalization
        ),
        vocab_size=padded_vocab_size(VOCAB_SIZE, config),
        max_sequence_length=config.model.seq_length,
        share_embeddings_and_output_weights=not config.model.untie_embeddings_and_output_weights,
        position_embedding_type=config.model.position_embedding_type,
    )
    _set_weights([model])
    parameters = dict(model.named_parameters())
    decayed = [p for name, p in parameters.items() if p.dim() > 1]
    others = [p for name, p in parameters.items() if p.dim() <= 1]
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": config.training.weight_decay}, {"params": others, "weight_decay": 0.0}],
        lr=config.training.lr,
    )
    steps = []
    for batch in batches:
        optimizer.zero_grad()
        num_tokens = sum(int((sample.loss_mask != 0).sum()) for sample in batch)
        loss = 0.0
        for sample in batch:
            tokens, labels = (torch.from_numpy(x).unsqueeze(0) for x in (sample.tokens, sample.labels))
            positions = torch.arange(tokens.shape[1]).unsqueeze(0)
            mask = torch.ones(1, 1, tokens.shape[1], tokens.shape[1], dtype=torch.bool).triu(1)
            losses = model(tokens, positions, mask, labels=labels)
            weighted = (losses * torch.from_numpy(sample.loss_mask)).sum() / max(num_tokens, 1)
            weighted.backward()
            loss += weighted.item()
        gradients = {name: _gradient(p).clone() for name, p in parameters.items()}
        steps.append(Step(loss, gradients))
        optimizer.step()
    return steps


def train_packed(text: str, batches: Sequence[Sequence[EncodedSample]]) -> list[tuple[float, dict[str, Piece]]]:
    """The product in the layout of `text`, on this rank: per step the global loss, and this rank's pieces of
    gradients.
    """
    config = options(text, batches, dist.get_world_size())
    _prepare(config)
    transformer_config = build_transformer_config(config, CPU, params_dtype=torch.float64)
    model = build_model(config, transformer_config, VOCAB_SIZE, CPU)
    _set_weights([chunk.module for chunk in model])
    optimizer = build_optimizer(config, model)
    connect(transformer_config, model, optimizer, config)
    scheduler = build_scheduler(config, optimizer)
    groups = ProcessGroupCollection.use_mpu_process_groups(["tp", "pp"])
    share = Share(
        parallel_state.get_data_parallel_rank(),
        parallel_state.get_data_parallel_world_size(),
        config.training.global_batch_size,
        config.training.micro_batch_size,
    )
    stream: Any = SampleStream(Listed(batches), share, seed=None) if owns_data(groups) else None
    forward_backward = packed(get_forward_backward_func())
    steps = []
    for _ in batches:
        for chunk in model:
            chunk.zero_grad_buffer()
        optimizer.zero_grad()
        losses = forward_backward(
            forward_step_func=forward_step,
            data_iterator=stream if len(model) == 1 else [stream] * len(model),
            model=model if len(model) > 1 else model[0],
            num_microbatches=share.num_draws,
            seq_length=config.model.seq_length,
            micro_batch_size=1,
            force_all_reduce=True,  # whole gradients on every rank also with the distributed optimizer
        )
        # Overlapped, the distributed optimizer leaves each rank its shard only; the next step's loss shows the rest.
        whole = not (config.parallel.use_distributed_optimizer and config.parallel.overlap_grad_reduce)
        steps.append((_global_loss(losses), dict(_pieces([chunk.module for chunk in model])) if whole else {}))
        optimizer.step()
        scheduler.step(increment=config.training.global_batch_size)
    parallel_state.destroy_model_parallel()
    return steps


def assemble(per_rank: Sequence[list[tuple[float, dict[str, Piece]]]]) -> list[Step]:
    """Full tensors from all ranks' pieces; replicas must agree."""
    steps = []
    for number in range(len(per_rank[0])):
        loss = per_rank[0][number][0]
        assert all(rank[number][0] == loss for rank in per_rank), "ranks report different losses"
        found: dict[str, dict[int, Piece]] = {}
        for rank in per_rank:
            for name, piece in rank[number][1].items():
                earlier = found.setdefault(name, {}).setdefault(piece.index, piece)
                difference = (earlier.tensor - piece.tensor).abs().max().item()
                assert difference <= 1e-12, f"replicas of the gradient of {name} differ by {difference:.1e}"
        steps.append(Step(loss, {name: _join(pieces) for name, pieces in found.items()}))
    return steps


def assert_same(steps: Sequence[Step], reference: Sequence[Step], relative: float) -> None:
    """Loss and every gradient agree, relative to the loss and to each gradient's largest entry."""
    for number, (step, expected) in enumerate(zip(steps, reference, strict=True)):
        difference = abs(step.loss - expected.loss) / max(abs(expected.loss), 1e-30)
        assert difference <= relative, f"step {number}: loss {step.loss!r}, not {expected.loss!r} ({difference:.1e})"
        assert not step.gradients or step.gradients.keys() == expected.gradients.keys()
        for name, gradient in step.gradients.items():
            wanted = expected.gradients[name]
            assert gradient.shape == wanted.shape, f"{name}: {gradient.shape}, not {wanted.shape}"
            largest = max(wanted.abs().max().item(), 1e-6)
            worst = (gradient - wanted).abs().max().item() / largest
            assert worst <= relative, f"step {number}: gradient of {name} differs by {worst:.1e}"


def _prepare(config: SFTConfig) -> None:
    """Groups for the layout, float64 everywhere, and a cross entropy that keeps it (megatron-core's computes in
    float32).
    """
    torch.set_default_dtype(torch.float64)
    mcore_fixes.install()
    cpu_support.install()
    for function in (
        DistributedOptimizer._build_model_and_main_param_groups.__func__,
        DistributedOptimizer._copy_model_grads_to_main_grads,
    ):
        cpu_support.rewrite(function, {"torch.FloatTensor": "torch.DoubleTensor"}, {"float": "double"})
    parallel = config.parallel
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=parallel.tensor_model_parallel_size,
        pipeline_model_parallel_size=parallel.pipeline_model_parallel_size,
        virtual_pipeline_model_parallel_size=config.num_virtual_stages,
        context_parallel_size=parallel.context_parallel_size,
        expert_model_parallel_size=parallel.expert_model_parallel_size,
        expert_tensor_parallel_size=1 if config.model.num_experts is not None else None,
        order="tp-cp-ep-pp-dp" if parallel.use_tp_pp_dp_mapping else "tp-cp-ep-dp-pp",
    )
    torch.manual_seed(1)
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    LanguageModule.compute_language_model_loss = _cross_entropy  # type: ignore[method-assign]


def _cross_entropy(self: LanguageModule, labels: Tensor, logits: Tensor) -> Tensor:
    whole = gather_from_tensor_model_parallel_region(logits)
    losses = cross_entropy(whole.flatten(0, 1), labels.transpose(0, 1).flatten(), reduction="none")
    return losses.view(whole.shape[:2]).transpose(0, 1).contiguous()


def _set_weights(chunks: Sequence[torch.nn.Module]) -> None:
    for name, parameter, place in _places(chunks):
        shape = list(parameter.shape)
        if place.dim is not None:
            shape[place.dim] *= place.count
        generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        whole = torch.randn(shape, generator=generator) * 0.1 + (1.0 if re.search("norm.*weight", name) else 0.0)
        with torch.no_grad():
            parameter.copy_(_cut(whole, place))


def _pieces(chunks: Sequence[torch.nn.Module]) -> Iterator[tuple[str, Piece]]:
    for name, parameter, place in _places(chunks):
        yield name, replace(place, tensor=_gradient(parameter).detach().clone())


def _gradient(parameter: torch.nn.Parameter) -> Tensor:
    gradient = getattr(parameter, "main_grad", None)
    if gradient is None:
        gradient = parameter.grad
    return torch.zeros_like(parameter) if gradient is None else gradient


def _places(chunks: Sequence[Any]) -> Iterator[tuple[str, Any, Piece]]:
    """Each parameter of this rank with its global name and where its tensor stands in the full one."""
    for chunk in chunks:
        layers = chunk.decoder.layers
        for local_name, parameter in chunk.named_parameters():
            name = local_name
            if match := re.match(r"decoder\.layers\.(\d+)(.*)", name):
                name = f"decoder.layers.{layers[int(match[1])].layer_number - 1}{match[2]}"
            if match := re.match(r"(.*local_experts)\.(\d+)(.*)", name):
                name = f"{match[1]}.{_first_expert(chunk) + int(match[2])}{match[3]}"
            if name == "output_layer.weight" and chunk.share_embeddings_and_output_weights:
                name = "embedding.word_embeddings.weight"
            is_cut = getattr(parameter, "tensor_model_parallel", False) and "local_experts" not in name
            count = parallel_state.get_tensor_model_parallel_world_size() if is_cut else 1
            gated = chunk.config.gated_linear_unit and "linear_fc1" in name
            dim = parameter.partition_dim if is_cut else None
            index = parallel_state.get_tensor_model_parallel_rank() if is_cut else 0
            yield name, parameter, Piece(parameter, dim, index, count, gated)


def _first_expert(chunk: Any) -> int:
    size, rank = (
        parallel_state.get_expert_model_parallel_world_size(),
        parallel_state.get_expert_model_parallel_rank(),
    )
    return rank * ((chunk.config.num_moe_experts or 0) // size)


def _cut(whole: Tensor, place: Piece) -> Tensor:
    if place.dim is None:
        return whole
    parts = whole.chunk(2, place.dim) if place.gated else (whole,)
    return torch.cat([part.chunk(place.count, place.dim)[place.index] for part in parts], place.dim)


def _join(pieces: dict[int, Piece]) -> Tensor:
    first = pieces[0]
    if first.dim is None:
        return first.tensor
    in_order: Iterable[Tensor] = [pieces[index].tensor for index in range(first.count)]
    if not first.gated:
        return torch.cat(list(in_order), first.dim)
    halves = [tensor.chunk(2, first.dim) for tensor in in_order]
    return torch.cat([half[which] for which in (0, 1) for half in halves], first.dim)


def _global_loss(losses: list[Any]) -> float:
    sums = torch.zeros(2)
    if losses and parallel_state.get_tensor_model_parallel_rank() == 0:
        sums[0] = sum(loss["lm loss"][0] for loss in losses)
        sums[1] = sum(loss["lm loss"][1] for loss in losses)
    dist.all_reduce(sums)
    return (sums[0] / max(sums[1].item(), 1)).item()
