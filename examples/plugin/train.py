"""mcore. A plain megatron-core training loop. The lines marked `plug-in` are all that it takes to
train it packed.

    torchrun --nproc-per-node 2 examples/plugin/train.py
    torchrun --nproc-per-node 2 examples/plugin/train.py --sequence-packing
        --max-seqlen-per-dp-cp-rank 512

Both print the same losses; the second computes a fifth of the tokens.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megatron.packing import plugin
from megatron.packing.doctor.hook import examine_here
from megatron.packing.doctor.subjects.plugin_subject import PluginScript, subject_from_plugin
from megatron.packing.model.get_batch import get_batch_on_this_rank_for_sequence_packing
from megatron.packing.model.layer_spec import packed_block_spec
from megatron.sft.model import cpu_support
from megatron.sft.model.lora.adapters import add_adapters
from megatron.sft.options.lora import LoraConfig

VOCAB_SIZE, LONGEST, GLOBAL_BATCH_SIZE = 256, 512, 32
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def samples(seed: int) -> Iterator[dict[str, Tensor]]:
    """Random sequences of 8 to 512 tokens, most of them short."""
    random = torch.Generator().manual_seed(seed)
    while True:
        length = int(8 * (LONGEST / 8) ** (torch.rand((), generator=random).item() ** 2))
        tokens = torch.randint(VOCAB_SIZE // 4, (length + 1,), generator=random)
        yield {"tokens": tokens[:-1], "labels": tokens[1:], "loss_mask": torch.ones(length)}


def padded(sample: dict[str, Tensor]) -> dict[str, Any]:
    """A microbatch of one row."""
    rows = {
        name: torch.nn.functional.pad(x, (0, LONGEST - len(x)))[None].to(DEVICE)
        for name, x in sample.items()
    }
    return {
        **rows,
        "position_ids": torch.arange(LONGEST, device=DEVICE)[None],
        "packed_seq_params": None,
    }


def forward_step(data_iterator: Any, model: Any, packing: bool) -> tuple[Tensor, Any]:
    if packing:
        batch = get_batch_on_this_rank_for_sequence_packing(data_iterator)._asdict()  # plug-in 1
    else:
        batch = padded(next(data_iterator))
    inputs = {name: batch[name] for name in ("position_ids", "labels", "packed_seq_params")}
    return model(batch["tokens"], attention_mask=None, **inputs), partial(
        loss_func, batch["loss_mask"]
    )


def loss_func(loss_mask: Tensor, losses: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    total, num_tokens = (losses.float() * loss_mask).sum(), loss_mask.sum()
    return total, num_tokens.int(), {"lm loss": torch.stack((total.detach(), num_tokens))}


def mean_loss(losses: list[dict[str, Tensor]]) -> float:
    """The loss of a step, over all ranks."""
    total = torch.stack([loss["lm loss"] for loss in losses]).sum(0)
    dist.all_reduce(total)
    return float(total[0] / total[1])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--train-iters", type=int, default=10)
    parser.add_argument(
        "--lora", action="store_true", help="train adapters beside the weights, which stay"
    )
    plugin.add_arguments(parser)  # plug-in 2
    arguments = parser.parse_args()
    cpu_support.install()  # changes nothing where CUDA is
    if DEVICE.type == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if DEVICE.type == "cuda" else "gloo")
    parallel_state.initialize_model_parallel()
    torch.manual_seed(1)
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    config = TransformerConfig(
        num_layers=2,
        hidden_size=64,
        num_attention_heads=4,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        use_cpu_initialization=True,
        calculate_per_token_loss=True,
        finalize_model_grads_func=finalize_model_grads,
    )
    plugin.install(config, arguments)  # plug-in 3
    gpt = GPTModel(
        config=config,
        transformer_layer_spec=packed_block_spec(
            config
        ),  # plug-in 4: unless it is Transformer Engine's already
        vocab_size=VOCAB_SIZE,
        max_sequence_length=LONGEST,
        position_embedding_type="rope",
    ).to(DEVICE)
    if arguments.lora:
        add_adapters(gpt, LoraConfig(lora=True, lora_rank=8))
    model = DistributedDataParallel(
        config=config, ddp_config=DistributedDataParallelConfig(), module=gpt
    )
    optimizer = get_megatron_optimizer(OptimizerConfig(lr=1e-3, min_lr=0.0), [model])
    config.grad_scale_func = optimizer.scale_loss
    examine_here(  # plug-in 5: `megatron-sft doctor --script` ends here, a plain run does not
        lambda: subject_from_plugin(
            PluginScript(
                model=[model],
                optimizer=optimizer,
                vocab_size=VOCAB_SIZE,
                forward_step=partial(forward_step, packing=True),
                report_loss=mean_loss,
            )
        )
    )
    data = samples(seed=dist.get_rank())
    for iteration in range(1, arguments.train_iters + 1):
        model.zero_grad_buffer()
        optimizer.zero_grad()
        losses = get_forward_backward_func()(
            forward_step_func=partial(forward_step, packing=arguments.sequence_packing),
            data_iterator=data,
            model=model,
            num_microbatches=GLOBAL_BATCH_SIZE // dist.get_world_size(),
            seq_length=LONGEST,
            micro_batch_size=1,
        )
        optimizer.step()
        loss = mean_loss(losses)
        if dist.get_rank() == 0:
            print(f"step {iteration} loss {loss:.6f} microbatches {len(losses)}", flush=True)
    # plug-in 6: ends what prepares batches ahead, with --prefetch-global-batches
    plugin.uninstall()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
