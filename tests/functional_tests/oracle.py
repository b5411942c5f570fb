"""What a step must come to: each sequence alone, unpacked, in one process, by megatron-core's own
attention and torch's Adam.

`train_packed` runs the same sequences through the product in some layout. Both start from weights
that are functions of their names, and tell per step the loss, all gradients and the weights after
it; `assemble` makes full tensors of what the ranks told, and `differences` compares.

Two runs add in other orders, on other processors by other instructions, so they agree up to
rounding. Two things keep rounding what it is, whatever the numbers are:

- a gradient is measured in units of the largest one in its module, not of its own largest entry. It
  may be zero in truth, as those of queries and keys where each sequence has one token: softmax over
  one. What is computed then is the rounding of terms that cancel, and these are as large as the
  module's other gradients, which are made of them too;
- Adam's epsilon is as large as the learning rate. A step is lr * m / (sqrt(v) + eps), so a weight
  moves by no more than what its gradients round by. With a small epsilon Adam divides a gradient
  that is rounding by itself, and two runs step by noise. Gradients are up to a hundred times larger
  than epsilon, so what Adam does to them still shows.
"""

from __future__ import annotations

import math
import re
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise, permutations
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.models.common.language_module.language_module import LanguageModule
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_decoder_block_spec,
    get_gpt_mtp_block_spec,
)
from megatron.core.optimizer import clip_grads
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.multi_token_prediction import MTPLossAutoScaler
from megatron.core.utils import unwrap_model
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.nn.utils.parametrize import register_parametrization

from megatron.packing.device import CPU
from megatron.packing.model.layers.experts import mend_expert_biases
from megatron.packing.model.loss import cross_entropy as loss_of_rows
from megatron.packing.model.pipeline import PackedPasses
from megatron.packing.step.groups import is_data_rank
from megatron.sft.arguments.parse import parse_config
from megatron.sft.distributed import make_groups
from megatron.sft.model import cpu_support, mcore_fixes
from megatron.sft.model.build import (
    build_gpt,
    build_model,
    build_transformer_config,
    padded_vocab_size,
)
from megatron.sft.model.forward import forward_step
from megatron.sft.model.optimizer import build_optimizer, build_scheduler, connect
from megatron.sft.options.config import SFTConfig
from megatron.sft.options.lora import LoraConfig
from megatron.sft.options.preference import PreferenceConfig
from tests.functional_tests.pieces import Piece, cut, gradient_of, pieces_of, places_of, whole_of

VOCAB_SIZE = 96
SEQ_LENGTH = 64
CLIP_GRAD = 0.25
"""Below the norms of most steps' gradients (1 to 1.5 in the layouts' batches), so that clipping
shows.
"""


class Sample(NamedTuple):
    """One sequence: int64 [L], but `loss_mask` float32 [L]."""

    tokens: npt.NDArray[np.int64]
    labels: npt.NDArray[np.int64]
    loss_mask: npt.NDArray[np.float32]
    position_ids: npt.NDArray[np.int64]


class Step(NamedTuple):
    """One step's loss and gradients and the weights after it, full tensors by global name."""

    loss: float
    gradients: dict[str, Tensor]
    weights: dict[str, Tensor]
    router_logits: Tensor = torch.empty(0)
    """[tokens times layers, experts]; of the reference only, in its order."""


class RankStep(NamedTuple):
    """What one rank has of a `Step`."""

    loss: float
    """Of all ranks."""
    gradients: dict[str, Piece]
    weights: dict[str, Piece]


def sequences(step: int, lengths: Sequence[int]) -> list[Sample]:
    """Samples with masked stretches, in each form that they may have on the wire: labels that are
    the next tokens or any, a mask of one weight or of several, positions that count from zero or
    are any. The first is the hardest.
    """
    random = np.random.default_rng(step)
    samples = []
    for number, length in enumerate(lengths):
        stream = random.integers(0, VOCAB_SIZE, length + 1)
        labels = stream[1:] if number & 1 else random.integers(0, VOCAB_SIZE, length)
        weights = random.choice([1.0, 0.5, 1.25], 1 if number & 2 else length)
        positions = np.arange(length) if number & 4 else random.integers(0, SEQ_LENGTH, length)
        mask = ((random.random(length) < 0.7) * weights).astype(np.float32)
        samples.append(Sample(stream[:-1], labels, mask, positions))
    return samples


class Numbers(NamedTuple):
    """What a run computes in, and which weights it starts from: `routed` see `_route`, of experts
    only; `rounded` are the random ones, about half of them off by one rounding.
    """

    dtype: torch.dtype = torch.float64
    weights: Literal["random", "routed", "rounded"] = "random"


EXACT = Numbers()
Objective = Callable[[Sequence[Any], Callable[[Sample], Tensor]], Iterator[Tensor]]
"""From a global batch, and from what gives the losses [1, L] of a sequence alone: parts of its
loss, each of which is differentiated at once.
"""


def mean_of_tokens(
    batch: Sequence[Sample], losses_of: Callable[[Sample], Tensor]
) -> Iterator[Tensor]:
    """Yields each sequence's part of the mean over all unmasked tokens."""
    num_tokens = sum(int((sample.loss_mask != 0).sum()) for sample in batch)
    for further_loss in (MTPLossAutoScaler, MoEAuxLossAutoScaler):
        further_loss.set_loss_scale(torch.tensor(1 / max(num_tokens, 1)))
    for sample in batch:
        mask = torch.from_numpy(sample.loss_mask).unsqueeze(0)
        yield (losses_of(sample) * mask).sum() / max(num_tokens, 1)


Placement = Literal["even", "last rank"]
Shape = Literal["plain", "padded", "packed"]


def draws_of(
    batch: Sequence[Sample], placement: Placement, shape: Shape, rank: int, num_ranks: int
) -> list[list[dict[str, Any]]]:
    """What a data-parallel rank draws of a global batch, one list per `next`; equally many on all
    ranks.

    placement: contiguous even shares, or all on the last rank. shape: Megatron-LM's three: plain
    sequences, padded ones with `original_seq_len`, or all of the rank's sequences in one dict with
    `cu_seqlens` and padding at its tail.
    """
    size = len(batch)
    starts = (
        [size * r // num_ranks for r in range(num_ranks + 1)]
        if placement == "even"
        else [0] * num_ranks + [size]
    )
    mine = list(batch[starts[rank] : starts[rank + 1]])
    num_fetches = max(max(b - a for a, b in pairwise(starts)), 1)
    if shape == "packed":
        return [[_joined(mine)] if mine else []] + [[]] * (num_fetches - 1)
    dicts = [[_plain(sample) if shape == "plain" else _padded(sample)] for sample in mine]
    return dicts + [[] for _ in range(num_fetches - len(dicts))]


def _plain(sample: Any) -> dict[str, Any]:
    if hasattr(sample, "fields"):  # a tree, see `trees`
        return sample.fields()
    fields = sample._asdict()
    if (sample.position_ids == np.arange(len(sample.tokens))).all():
        del fields["position_ids"]  # the product fills them in
    return fields


def _padded(sample: Sample) -> dict[str, Any]:
    junk = 5
    fields = {
        name: np.concatenate((values, values[:1].repeat(junk)))
        for name, values in _plain(sample).items()
    }
    return {
        **fields,
        "original_seq_len": len(sample.tokens),
        "padded_seq_len": len(sample.tokens) + junk,
    }


def _joined(samples: Sequence[Sample]) -> dict[str, Any]:
    fields = {
        name: np.concatenate(
            [getattr(sample, name) for sample in samples] + [np.ones(7, dtype=np.int64)]
        )
        for name in Sample._fields
    }
    ends = np.cumsum([0] + [len(sample.tokens) for sample in samples])
    return {**fields, "cu_seqlens": np.concatenate((ends, ends[-1:].repeat(3)))}


SCORES = "--loss reward"
"""Stands in the text of options for a reward model."""


def options(text: str, batches: Sequence[Sequence[Sample]], world_size: int) -> SFTConfig:
    """The run's options; everything that the layouts share, and `text`."""
    common = (
        "--num-layers 4 --hidden-size 32 --num-attention-heads 4 --ffn-hidden-size 48 --mock-data "
        f"--seq-length {SEQ_LENGTH} --vocab-size {VOCAB_SIZE} --make-vocab-size-divisible-by 8 "
        f"--add-qkv-bias --init-method-std 0.1 --train-iters {len(batches)} --global-batch-size "
        f"720 --lr 1e-3 --adam-eps 1e-3 --lr-decay-style constant --clip-grad {CLIP_GRAD} "
        "--eval-iters 0"
    )
    is_reward = SCORES in text  # which the command line refuses beside mock data
    config = parse_config([*common.split(), *text.replace(SCORES, "").split()], world_size)
    if not is_reward:
        return config
    saved = ("score",) if config.lora.lora else ()
    return replace(
        config,
        preference=PreferenceConfig(loss="reward"),
        lora=replace(config.lora, lora_modules_to_save=saved),
    )


def train_one_by_one(
    text: str,
    batches: Sequence[Sequence[Sample]],
    numbers: Numbers = EXACT,
    has_own_layers: bool = False,
    objective: Objective = mean_of_tokens,
    losses_alone: Callable[[Any, Sample], Tensor] | None = None,
) -> list[Step]:
    """The reference; in a world of one process. Gradients of the sequences are added in float64 in
    any case.

    has_own_layers: of what megatron-core cannot compute; unit tests compare that with definitions.
    losses_alone: losses [1, L] of a sequence, for samples of more than tokens.
    """
    config = options(text, batches, 1)
    _prepare(config, numbers.dtype)
    transformer_config = build_transformer_config(config, CPU, params_dtype=numbers.dtype)
    model = (
        build_gpt(config, transformer_config, VOCAB_SIZE, 0)
        if has_own_layers
        else _cores_own_gpt(config, transformer_config)
    )
    if config.preference.scores_answers:
        model.output_layer = Row(config.model.hidden_size)
    _set_weights([model], numbers)
    router_logits = _note_router_logits(model)
    if config.training.bf16:
        model = model.bfloat16()
    if config.lora.lora:
        merge_adapters(model, config.lora, numbers)
    parameters = {
        name.replace(MERGED, "adapter."): p
        for name, p in model.named_parameters()
        if p.requires_grad
    }
    decayed = [p for name, p in parameters.items() if p.dim() > 1]
    others = [p for name, p in parameters.items() if p.dim() <= 1]
    optimizer = torch.optim.AdamW(
        [
            {"params": decayed, "weight_decay": config.training.weight_decay},
            {"params": others, "weight_decay": 0.0},
        ],
        lr=config.training.lr,
        betas=(config.training.adam_beta1, config.training.adam_beta2),
        eps=config.training.adam_eps,
    )
    steps = []
    for batch in batches:
        gradients = {
            name: torch.zeros_like(p, dtype=torch.float64) for name, p in parameters.items()
        }
        loss = 0.0
        for part in objective(batch, partial(losses_alone or _losses_alone, model)):
            part.backward()
            loss += part.item()
            for name, parameter in parameters.items():
                gradients[name] += gradient_of(parameter)
                parameter.grad = None
        norm = torch.stack([gradient.norm() for gradient in gradients.values()]).norm().item()
        scale = min(1.0, CLIP_GRAD / (norm + 1e-6))
        for name, parameter in parameters.items():
            parameter.grad = (gradients[name] * scale).to(parameter.dtype)
        optimizer.step()
        optimizer.zero_grad()
        weights = {name: parameter.detach().clone() for name, parameter in parameters.items()}
        steps.append(
            Step(
                loss,
                gradients,
                weights,
                torch.cat(router_logits) if router_logits else torch.empty(0),
            )
        )
        router_logits.clear()
    return steps


def _losses_alone(model: Any, sample: Sample, **further: Tensor) -> Tensor:
    tokens, labels, loss_mask, positions = (
        torch.from_numpy(values).unsqueeze(0) for values in sample
    )
    mask = torch.ones(1, 1, tokens.shape[1], tokens.shape[1], dtype=torch.bool).triu(1)
    return model(tokens, positions, mask, labels=labels, loss_mask=loss_mask, **further)


class Row(torch.nn.Module):
    """The score of a reward model, of every token."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.empty(1, hidden_size))

    def forward(self, states: Tensor, **_: Any) -> tuple[Tensor, None]:
        return states @ self.weight.t(), None


def scores_alone(model: Any, sample: Sample) -> Tensor:
    """Returns the negative scores of a sequence's tokens, [1, L]."""
    tokens, positions = (torch.from_numpy(v).unsqueeze(0) for v in (sample[0], sample[3]))
    mask = torch.ones(1, 1, tokens.shape[1], tokens.shape[1], dtype=torch.bool).triu(1)
    found: Tensor = model(tokens, positions, mask)
    return -found.squeeze(2)


def _cores_own_gpt(config: SFTConfig, transformer_config: Any) -> Any:
    """megatron-core's layers, and its attention, which takes no packs."""
    block_spec = get_gpt_decoder_block_spec(
        transformer_config,
        use_transformer_engine=False,
        normalization=transformer_config.normalization,
    )
    predicts_further = transformer_config.mtp_num_layers is not None
    model = GPTModel(
        config=transformer_config,
        transformer_layer_spec=block_spec,
        mtp_block_spec=get_gpt_mtp_block_spec(transformer_config, block_spec, False)
        if predicts_further
        else None,
        vocab_size=padded_vocab_size(VOCAB_SIZE, config),
        max_sequence_length=config.model.seq_length,
        share_embeddings_and_output_weights=not (
            config.model.untie_embeddings_and_output_weights or config.preference.scores_answers
        ),
        position_embedding_type=config.model.position_embedding_type,
    )
    mend_expert_biases(model)
    return model


def train_packed(
    text: str,
    batches: Sequence[Sequence[Sample]],
    placement: Placement = "even",
    shape: Shape = "plain",
    numbers: Numbers = EXACT,
    step: Callable[..., Any] = forward_step,
    prepare: Callable[[Any], None] | None = None,
    passes: Callable[[SFTConfig, list[Any]], Callable[..., list[Any]]] | None = None,
) -> list[RankStep]:
    """The product in the layout of `text`, on this rank.

    prepare: completes the model's config before the model is built. passes: makes what takes the
    place of megatron-core's schedule, from the options and the model.
    """
    config = options(text, batches, dist.get_world_size())
    _prepare(config, numbers.dtype)
    loss_of_rows._CHUNK_LOGITS = 16 * VOCAB_SIZE  # several chunks
    transformer_config = build_transformer_config(config, CPU, params_dtype=numbers.dtype)
    if prepare is not None:
        prepare(transformer_config)
    model = build_model(config, transformer_config, VOCAB_SIZE, CPU)
    _set_weights([unwrap_model(chunk) for chunk in model], numbers)
    optimizer = build_optimizer(config, model)
    connect(transformer_config, model, optimizer, config)
    scheduler = build_scheduler(config, optimizer)
    rank, num_ranks = (
        parallel_state.get_data_parallel_rank(),
        parallel_state.get_data_parallel_world_size(),
    )
    draws_data = is_data_rank(ProcessGroupCollection.use_mpu_process_groups(["tp", "cp", "pp"]))
    forward_backward = (
        PackedPasses(get_forward_backward_func()) if passes is None else passes(config, model)
    )
    frozen = [
        (p, p.detach().clone())
        for chunk in model
        for p in chunk.parameters()
        if not p.requires_grad
    ]
    biases = [(router.expert_bias, router.expert_bias.clone()) for router in _routers(model)]
    steps = []
    for batch in batches:
        draws = draws_of(batch, placement, shape, rank, num_ranks)
        source = iter(draws) if draws_data else None
        for chunk in model:
            chunk.zero_grad_buffer()
        optimizer.zero_grad()
        losses = forward_backward(
            forward_step_func=step,
            data_iterator=source if len(model) == 1 else [source] * len(model),
            model=model if len(model) > 1 else model[0],
            num_microbatches=len(draws),
            seq_length=config.model.seq_length,
            micro_batch_size=1,
        )
        gradients = dict(pieces_of(model, optimizer, gradient_of))
        optimizer.step()
        steps.append(
            RankStep(
                _global_loss(losses), gradients, dict(pieces_of(model, optimizer, torch.detach))
            )
        )
        scheduler.step(increment=config.training.global_batch_size)
    assert all(torch.equal(parameter, before) for parameter, before in frozen + biases), (
        "frozen weights have changed"
    )
    parallel_state.destroy_model_parallel()
    return steps


def assemble(per_rank: Sequence[list[RankStep]], relative: float = 1e-12) -> list[Step]:
    """Full tensors from all ranks' pieces; replicas must agree, and shards hold each element
    exactly once.
    """
    steps = []
    for ranks in zip(*per_rank, strict=True):
        assert all(rank.loss == ranks[0].loss for rank in ranks), "ranks report different losses"
        gradients, furthest_gradients = _wholes([rank.gradients for rank in ranks])
        weights, furthest_weights = _wholes([rank.weights for rank in ranks])
        steps.append(Step(ranks[0].loss, gradients, weights))
        _check(
            Step(ranks[0].loss, furthest_gradients, furthest_weights),
            steps[-1],
            relative,
            "replicas differ",
        )
    return steps


def _wholes(per_rank: Sequence[dict[str, Piece]]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Full tensors by name, and the same as far off as the replica that is furthest from them."""
    pieces: dict[str, list[Piece]] = {}
    for rank in per_rank:
        for name, piece in rank.items():
            pieces.setdefault(name, []).append(piece)
    pairs = {name: whole_of(name, found) for name, found in pieces.items()}
    return {name: whole for name, (whole, _) in pairs.items()}, {
        name: whole + apart for name, (whole, apart) in pairs.items()
    }


def differences(step: Step, expected: Step) -> dict[str, float]:
    """By what differs, how far loss, gradients and weights are from what is expected: relative to
    the loss, to the largest gradient of the module (see above), to the weight's largest entry. NaN
    where one is.
    """
    found = {"loss": _relative(abs(step.loss - expected.loss), abs(expected.loss))}
    modules: dict[str, float] = {}
    for name, gradient in expected.gradients.items():
        modules[_module_of(name)] = max(
            modules.get(_module_of(name), 0.0), gradient.abs().max().item()
        )
    for kind, tensors, wanted in (
        ("gradient", step.gradients, expected.gradients),
        ("weight", step.weights, expected.weights),
    ):
        assert tensors.keys() == wanted.keys(), f"{kind}: {tensors.keys() ^ wanted.keys()}"
        for name, tensor in tensors.items():
            assert tensor.shape == wanted[name].shape, (
                f"{name}: {tensor.shape}, not {wanted[name].shape}"
            )
            unit = (
                modules[_module_of(name)] if kind == "gradient" else wanted[name].abs().max().item()
            )
            found[f"{kind} of {name}"] = _relative((tensor - wanted[name]).abs().max().item(), unit)
    return found


def _relative(difference: float, unit: float) -> float:
    """What is exactly zero, as gradients where no token counts, must be met exactly."""
    return difference / unit if unit else difference and math.inf


def _module_of(name: str) -> str:
    """`decoder.layers.3.self_attention.linear_qkv.weight` -> `decoder.layers.3.self_attention`."""
    match = re.match(r".*layers\.\d+(\.transformer_layer)?\.\w+|\w+", name)
    assert match is not None
    return match[0]


def largest_difference(steps: Sequence[Step], reference: Sequence[Step]) -> float:
    """The worst of all `differences`; NaN if one is."""
    found = [differences(step, expected) for step, expected in zip(steps, reference, strict=True)]
    return (
        torch.tensor([value for step in found for value in step.values()]).max().item()
    )  # Python's passes over NaN


def assert_same(steps: Sequence[Step], reference: Sequence[Step], relative: float) -> None:
    """All `differences` of each step are at most `relative`."""
    for number, (step, expected) in enumerate(zip(steps, reference, strict=True)):
        _check(step, expected, relative, f"step {number}")


def _check(step: Step, expected: Step, relative: float, where: str) -> None:
    wrong = [
        (found, what)
        for what, found in differences(step, expected).items()
        if not found <= relative
    ]
    worst = ", ".join(f"{what} by {found:.1e}" for found, what in sorted(wrong, reverse=True)[:5])
    assert not wrong, (
        f"{where}: {len(wrong)} numbers differ by more than {relative:.1e}, such as {worst}"
    )


def _prepare(config: SFTConfig, dtype: torch.dtype = torch.float64) -> None:
    """Groups for the layout, and its precision."""
    torch.set_default_dtype(dtype)
    mcore_fixes.install()
    cpu_support.install()
    if dtype == torch.float64:
        _keep_double()
    make_groups(config)
    torch.manual_seed(1)
    tensor_parallel.model_parallel_cuda_manual_seed(1)


def _keep_double() -> None:
    """Float64 also where megatron-core says float32: cross entropy, router, the distributed
    optimizer.
    """
    LanguageModule.compute_language_model_loss = _cross_entropy  # type: ignore[method-assign]
    for function in (
        moe_utils.topk_routing_with_score_function,
        moe_utils.compute_routing_scores_for_aux_loss,
    ):
        cpu_support.rewrite(function, {}, {"float32": "float64", "float": "double"})
    clip_grads.l2_norm_impl = _norm
    # The norm of a rank that trains nothing; `float(norm_type)` stays what it is.
    clip_grads.double = float  # type: ignore[attr-defined]
    cpu_support.rewrite(clip_grads.get_grad_norm_fp32, {}, {"float": "double"})
    cpu_support.rewrite(
        clip_grads.clip_grad_by_total_norm_fp32, {"torch.FloatTensor": "torch.DoubleTensor"}, {}
    )
    for function in (
        DistributedOptimizer._build_model_and_main_param_groups.__func__,
        DistributedOptimizer._copy_model_grads_to_main_grads,
    ):
        cpu_support.rewrite(
            function, {"torch.FloatTensor": "torch.DoubleTensor"}, {"float": "double"}
        )


def _norm(
    chunk_size: int, noop_flag: Tensor, tensors: Sequence[list[Tensor]], *_: object
) -> tuple[Tensor, None]:
    return torch.stack([gradient.norm() for gradient in tensors[0]]).norm().reshape(1), None


def _cross_entropy(self: LanguageModule, labels: Tensor, logits: Tensor) -> Tensor:
    whole = gather_from_tensor_model_parallel_region(logits)
    losses = cross_entropy(whole.flatten(0, 1), labels.transpose(0, 1).flatten(), reduction="none")
    return losses.view(whole.shape[:2]).transpose(0, 1).contiguous()


def _set_weights(chunks: Sequence[Any], numbers: Numbers) -> None:
    for name, parameter, place in places_of(chunks):
        shape = list(parameter.shape)
        if place.dim is not None:
            shape[place.dim] *= place.count
        whole = _random(name, shape, numbers, chunks[0].config.num_moe_experts)
        with torch.no_grad():
            parameter.copy_(cut(whole, place))
    for router in _routers(chunks):
        generator = torch.Generator().manual_seed(router.layer_number)
        router.expert_bias.copy_(torch.randn(router.expert_bias.shape, generator=generator) * 0.1)


def _routers(chunks: Sequence[Any]) -> list[Any]:
    """Those with a bias that is added for the choice of experts: a buffer, which no step moves."""
    routers = [module for chunk in chunks for module in chunk.modules()]
    return [x for x in routers if isinstance(x, TopKRouter) and x.expert_bias is not None]


def _random(name: str, shape: Sequence[int], numbers: Numbers, num_experts: int | None) -> Tensor:
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    whole = torch.randn(shape, generator=generator, dtype=torch.float64) * 0.1 + (
        1.0 if re.search("norm.*weight", name) else 0.0
    )
    if numbers.weights == "routed":
        assert num_experts is not None
        _route(name, whole, num_experts)
    if numbers.weights == "rounded":
        whole *= 1 + torch.finfo(torch.float64).eps * torch.randint(2, shape, generator=generator)
    return whole


MERGED = "parametrizations.weight.0."
"""Where an adapter's parameters are in `merge_adapters`' model."""
OF_LATENTS = {
    "linear_q_proj": "q_proj",
    "linear_q_down_proj": "q_a_proj",
    "linear_q_up_proj": "q_b_proj",
    "linear_kv_down_proj": "kv_a_proj_with_mqa",
    "linear_kv_up_proj": "kv_b_proj",
}
"""Layers of latent attention -> names of their adapters, one for all rows."""


class Merged(torch.nn.Module):
    """The weight of a layer with its adapter in it: W + scale * B A, row by row. Its gradients are
    autograd's of that sum; nothing else is known of adapters here.
    """

    lora_A: Tensor
    lora_B: Tensor

    def __init__(
        self, name: str, config: Any, lora: LoraConfig, shape: torch.Size, numbers: Numbers
    ) -> None:
        super().__init__()
        heads, groups, head = (
            config.num_attention_heads,
            config.num_query_groups,
            config.kv_channels,
        )
        queries = ["q_proj"] * (heads // groups * head * (2 if config.attention_output_gate else 1))
        modules = {
            "linear_qkv": (queries + ["k_proj"] * head + ["v_proj"] * head) * groups,
            "linear_proj": ["o_proj"] * shape[0],
            "linear_fc1": ["gate_proj"] * (shape[0] // 2) + ["up_proj"] * (shape[0] // 2),
            "linear_fc2": ["down_proj"] * shape[0],
            "out_proj": ["out_proj"] * shape[0],
            **{layer: [module] * shape[0] for layer, module in OF_LATENTS.items()},
        }
        if config.linear_num_value_heads:
            values = config.linear_num_value_heads
            keys = config.linear_num_key_heads * config.linear_key_head_dim
            of_delta_net = {
                "in_proj_qkv": 2 * keys + values * config.linear_value_head_dim,
                "in_proj_z": values * config.linear_value_head_dim,
                "in_proj_b": values,
                "in_proj_a": values,
            }
            modules["in_proj"] = [m for m, rows in of_delta_net.items() for _ in range(rows)]
        if name.endswith("linear_qk"):  # global attention: the rows of a group are queries, a key
            width = config.global_kv_channels
            groups = shape[0] // width - heads
            of_group = ["q_proj"] * (heads // groups * width) + ["k_proj"] * width
            modules["linear_qk"] = of_group * groups
        of_row = modules[name.rsplit(".", 1)[1]]
        if name.endswith("linear_fc1") and not config.gated_linear_unit:
            of_row = ["up_proj"] * shape[0]
        wanted = [module for module in dict.fromkeys(of_row) if module in lora.targets]
        self.rows = [number for number, module in enumerate(of_row) if module in wanted]
        self.owner = [wanted.index(of_row[row]) for row in self.rows]
        self.scale, rank = lora.scale, lora.lora_rank
        sizes = {"lora_A": (rank * len(wanted), shape[1]), "lora_B": (len(self.rows), rank)}
        for which, size in sizes.items():
            values = _random(f"{name}.adapter.{which}", size, numbers, config.num_moe_experts)
            setattr(self, which, torch.nn.Parameter(values.to(torch.get_default_dtype())))

    def forward(self, weight: Tensor) -> Tensor:
        blocks = self.lora_A.unflatten(0, (-1, self.lora_B.shape[1]))[self.owner]
        update = torch.zeros_like(weight)
        update[self.rows] = torch.einsum("or,ori->oi", self.lora_B, blocks)
        return weight + self.scale * update


def merge_adapters(model: Any, lora: LoraConfig, numbers: Numbers) -> None:
    """Freeze a model but for `lora_modules_to_save`, and for the adapters in the weights of its
    layers.
    """
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    whole = {"embed_tokens": "embedding.word_embeddings.weight", "lm_head": "output_layer.weight"}
    whole["score"] = whole["lm_head"]
    parameters = dict(model.named_parameters())
    for module in lora.lora_modules_to_save:
        parameters[whole[module]].requires_grad_(True)
    modules: list[tuple[str, Any]] = list(model.named_modules())
    layers = [
        (name, layer)
        for name, layer in modules
        if re.search(r"linear_(qkv?|proj|fc1|fc2)$|(in|out)_proj$", name)
        or name.rsplit(".", 1)[-1] in OF_LATENTS
    ]
    for name, layer in layers:
        merged = Merged(name, model.config, lora, layer.weight.shape, numbers)
        if merged.rows:
            register_parametrization(layer, "weight", merged)


def _route(name: str, whole: Tensor, num_experts: int) -> None:
    """Let a token's embedding decide which experts it goes to, by a margin that no rounding
    crosses.

    Its first elements rank the experts, each token by another permutation; they outweigh what
    layers add to them, and the router looks at little else.
    """
    if name == "embedding.word_embeddings.weight":
        ranks = torch.tensor(list(permutations(range(num_experts))), dtype=torch.float64)
        whole[:, :num_experts] = 8 * (ranks - ranks.mean())[torch.arange(len(whole)) % len(ranks)]
    if name.endswith("router.weight"):
        whole *= 0.2
        whole[:, :num_experts] += 0.5 * torch.eye(num_experts)


def _note_router_logits(model: torch.nn.Module) -> list[Tensor]:
    """A list that grows by each router's logits in each forward pass."""
    noted: list[Tensor] = []

    def note(module: Any, inputs: tuple[Any, ...]) -> None:
        with torch.no_grad():
            noted.append(module.gating(inputs[0]).flatten(0, -2).double())

    for module in model.modules():
        if isinstance(module, TopKRouter):
            module.register_forward_pre_hook(note)
    return noted


def _global_loss(losses: list[Any]) -> float:
    sums = torch.zeros(2)
    if losses and parallel_state.get_tensor_model_parallel_rank() == 0:
        sums[0] = sum(loss["lm loss"][0] for loss in losses)
        sums[1] = sum(loss["lm loss"][1] for loss in losses)
    dist.all_reduce(sums)
    return (sums[0] / max(sums[1].item(), 1)).item()
