"""A loop as Megatron-LM's pretrain_gpt has it, trained packed by the plug-in.

torchrun --nproc-per-node 2 -m megatron.sft doctor --script
    tests/functional_tests/loops/megatron_lm_like.py -- --context-parallel-size 2
"""

import argparse
from functools import partial

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt import GPTModel
from megatron.core.models.mamba import MambaModel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.ssm.mlp_layer import MLPLayer
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayerSubmodules

from megatron.packing import plugin
from megatron.packing.doctor.hook import examine_here
from megatron.packing.doctor.subjects.plugin_subject import PluginScript, subject_from_plugin
from megatron.packing.model.get_batch import get_batch_on_this_rank_for_sequence_packing
from megatron.packing.model.layer_spec import packed_block_spec
from megatron.sft.model import cpu_support
from tests.functional_tests.doctor_cases import DTYPES

try:  # releases from 0.18 on
    from megatron.core.models.hybrid.hybrid_block import HybridStack as Stack
    from megatron.core.models.hybrid.hybrid_block import HybridStackSubmodules as StackSubmodules
except ImportError:
    from megatron.core.ssm.mamba_block import MambaStack as Stack
    from megatron.core.ssm.mamba_block import MambaStackSubmodules as StackSubmodules

VOCAB_SIZE = 96


def model_provider(config, pattern=None):
    if pattern is None:
        model, stack = GPTModel, {"transformer_layer_spec": packed_block_spec(config)}
    else:
        model, stack = MambaModel, hybrid_stack(config, pattern)
    return model(
        **stack,
        config=config,
        vocab_size=VOCAB_SIZE,
        max_sequence_length=128,
        position_embedding_type="learned_absolute",
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
    )


def hybrid_stack(config, pattern):
    """Layers of attention alone and of an MLP alone, without Transformer Engine.

    The stack's last norm is Transformer Engine's whatever the layers are, and is left out.
    """
    (layer, *_) = packed_block_spec(config).layer_specs
    parts = layer.submodules
    attention = TransformerLayerSubmodules(
        input_layernorm=parts.input_layernorm,
        self_attention=parts.self_attention,
        self_attn_bda=parts.self_attn_bda,
    )
    mlp = TransformerLayerSubmodules(
        pre_mlp_layernorm=parts.pre_mlp_layernorm, mlp=parts.mlp, mlp_bda=parts.mlp_bda
    )
    submodules = {
        "attention_layer": ModuleSpec(module=layer.module, submodules=attention),
        "mlp_layer": ModuleSpec(module=MLPLayer, submodules=mlp),
    }
    spec = ModuleSpec(
        module=Stack, params={"post_layer_norm": False}, submodules=StackSubmodules(**submodules)
    )
    return {"mamba_stack_spec": spec, "hybrid_override_pattern": pattern}


def get_batch(data_iterator):
    batch = get_batch_on_this_rank_for_sequence_packing(data_iterator)
    return batch.tokens, batch.labels, batch.loss_mask, batch.position_ids, batch.packed_seq_params


def loss_func(loss_mask, output_tensor):
    losses = output_tensor.view(-1).to(torch.promote_types(output_tensor.dtype, torch.float32))
    loss_mask = loss_mask.view(-1).to(losses.dtype)
    loss = torch.sum(losses * loss_mask)
    num_tokens = loss_mask.sum().to(torch.int)
    return loss, num_tokens, {"lm loss": torch.stack([loss.detach(), num_tokens.to(loss.dtype)])}


def forward_step(data_iterator, model):
    tokens, labels, loss_mask, position_ids, packed_seq_params = get_batch(data_iterator)
    output = model(tokens, position_ids, None, labels=labels, packed_seq_params=packed_seq_params)
    return output, partial(loss_func, loss_mask)


def train_step(data_iterator, model, optimizer, num_microbatches):
    for chunk in model:
        chunk.zero_grad_buffer()
    optimizer.zero_grad()
    losses = get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=data_iterator,
        model=model[0],
        num_microbatches=num_microbatches,
        seq_length=128,
        micro_batch_size=1,
    )
    optimizer.step()
    return losses


def average_losses(losses):
    """The reported loss, on all ranks."""
    total = torch.zeros(2, dtype=torch.float64)
    for one in losses:
        total += one["lm loss"].double()
    dist.all_reduce(total, group=parallel_state.get_data_parallel_group(with_context_parallel=True))
    last = parallel_state.get_pipeline_model_parallel_last_rank()
    dist.broadcast(total, last, group=parallel_state.get_pipeline_model_parallel_group())
    return float(total[0] / total[1])


def parse_args():
    parser = argparse.ArgumentParser()
    parser.add_argument("--tensor-model-parallel-size", type=int, default=1)
    parser.add_argument("--pipeline-model-parallel-size", type=int, default=1)
    parser.add_argument("--context-parallel-size", type=int, default=1)
    parser.add_argument("--hybrid-override-pattern", help="* attention, - MLP; a hybrid model")
    parser.add_argument("--dtype", choices=DTYPES, default="float32")
    plugin.add_arguments(parser)
    parser.set_defaults(sequence_packing=True, max_seqlen_per_dp_cp_rank=128)
    return parser.parse_args()


def setup_model_and_optimizer(args):
    dtype = DTYPES[args.dtype]
    half = dtype == torch.bfloat16
    config = TransformerConfig(
        num_layers=4,
        hidden_size=32,
        num_attention_heads=4,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        use_cpu_initialization=True,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=half,
        tensor_model_parallel_size=args.tensor_model_parallel_size,
        sequence_parallel=args.tensor_model_parallel_size > 1,
        pipeline_model_parallel_size=args.pipeline_model_parallel_size,
        context_parallel_size=args.context_parallel_size,
        moe_token_dispatcher_type="alltoall",
        variable_seq_lengths=args.pipeline_model_parallel_size > 1,
        calculate_per_token_loss=True,
        finalize_model_grads_func=finalize_model_grads,
    )
    plugin.install(config, args)
    gpt = model_provider(config, args.hybrid_override_pattern)
    wrapped = Float16Module(config, gpt) if half else gpt
    model = [
        DistributedDataParallel(
            config=config, ddp_config=DistributedDataParallelConfig(), module=wrapped
        )
    ]
    optimizer = get_megatron_optimizer(OptimizerConfig(lr=1e-3, min_lr=0.0, bf16=half), model)
    config.grad_scale_func = optimizer.scale_loss
    return model, optimizer


def main():
    args = parse_args()
    cpu_support.install()
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    parallel_state.initialize_model_parallel(
        args.tensor_model_parallel_size,
        args.pipeline_model_parallel_size,
        context_parallel_size=args.context_parallel_size,
    )
    torch.manual_seed(1)
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    model, optimizer = setup_model_and_optimizer(args)
    examine_here(
        lambda: subject_from_plugin(
            PluginScript(
                name="pretrain_gpt-like loop",
                model=model,
                optimizer=optimizer,
                vocab_size=VOCAB_SIZE,
                forward_step=forward_step,
                report_loss=average_losses,
            )
        )
    )
    generator = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(3):
        samples = [
            {"tokens": torch.randint(VOCAB_SIZE, (length,), generator=generator).tolist()}
            for length in torch.randint(5, 60, (8,), generator=generator).tolist()
        ]
        losses = train_step(iter(samples), model, optimizer, len(samples))
        loss = average_losses(losses)
        if dist.get_rank() == 0:
            print(f"loss {loss:.4f}")


if __name__ == "__main__":
    main()
