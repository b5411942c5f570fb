"""The plug-in over real processes: megatron-core's own loop trains packed as it does padded."""

from __future__ import annotations

import re
import runpy
from argparse import ArgumentParser
from collections.abc import Iterator
from functools import partial
from itertools import islice, tee
from typing import Any

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
from megatron.core.pipeline_parallel import (
    get_forward_backward_func,
)  # before any install, as scripts do
from megatron.core.transformer.enums import ModelType
from megatron.core.transformer.transformer_config import TransformerConfig

from examples.plugin import train as example
from megatron.packing import plugin
from megatron.packing.model.layer_spec import packed_block_spec
from megatron.packing.model.pipeline import PackedLosses
from megatron.sft.model import cpu_support
from tests.functional_tests.forked_runs import train_forked
from tests.functional_tests.ranks import run_ranks

PACKING = "--sequence-packing --max-seqlen-per-dp-cp-rank 512"
NUM_STEPS, NUM_MICROBATCHES = 2, 6
Step = tuple[float, float, int]


def started() -> None:
    """The example as users start it, in a rank that has imported what it imports."""
    runpy.run_path("examples/plugin/train.py", run_name="__main__")


def run_forked(*arguments: str) -> list[tuple[float, int]]:
    status, output = train_forked(2, ["--train-iters", "3", *arguments], started)
    assert status == 0, output
    return steps_in(output)


def steps_in(output: str) -> list[tuple[float, int]]:
    steps = re.findall(r"step \d+ loss (\S+) microbatches (\d+)", output)
    assert len(steps) == 3, output
    return [(float(loss), int(count)) for loss, count in steps]


@pytest.mark.parametrize("lora", [(), ("--lora",)], ids=["whole", "lora"])
def test_the_example_trains_packed_as_padded(lora: tuple[str, ...]) -> None:
    """Users copy the example: a loss that is scaled, weighted or masked otherwise when packed would
    be their loss.
    """
    arguments = (*lora, *PACKING.split(), "--prefetch-global-batches", "2")
    padded = run_forked(*lora)
    packed = run_forked(*arguments)
    assert [loss for loss, _ in packed] == pytest.approx([loss for loss, _ in padded], abs=1e-5)
    assert {count for _, count in padded} == {16}
    assert all(count < 8 for _, count in packed), "this was not packed"


def start(num_stages: int, virtual: int | None = None) -> TransformerConfig:
    cpu_support.install()
    parallel_state.initialize_model_parallel(1, num_stages, virtual)
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    return TransformerConfig(
        num_layers=4,
        hidden_size=32,
        num_attention_heads=2,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        use_cpu_initialization=True,
        pipeline_model_parallel_size=num_stages,
        virtual_pipeline_model_parallel_size=virtual,
        pipeline_dtype=torch.float32,
        variable_seq_lengths=True,
        moe_token_dispatcher_type="alltoall",
        overlap_p2p_comm=virtual is not None,
        batch_p2p_comm=virtual is None,
        deallocate_pipeline_outputs=False,
        calculate_per_token_loss=True,
        finalize_model_grads_func=finalize_model_grads,
    )


def wrapped(config: TransformerConfig, number: int, num_chunks: int) -> DistributedDataParallel:
    stage = parallel_state.get_pipeline_model_parallel_rank()
    vp_stage = number if num_chunks > 1 else None
    gpt = GPTModel(
        config=config,
        transformer_layer_spec=packed_block_spec(config, vp_stage=vp_stage),
        vocab_size=example.VOCAB_SIZE,
        max_sequence_length=example.LONGEST,
        pre_process=stage == 0 and number == 0,
        post_process=stage == config.pipeline_model_parallel_size - 1 and number == num_chunks - 1,
        position_embedding_type="rope",
        vp_stage=vp_stage,
    )
    gpt.model_type = ModelType.encoder_or_decoder
    with torch.no_grad():  # weights that do not depend on which stage draws first
        for name, parameter in gpt.named_parameters():
            if parameter.dim() > 1:
                parameter.copy_(
                    torch.linspace(-0.3, 0.3, parameter.numel()).sin().view_as(parameter)
                )
            elif "bias" in name:
                parameter.zero_()
    return DistributedDataParallel(
        config=config, ddp_config=DistributedDataParallelConfig(), module=gpt
    )


def losses_in_a_pipeline(virtual: int | None, packing: bool) -> list[Step]:
    """Per step: loss, norm of all gradients, and number of microbatches that ran."""
    config = start(dist.get_world_size(), virtual)
    arguments = plugin.add_arguments(ArgumentParser()).parse_args(
        PACKING.split() if packing else []
    )
    with plugin.install(config, arguments):
        model = [wrapped(config, number, virtual or 1) for number in range(virtual or 1)]
        stream: Iterator[Any] = example.samples(seed=parallel_state.get_data_parallel_rank())
        steps = []
        for _ in range(NUM_STEPS):
            draws = islice(stream, NUM_MICROBATCHES)
            for chunk in model:
                chunk.zero_grad_buffer()
            losses = get_forward_backward_func()(
                forward_step_func=partial(example.forward_step, packing=packing),
                data_iterator=list(tee(draws, len(model))) if virtual else draws,
                model=model if virtual else model[0],
                num_microbatches=NUM_MICROBATCHES,
                seq_length=example.LONGEST,
                micro_batch_size=1,
            )
            assert isinstance(losses, PackedLosses) == packing
            steps.append(reduced(losses, model))
    parallel_state.destroy_model_parallel()
    return steps


def reduced(losses: list[Any], model: list[DistributedDataParallel]) -> Step:
    squares = sum(
        float((p.main_grad.double() ** 2).sum())
        for chunk in model
        for p in chunk.module.parameters()
    )
    total = (
        torch.stack([loss["lm loss"].double() for loss in losses]).sum(0)
        if losses
        else torch.zeros(2).double()
    )
    numbers = torch.tensor([*total, squares, len(losses)], dtype=torch.float64)
    dist.all_reduce(numbers)
    return (numbers[0] / numbers[1]).item(), numbers[2].sqrt().item(), int(numbers[3])


@pytest.mark.parametrize("virtual", [None, 2], ids=["pipeline", "interleaved"])
def test_a_pipeline_whose_script_imported_the_function_first(virtual: int | None) -> None:
    """A name bound before install would go on training padded; a hook on one schedule leaves the
    other two.
    """
    padded = run_ranks(losses_in_a_pipeline, 2, virtual, False)
    packed = run_ranks(losses_in_a_pipeline, 2, virtual, True)
    assert padded[0] == padded[1]
    for step, expected in zip(packed[0], padded[0], strict=True):
        assert step[:2] == pytest.approx(expected[:2], rel=1e-5)
        assert step[2] < expected[2] == NUM_MICROBATCHES, "this was not packed"


def refusal(case: str) -> str:
    """What a script hears that builds its model too early."""
    config: Any = start(num_stages=1)
    config.calculate_per_token_loss = case != "late"
    model = wrapped(config, 0, 1)
    config.calculate_per_token_loss, config.max_seqlen_per_dp_cp_rank = True, example.LONGEST
    with plugin.install(config):
        try:
            get_forward_backward_func()(
                forward_step_func=partial(example.forward_step, packing=True),
                data_iterator=islice(example.samples(seed=1), 2),
                model=model,
                num_microbatches=2,
                seq_length=example.LONGEST,
                micro_batch_size=1,
            )
        except ValueError as failure:
            return str(failure)
    return "trains"


def test_a_model_wrapped_without_per_token_loss_is_refused() -> None:
    """Its gradients would be divided by the data-parallel size once more; the loss looks right."""
    assert run_ranks(refusal, 2, "in time") == ["trains"] * 2
    for answer in run_ranks(refusal, 2, "late"):
        assert "set it in the config before the model is wrapped" in answer
