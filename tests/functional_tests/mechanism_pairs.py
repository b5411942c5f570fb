"""Mechanisms of models and of data, two and more at once, in parallel layouts.

`train` runs a `Case` in its layout and beside the oracle. Its outcome is the largest difference, or
the line that refuses the case.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from itertools import combinations
from typing import Any, NamedTuple
from unittest import mock

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.utils import unwrap_model
from torch import Tensor

from megatron.packing.model.embeddings import merged_embeddings
from megatron.packing.model.get_batch import get_batch_on_this_rank_for_sequence_packing
from megatron.packing.scheduling.payload_cost import PayloadCost
from megatron.packing.step.decide import GlobalBatchError
from megatron.packing.step.payloads import PayloadStore
from megatron.packing.step.settings import PackingOptions
from megatron.sft.model import build
from megatron.sft.model.forward import forward_step, loss_sum
from tests.functional_tests.layouts import ROPE, Layout
from tests.functional_tests.oracle import (
    EXACT,
    SEQ_LENGTH,
    RankStep,
    Sample,
    Step,
    _losses_alone,
    _plain,
    assemble,
    largest_difference,
    mean_of_tokens,
    sequences,
    train_one_by_one,
    train_packed,
)
from tests.functional_tests.ranks import run_ranks
from tests.functional_tests.trees import TreeSample, apart, batches_of_trees

HIDDEN_SIZE = 32
MODEL = f"{ROPE} --group-query-attention --num-query-groups 2"
EXPERTS = "--num-experts 4 --moe-router-topk 2"
OF_MODELS = {
    "experts": EXPERTS,
    "shared experts": f"{EXPERTS} --moe-shared-expert-intermediate-size 16 "
    "--moe-shared-expert-gate",
    "MTP": "--mtp-num-layers 1",
    "output gate": "--attention-output-gate",
    "windows": "--window-size 7 0 --window-attn-skip-freq 0 1 0 1 --window-rotary-base 100 "
    "--softmax-type learnable",
    "delta net": "--linear-attention-freq 1 0 1 0 --linear-num-key-heads 4 "
    "--linear-num-value-heads 8 --linear-key-head-dim 8 --linear-value-head-dim 6",
    "global attention": "--global-kv-channels 12 --global-num-query-groups 1 --window-size 7 0 "
    "--window-attn-skip-freq 1 0 1 0 --qk-layernorm --value-layernorm --layer-scalar "
    "--norm-position both --no-add-qkv-bias",
    "latent attention": "--num-query-groups 4 --no-add-qkv-bias --q-lora-rank 12 --kv-lora-rank 8 "
    "--qk-head-dim 6 --qk-pos-emb-head-dim 4 --v-head-dim 8",
    "LoRA": "--lora --lora-rank 3 --lora-alpha 5",
}
"""Mechanisms -> flags. Both stages of a pipeline have each kind of layer, in pairs of them, too."""
OF_DATA = ("trees", "fields", "images")
MECHANISMS = (*OF_MODELS, *OF_DATA)
OUR_LAYERS = {
    *("shared experts", "output gate", "windows", "delta net", "global attention"),
    "latent attention",
}
"""Mechanisms that megatron-core's own layers compute otherwise, or not at all."""
NOT_BESIDE_GLOBAL_ATTENTION = {"MTP", "output gate", "windows", "delta net"}
"""Windows have sinks, which make the difference."""
NOT_BESIDE_LATENT_ATTENTION = {*NOT_BESIDE_GLOBAL_ATTENTION, "global attention"}
FULL = "--recompute-granularity full"
PARTS = "--recompute-granularity selective --recompute-modules core_attn layernorm"
UNEVEN = "--decoder-first-pipeline-num-layers 1"
LAYOUTS = {
    "one rank": (Layout(), ""),
    "full recomputation": (Layout(), FULL),
    "recomputation of parts": (Layout(), PARTS),
    "TP2": (Layout(tensor=2), ""),
    "TP2 SP": (Layout(tensor=2, sequence=True), ""),
    "TP4 SP, 2 query groups": (Layout(tensor=4, sequence=True), ""),
    "DP2, EP2": (Layout(data=2, optimizer="overlapped"), ""),
    "CP2": (Layout(context=2), ""),
    "PP2": (Layout(pipeline=2), ""),
    "PP2, uneven": (Layout(pipeline=2, optimizer="sharded"), UNEVEN),
    "PP2, interleaved": (Layout(pipeline=2, interleaved=True), ""),
    "TP2 SP, full recomputation": (Layout(tensor=2, sequence=True), FULL),
    "PP2 uneven, recomputation of parts": (Layout(pipeline=2), f"{UNEVEN} {PARTS}"),
    "TP2 SP, CP2, recomputation of parts": (Layout(tensor=2, sequence=True, context=2), PARTS),
    "CP2, PP2 uneven, full recomputation": (Layout(pipeline=2, context=2), f"{UNEVEN} {FULL}"),
}
"""Names -> layouts and further flags."""
LAYOUTS_OF_PAIRS = (
    "TP2 SP, CP2, recomputation of parts",
    "CP2, PP2 uneven, full recomputation",
    "DP2, EP2",
    "TP4 SP, 2 query groups",
)
"""Those in which pairs of mechanisms are trained; a mechanism alone is trained in all."""
TOLERANCE = 1e-12
WHOLE_TREES = f"--max-seqlen-per-dp-cp-rank {2 * SEQ_LENGTH}"
LENGTHS = (20, 3, 9, 1, 33)
TREE_KINDS = ("weights", "sequence")
IMAGE = 7
"""The token that stands for an image of one embedding."""


class Case(NamedTuple):
    """Mechanisms that are trained together in a layout."""

    mechanisms: tuple[str, ...]
    layout: str

    @property
    def num_ranks(self) -> int:
        """Processes."""
        return LAYOUTS[self.layout][0].world_size

    @property
    def model_flags(self) -> str:
        """The options that make the model."""
        return " ".join([MODEL, *(OF_MODELS[m] for m in self.mechanisms if m in OF_MODELS)])

    @property
    def flags(self) -> str:
        """All options of the run."""
        layout, further = LAYOUTS[self.layout]
        named = layout._replace(model="experts" if self.has_experts else "learned").flags
        room = WHOLE_TREES if "trees" in self.mechanisms else ""
        if PARTS in further:
            further += " shared_experts" * ("shared experts" in self.mechanisms)
            further += " moe" if self.has_experts else " mlp"
        return f"{self.model_flags} {named} {room} {further}"

    @property
    def has_experts(self) -> bool:
        """Whether layers have experts."""
        return EXPERTS in self.model_flags

    def __str__(self) -> str:
        return f"{' + '.join(self.mechanisms)} x {self.layout}"


class Outcome(NamedTuple):
    """What became of a case: the largest relative difference, or the line that refused it."""

    difference: float | None
    refusal: str | None = None
    loss: float | None = None
    """Of the first step, which other releases of megatron-core must agree with."""


class Refused(NamedTuple):
    """A rank's error before the first step ended."""

    line: str


CASES = [Case((mechanism,), layout) for mechanism in MECHANISMS for layout in LAYOUTS]
CASES += [Case(pair, layout) for layout in LAYOUTS_OF_PAIRS for pair in combinations(MECHANISMS, 2)]


class FurtherSample(NamedTuple):
    """A sequence or a tree with what mechanisms of data add to it."""

    plain: Sample | TreeSample
    mechanisms: tuple[str, ...]

    def fields(self) -> dict[str, Any]:
        """As an iterator gives it."""
        fields = _plain(self.plain)
        if "fields" in self.mechanisms:
            fields["advantages"] = advantages_of(fields["tokens"])
        if "images" in self.mechanisms:
            fields["payloads"] = {"pixels": list(images_of(fields["tokens"]))}
            fields["costs"] = {"vision": [100] * len(fields["payloads"]["pixels"])}
        return fields


def advantages_of(tokens: Any) -> Any:
    """Weights of the losses, which are a function of the token, so the same in all paths of a
    tree.
    """
    return (1 + tokens % 5) / 4.0


def images_of(tokens: Any) -> Tensor:
    """Embeddings of the images of a sequence, [n, 1, hidden]; a function of all its tokens."""
    generator = torch.Generator().manual_seed(int(tokens.sum()))
    number = int((torch.as_tensor(tokens) == IMAGE).sum())
    return torch.randn(number, 1, HIDDEN_SIZE, generator=generator, dtype=torch.float64) * 0.1


def batches_of(mechanisms: tuple[str, ...]) -> list[list[Any]]:
    """One global batch, without what mechanisms of data add."""
    if "trees" in mechanisms:
        return [list(batch) for batch in batches_of_trees(1, TREE_KINDS, 1)]
    batch = sequences(0, LENGTHS)
    if "images" in mechanisms:
        for sample in batch[::2]:
            sample.tokens[:: 1 + len(sample.tokens) // 4] = IMAGE
    return [batch]


def losses_with_images(model: Any, sample: Sample) -> Tensor:
    """Losses [1, L] of a sequence alone, whose images are among the words."""
    tokens = torch.from_numpy(sample.tokens).unsqueeze(0)
    positions = torch.from_numpy(sample.position_ids).unsqueeze(0)
    words = model.embedding(input_ids=tokens, position_ids=positions)
    images = iter(images_of(sample.tokens)[:, 0])
    rows = [next(images) if t == IMAGE else words[i, 0] for i, t in enumerate(sample.tokens)]
    return _losses_alone(model, sample, decoder_input=torch.stack(rows).unsqueeze(1))


def objective_of(
    mechanisms: tuple[str, ...], batch: Sequence[Sample], losses_of: Callable[[Sample], Tensor]
) -> Iterator[Tensor]:
    """The mean over tokens, of losses that a field weights if there is one."""

    def weighted(sample: Sample) -> Tensor:
        return losses_of(sample) * torch.from_numpy(advantages_of(sample.tokens))

    yield from mean_of_tokens(batch, weighted if "fields" in mechanisms else losses_of)


@lru_cache(maxsize=4)
def reference(mechanisms: tuple[str, ...]) -> tuple[Step, ...]:
    """Each sequence alone, in one process."""
    batches = batches_of(mechanisms)
    if "trees" in mechanisms:
        batches = apart(batches)
    function = partial(
        train_one_by_one,
        objective=partial(objective_of, mechanisms),
        losses_alone=losses_with_images if "images" in mechanisms else _losses_alone,
    )
    has_our_layers = bool(OUR_LAYERS & set(mechanisms))
    flags = Case(mechanisms, "one rank").model_flags
    return tuple(run_ranks(function, 1, flags, batches, EXACT, has_our_layers)[0])


def step_with_data(mechanisms: tuple[str, ...], data_iterator: Any, model: Any) -> Any:
    """A forward step as docs/howto/plugin.md and docs/howto/images.md have it."""
    gpt = unwrap_model(model)
    batch = get_batch_on_this_rank_for_sequence_packing(
        data_iterator,
        vpp_size=gpt.config.virtual_pipeline_model_parallel_size,
        vp_stage=gpt.vp_stage,
        mtp_on_this_rank=gpt.mtp_process,
    )
    hidden = None
    if "images" in mechanisms and gpt.pre_process:
        pixels = [] if batch.payloads is None else batch.payloads.tensors.get("pixels", [])
        rows = list(pixels) or [torch.zeros(1, HIDDEN_SIZE)]
        hidden = merged_embeddings(gpt, batch, torch.cat(rows), IMAGE)
    output = model(
        batch.tokens,
        batch.position_ids,
        None,
        decoder_input=hidden,
        labels=batch.labels,
        loss_mask=batch.loss_mask,
        packed_seq_params=batch.packed_seq_params,
    )
    weights = batch.loss_mask
    if weights is not None and "fields" in mechanisms:
        weights = weights * batch.extra["advantages"]
    return output, partial(loss_sum, weights, num_paths=batch.num_paths)


def hold_images(transformer_config: Any) -> None:
    """Lets the run take samples with images."""
    options = replace(
        PackingOptions.of(transformer_config),
        payloads=PayloadStore(costs={"vision": PayloadCost(linear=1e9, quadratic=1e6)}),
    )
    transformer_config.sequence_packing_options = options


def train_rank(case: Case) -> list[RankStep] | Refused:
    """The product on this rank."""
    batches = batches_of(case.mechanisms)
    step: Callable[..., Any] = forward_step
    if set(OF_DATA[1:]) & set(case.mechanisms):
        batches = [[FurtherSample(one, case.mechanisms) for one in batch] for batch in batches]
        step = partial(step_with_data, case.mechanisms)
    has_images = "images" in case.mechanisms
    gpt_model = partial(GPTModel, scatter_embedding_sequence_parallel=not has_images)
    try:
        with mock.patch.object(build, "GPTModel", gpt_model):
            return train_packed(
                case.flags, batches, step=step, prepare=hold_images if has_images else None
            )
    except (ValueError, GlobalBatchError) as failure:
        return Refused(str(failure))


def outcome_of(case: Case, ranks: Sequence[list[RankStep] | Refused]) -> Outcome:
    """What the ranks' steps, or their one line, come to. Raises AssertionError where they differ,
    or a refusal is not a line.
    """
    refusals = {rank for rank in ranks if isinstance(rank, Refused)}
    trained = [rank for rank in ranks if not isinstance(rank, Refused)]
    if refusals:
        assert not trained, f"not all ranks: {refusals}"
        assert len(refusals) == 1, f"ranks say otherwise: {refusals}"
        (line,) = refusals.pop()
        assert "\n" not in line, f"{case}: not a line: {line}"
        return Outcome(None, line)
    steps = assemble(trained)
    return Outcome(largest_difference(steps, reference(case.mechanisms)), loss=steps[0].loss)


def train(case: Case) -> Outcome:
    """The case in processes of its own."""
    return outcome_of(case, run_ranks(train_rank, case.num_ranks, case))


TRUE_REFUSALS = {
    "needs --sequence-parallel": "megatron-core's config refuses experts with tensor parallel "
    "alone",
    "--lora must not be used with --mtp-num-layers": "the further layer would have no adapter, and "
    "its loss would train those of the others",
    "cannot be trained with multi-token prediction": "the token after next differs by path",
    "a sample with payloads must be one sequence": "nothing says whose an image of a tree is",
    "--global-kv-channels is not supported with": "layers whose keys are the values have no place "
    "for it; no released model has both",
    "--kv-lora-rank is not supported with": "latents have no place for it; no family of the "
    "trainer has both",
}
"""Parts of the lines that may refuse a case -> why they are true."""


def expected_refusal(case: Case) -> str | None:
    """Returns the key of `TRUE_REFUSALS` that must refuse a case; None for one that must train."""
    layout, mechanisms = LAYOUTS[case.layout][0], set(case.mechanisms)
    sequence_parallel, lora, trees, images, global_attention, latent_attention = TRUE_REFUSALS
    if case.has_experts and layout.tensor > 1 and not layout.sequence:
        return sequence_parallel
    if "global attention" in mechanisms and mechanisms & NOT_BESIDE_GLOBAL_ATTENTION:
        return global_attention
    if "latent attention" in mechanisms and mechanisms & NOT_BESIDE_LATENT_ATTENTION:
        return latent_attention
    if mechanisms >= {"MTP", "LoRA"}:
        return lora
    if mechanisms >= {"MTP", "trees"}:
        return trees
    if mechanisms >= {"trees", "images"}:
        return images
    return None
