"""In a script with the plug-in routers of experts see the tokens of each sample, and no padding."""

from __future__ import annotations

from argparse import ArgumentParser
from collections.abc import Iterator
from functools import cache, partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_decoder_block_spec,
    get_gpt_mtp_block_spec,
)
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megatron.packing import plugin
from megatron.packing.batch.layout import Alignment
from megatron.packing.model.layer_spec import packed_block_spec, packed_mtp_block_spec
from megatron.packing.model.layers.routers import define_te_general_gemm
from megatron.packing.step import settings
from megatron.sft.model import cpu_support
from tests.functional_tests.oracle import EXACT, _keep_double, _set_weights
from tests.functional_tests.ranks import run_ranks

FP8_ALIGNMENT = 16
LENGTHS = (9, 6, 13, 7, 1, 3)
Z_LOSS = {"moe_z_loss_coeff": 0.1, "mtp_num_layers": 1}
"""Of packs of many samples: a sum over tokens, as the counts are."""
BALANCE = {"moe_aux_loss_coeff": 0.1, "moe_router_load_balancing_type": "aux_loss"}
"""One per microbatch, so of packs of one sample."""


class Layout(NamedTuple):
    context: int = 1
    tensor: int = 1
    megatron_lm_calls: bool = False


class Routed(NamedTuple):
    """What all routers of a model saw and learned in one step, in order of layers."""

    tokens_per_expert: list[list[float]]
    biases: list[list[float]]
    gradients: list[Tensor]


def samples() -> Iterator[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(3)
    for length in LENGTHS:
        tokens = torch.randint(1, 90, (length + 1,), generator=generator)
        loss_mask = (torch.arange(length) >= length // 3).float()
        yield {"tokens": tokens[:-1], "labels": tokens[1:], "loss_mask": loss_mask}


def alone_step(iterator: Any, model: Any) -> Any:
    sample = {name: values[None] for name, values in next(iterator).items()}
    length = sample["tokens"].shape[1]
    hidden = torch.ones(1, 1, length, length, dtype=torch.bool).triu(1)
    output = model(
        sample["tokens"],
        position_ids=torch.arange(length)[None],
        attention_mask=hidden,
        labels=sample["labels"],
        loss_mask=sample["loss_mask"],
    )
    return output, partial(loss_func, sample["loss_mask"])


def packed_step(iterator: Any, model: Any) -> Any:
    """A step as docs/howto/plugin.md has it: it names no padding."""
    get_batch = plugin.exposed_in.get_batch_on_this_rank_for_sequence_packing
    batch = get_batch(iterator, mtp_on_this_rank=model.module.mtp_process)
    output = model(
        batch.tokens,
        position_ids=batch.position_ids,
        attention_mask=None,
        labels=batch.labels,
        loss_mask=batch.loss_mask,
        packed_seq_params=batch.packed_seq_params,
    )
    return output, partial(loss_func, batch.loss_mask)


def loss_func(loss_mask: Tensor, losses: Tensor) -> Any:
    return (losses * loss_mask).sum(), loss_mask.sum().int(), {}


def routers_of(model: Any) -> list[Any]:
    return [module for module in model.modules() if isinstance(module, TopKRouter)]


def build_config(
    layout: Layout | None, options: dict[str, Any], counted: list[list[float]]
) -> TransformerConfig:
    """A model of experts. Each router's tokens per expert, over all ranks, are appended to
    `counted` in a step.
    """
    context, tensor, megatron_lm_calls = layout or Layout()

    def finalize(models: list[Any], *arguments: Any, **named: Any) -> None:
        for router in routers_of(models[0]):
            total = router.local_tokens_per_expert.clone()
            dist.all_reduce(total)
            counted.append(total.tolist())
        finalize_model_grads(models, *arguments, **named)

    config = TransformerConfig(
        num_layers=2,
        hidden_size=32,
        num_attention_heads=4,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        add_bias_linear=False,
        use_cpu_initialization=True,
        params_dtype=torch.float64,
        calculate_per_token_loss=True,
        finalize_model_grads_func=finalize,
        context_parallel_size=context,
        tensor_model_parallel_size=tensor,
        sequence_parallel=tensor > 1,
        num_moe_experts=4,
        moe_router_topk=2,
        moe_ffn_hidden_size=32,
        moe_token_dispatcher_type="alltoall",
        moe_router_score_function="sigmoid",
        moe_router_enable_expert_bias=True,
        expert_model_parallel_size=tensor,
        expert_tensor_parallel_size=1,
        **{"moe_router_load_balancing_type": "none", **options},
    )
    if layout is not None:
        flags = "--sequence-packing --max-seqlen-per-dp-cp-rank 64 --sequence-packing-scheduler "
        flags += "empty" if options is BALANCE else "default"
        arguments = plugin.add_arguments(ArgumentParser()).parse_args(flags.split())
        plugin.install(config, arguments, megatron_lm_calls=megatron_lm_calls)
    return config


def build_model(config: TransformerConfig, is_packed: bool) -> DistributedDataParallel:
    spec = packed_block_spec(config) if is_packed else get_gpt_decoder_block_spec(config, False)
    make_further = (
        packed_mtp_block_spec
        if is_packed
        else partial(get_gpt_mtp_block_spec, use_transformer_engine=False)
    )
    gpt = GPTModel(
        config=config,
        transformer_layer_spec=spec,
        mtp_block_spec=make_further(config, spec) if config.mtp_num_layers else None,
        vocab_size=96,
        max_sequence_length=64,
        position_embedding_type="rope",
    )
    _set_weights([gpt], EXACT)
    return DistributedDataParallel(config, DistributedDataParallelConfig(), gpt)


def train(layout: Layout | None, options: dict[str, Any]) -> Routed:
    """One step of all samples: packed in `layout`, or each alone if that is None."""
    counted: list[list[float]] = []
    config = build_config(layout, options, counted)
    model = build_model(config, is_packed=layout is not None)
    is_first = parallel_state.get_tensor_model_parallel_rank() == 0
    has_data = is_first or layout is None or not layout.megatron_lm_calls
    get_forward_backward_func()(
        forward_step_func=alone_step if layout is None else packed_step,
        data_iterator=samples() if has_data else None,
        model=model,
        num_microbatches=len(LENGTHS),
        seq_length=64,
        micro_batch_size=1,
    )
    routers = routers_of(model)
    if layout is not None:
        plugin.uninstall()
    return Routed(
        counted,
        [router.expert_bias.tolist() for router in routers],
        [router.weight.main_grad.clone() for router in routers],
    )


def train_both(layout: Layout | None) -> list[Routed]:
    cpu_support.install()
    torch.set_default_dtype(torch.float64)
    define_te_general_gemm()
    _keep_double()
    context, tensor, _ = layout or Layout()
    parallel_state.initialize_model_parallel(
        tensor,
        context_parallel_size=context,
        expert_model_parallel_size=tensor,
        expert_tensor_parallel_size=1,
    )
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    # As in fp8, which no CPU computes in.
    settings.Alignment = SimpleNamespace(  # type: ignore[misc, assignment]
        for_layout=lambda **sizes: Alignment.for_layout(**{**sizes, "rank_multiple": FP8_ALIGNMENT})
    )
    return [train(layout, options) for options in (Z_LOSS, BALANCE)]


@cache
def alone() -> list[Routed]:
    return run_ranks(train_both, 1, None, timeout_seconds=240)[0]


@pytest.mark.parametrize(
    "layout",
    [Layout(context=2), Layout(tensor=2), Layout(tensor=2, megatron_lm_calls=True)],
    ids=["context", "sequence", "megatron_lm_calls"],
)
def test_routers_see_each_sample_as_if_alone(layout: Layout) -> None:
    """Padding that counts gives updates of the biases the other sign and doubles z-losses; the loss
    is exact all the same.
    """
    # megatron-core 0.19 compiles its routers, in C++: more than a minute beside other tests.
    for rank in run_ranks(train_both, 2, layout, timeout_seconds=240):
        for packed, expected in zip(rank, alone(), strict=True):
            assert packed.tokens_per_expert == expected.tokens_per_expert
            assert packed.biases == expected.biases
            for gradient, alone_gradient in zip(packed.gradients, expected.gradients, strict=True):
                torch.testing.assert_close(gradient, alone_gradient, rtol=1e-12, atol=1e-14)


def test_the_losses_of_routers_show() -> None:
    """Were they too weak, or all tokens with one expert, the others would compare nothing."""
    z_loss, balance = alone()
    assert len(z_loss.gradients) == 3, "no layer predicts further tokens"
    for with_z, balanced in zip(z_loss.gradients, balance.gradients):
        assert (with_z - balanced).norm() > 0.1 * balanced.norm()
    assert all(min(counts) > 0 for counts in z_loss.tokens_per_expert)
    assert all(len(set(biases)) > 1 for biases in z_loss.biases)
