"""mcore. A toy model of images and text, trained packed: balanced by what sequences cost with their
images, which are decoded where they are trained.

    python examples/multimodal/make_data.py --output-dir /tmp/images
    torchrun --nproc-per-node 2 examples/multimodal/train.py --data-path /tmp/images/blend.yaml
        --sequence-packing --max-seqlen-per-dp-cp-rank 1024

Losses are the same with --tensor-model-parallel-size 2 (and sequence parallel), with
--pipeline-model-parallel-size 2, and with --context-parallel-size 2.
"""

from __future__ import annotations

import argparse
import os
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from dataloader_provider import train_loader
from dataset_helpers import BLANK, IMAGE, MERGE, PATCH, VOCAB_SIZE, num_embeddings
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.utils import unwrap_model
from torch import Tensor

from megatron.packing import plugin
from megatron.packing.model.embeddings import merged_embeddings
from megatron.packing.model.get_batch import get_batch_on_this_rank_for_sequence_packing
from megatron.packing.model.layer_spec import packed_block_spec
from megatron.packing.model.shared_tower import SharedTower
from megatron.packing.scheduling.payload_cost import vision_cost
from megatron.packing.step.payloads import PayloadStore
from megatron.sft.model import cpu_support

LONGEST, GLOBAL_BATCH_SIZE, TOWER_WIDTH = 2048, 32, 32
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


class ToyTower(torch.nn.Module):
    """One layer of attention over the patches of an image, and an embedding of each 2 x 2."""

    def __init__(self, hidden_size: int, width: int = TOWER_WIDTH) -> None:
        super().__init__()
        self.patches = torch.nn.Linear(3 * PATCH**2, width)
        self.attention = torch.nn.Linear(width, 3 * width)
        self.merger = torch.nn.Linear(MERGE**2 * width, hidden_size)

    def forward(self, images: list[Tensor]) -> Tensor:
        """Returns [n, hidden]: the embeddings of all images, row by row of each."""
        return torch.cat([self._embedded(image) for image in images])

    def _embedded(self, image: Tensor) -> Tensor:
        rows, columns = (side // (PATCH * MERGE) for side in image.shape[1:])
        blocks = image.reshape(3, rows, MERGE, PATCH, columns, MERGE, PATCH)
        # The patches of a block of 2 x 2 one after the other, block by block.
        patches = blocks.permute(1, 4, 2, 5, 0, 3, 6).reshape(-1, 3 * PATCH**2)
        hidden = self.patches(patches.to(self.patches.weight.dtype))
        queries, keys, values = self.attention(hidden).chunk(3, dim=-1)
        scores = queries @ keys.T / hidden.shape[-1] ** 0.5
        hidden = hidden + scores.softmax(-1) @ values
        return self.merger(hidden.reshape(rows * columns, -1))


class ImageGPT(GPTModel):
    """A GPT whose first stage has a tower for images."""

    def __init__(self, config: TransformerConfig, spec: Any, **options: Any) -> None:
        super().__init__(
            config=config,
            transformer_layer_spec=spec,
            vocab_size=VOCAB_SIZE,
            max_sequence_length=LONGEST,
            position_embedding_type="mrope",
            scatter_embedding_sequence_parallel=False,
            **options,
        )
        if self.pre_process:
            tower = ToyTower(config.hidden_size)
            self.tower = SharedTower(tower, config, self.pg_collection)


def forward_step(data_iterator: Any, model: Any) -> tuple[Tensor, Any]:
    """Runs a packed microbatch: images through the tower, and their embeddings among the words."""
    batch: Any = get_batch_on_this_rank_for_sequence_packing(data_iterator)
    gpt, hidden = unwrap_model(model), None
    if gpt.pre_process:
        images = [] if batch.payloads is None else batch.payloads.tensors.get("pixels", [])
        images = list(images) or [BLANK.to(batch.tokens.device)]
        embeddings = gpt.tower(images, [num_embeddings(one) for one in images])
        hidden = merged_embeddings(gpt, batch, embeddings, IMAGE)
    losses = model(
        batch.tokens,
        batch.position_ids,
        None,
        decoder_input=hidden,
        labels=batch.labels,
        loss_mask=batch.loss_mask,
        packed_seq_params=batch.packed_seq_params,
    )
    return losses, partial(loss_func, batch.loss_mask)


def loss_func(loss_mask: Tensor, losses: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Returns sum and number, for megatron-core to divide."""
    total, num_tokens = (losses * loss_mask).sum(), loss_mask.sum()
    both = torch.stack((total.detach(), num_tokens.to(total.dtype)))
    return total, num_tokens.int(), {"lm loss": both}


def config_of(arguments: argparse.Namespace) -> TransformerConfig:
    """Returns the model's config in the layout of the command line."""
    tensor, pipeline = (
        arguments.tensor_model_parallel_size,
        arguments.pipeline_model_parallel_size,
    )
    return TransformerConfig(
        num_layers=2,
        hidden_size=64,
        num_attention_heads=4,
        mrope_section=[2, 3, 3],
        attention_dropout=0.0,
        hidden_dropout=0.0,
        use_cpu_initialization=True,
        tensor_model_parallel_size=tensor,
        sequence_parallel=tensor > 1,
        pipeline_model_parallel_size=pipeline,
        context_parallel_size=arguments.context_parallel_size,
        pipeline_dtype=torch.float32,
        variable_seq_lengths=pipeline > 1,
        moe_token_dispatcher_type="alltoall",
        deallocate_pipeline_outputs=False,
        calculate_per_token_loss=True,
        finalize_model_grads_func=finalize_model_grads,
    )


def model_of(config: TransformerConfig, groups: Any, spec: Any = None) -> ImageGPT:
    """Returns this stage's part of the model, of layers that take packs unless others are given."""
    torch.manual_seed(1)
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    return ImageGPT(
        config,
        spec or packed_block_spec(config),
        pre_process=groups.pp.rank() == 0,
        post_process=groups.pp.rank() == groups.pp.size() - 1,
    )


def store_of(arguments: argparse.Namespace) -> PayloadStore:
    """Returns how images are made, moved and bounded: by the tower's FLOPs, on all stages, as the
    others wait while the first encodes.
    """
    cost = vision_cost(
        num_layers=1,
        hidden_size=TOWER_WIDTH,
        ffn_hidden_size=0,
        num_ranks=arguments.pipeline_model_parallel_size,
    )
    return PayloadStore(costs={"vision": cost}, min_bytes_by_key=1024)


def arguments_of(given: list[str] | None = None) -> argparse.Namespace:
    """Returns the command line's options."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--data-path", type=Path, required=True)
    parser.add_argument("--train-iters", type=int, default=10)
    parser.add_argument("--num-workers", type=int, default=0, help="of each data rank")
    for kind in ("tensor-model", "pipeline-model", "context"):
        parser.add_argument(f"--{kind}-parallel-size", type=int, default=1)
    return plugin.add_arguments(parser).parse_args(given)


def main() -> None:
    """Trains as the command line says."""
    arguments = arguments_of()
    cpu_support.install()  # changes nothing where CUDA is
    if DEVICE.type == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if DEVICE.type == "cuda" else "gloo")
    parallel_state.initialize_model_parallel(
        arguments.tensor_model_parallel_size,
        arguments.pipeline_model_parallel_size,
        context_parallel_size=arguments.context_parallel_size,
    )
    groups = ProcessGroupCollection.use_mpu_process_groups()
    config = config_of(arguments)
    plugin.install(config, arguments, payloads=store_of(arguments))
    gpt = model_of(config, groups).to(DEVICE)
    model = DistributedDataParallel(
        config=config, ddp_config=DistributedDataParallelConfig(), module=gpt
    )
    optimizer = get_megatron_optimizer(OptimizerConfig(lr=1e-3, min_lr=0.0), [model])
    config.grad_scale_func = optimizer.scale_loss
    loader = train_loader(arguments.data_path, groups, arguments.num_workers)
    for iteration in range(1, arguments.train_iters + 1):
        model.zero_grad_buffer()
        optimizer.zero_grad()
        losses: Any = get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=loader,
            model=model,
            num_microbatches=GLOBAL_BATCH_SIZE // groups.dp.size(),
            seq_length=LONGEST,
            micro_batch_size=1,
        )
        optimizer.step()
        report(iteration, losses, groups)
    plugin.uninstall()
    dist.destroy_process_group()


def report(iteration: int, losses: Any, groups: Any) -> None:
    """Prints the loss of a step, and what its images cost and how far they travelled."""
    total = sum((loss["lm loss"] for loss in losses), torch.zeros(2, device=DEVICE))
    dist.all_reduce(total)
    stats = losses.batch.stats
    if dist.get_rank() == 0:
        print(
            f"step {iteration} loss {total[0] / total[1]:.6f} microbatches {stats.microbatches} "
            f"balance {stats.balance:.3f} samples with images {stats.payloads} of "
            f"{stats.sequences}, bytes held {stats.payload_bytes} waiting "
            f"{losses.waiting_payload_bytes} moved {stats.moved_payload_bytes}",
            flush=True,
        )


if __name__ == "__main__":
    main()
