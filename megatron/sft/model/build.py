"""mcore. Builds this rank's part of the GPT that the options describe, and its optimizer."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import NamedTuple

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
)
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.transformer.enums import AttnBackend, ModelType
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron.packing.device import Device
from megatron.packing.model.architecture import architecture
from megatron.packing.model.attention.frequencies import keep_frequencies
from megatron.packing.model.dispatcher import gather_tokens
from megatron.packing.model.grouped_experts import (
    group_experts,
    place_side_by_side,
    side_by_side_in_buffers,
)
from megatron.packing.model.layer_inputs import keep_inputs_on_host
from megatron.packing.model.layer_spec import packed_block_spec, packed_mtp_block_spec
from megatron.packing.model.layers.experts import (
    draw_own_experts,
    mend_expert_biases,
    share_whole,
)
from megatron.packing.model.layers.routers import mask_padding
from megatron.packing.model.loss.head import (
    drop_unused_output_weight,
    keep_other_gradients,
    skip_masked_tokens,
)
from megatron.packing.model.tiles import tile_layers
from megatron.packing.scheduling.cost import PackCost
from megatron.packing.step.settings import PackingOptions, cost_of, measured_cost
from megatron.sft.agreement import gathered
from megatron.sft.images.model import add_vision, image_cost, payload_store, set_trained
from megatron.sft.images.urls import url_cache
from megatron.sft.images.vision import Vision, check_stages, read_vision
from megatron.sft.model.checkpoints.weights import CheckpointWeights
from megatron.sft.model.gpt_additions import (
    add_to_gpt,
    arguments_of_attention,
    logit_rule,
    prepare_config,
)
from megatron.sft.model.huggingface.read import MegatronCheckpoint, Pretrained, read_weights
from megatron.sft.model.kernels import has_fused_permutation, kernels_for
from megatron.sft.model.lora.adapters import add_adapters
from megatron.sft.model.lora.names import adapted_tensors
from megatron.sft.model.needs import check_needs
from megatron.sft.model.optimizer import build_optimizer, build_scheduler, connect
from megatron.sft.model.score_head import add_score_head
from megatron.sft.options.config import SFTConfig
from megatron.sft.options.kernels import KernelConfig
from megatron.sft.peers import wait_for_all


class Training(NamedTuple):
    """Model chunks (one per virtual stage), optimizer, learning rate schedule, FLOPs and device."""

    model: list[DistributedDataParallel]
    optimizer: MegatronOptimizer
    scheduler: OptimizerParamScheduler
    flops: PackCost
    """FLOPs of a pack, for the TFLOP/s of metrics, and without --pack-cost also for balancing."""
    device: Device


def build_training(
    config: SFTConfig,
    vocab_size: int,
    device: Device,
    pretrained: Pretrained | MegatronCheckpoint | None = None,
) -> Training:
    """Builds model, optimizer and schedule. Collective: initial weights are broadcast over
    data-parallel ranks.
    """
    check_needs(config, device)
    transformer_config = build_transformer_config(config, device)
    flops = flops_of(config, transformer_config, vocab_size)
    # The rest of the options that `build_transformer_config` began: costs are read from the
    # finished config. Without packing nothing reads these options.
    options = replace(
        PackingOptions.of(transformer_config),
        cost=agreed_cost(config, transformer_config, vocab_size) or flops,
        vocab_size=padded_vocab_size(vocab_size, config),
    )
    transformer_config.sequence_packing_options = options  # type: ignore[attr-defined]
    model = build_model(config, transformer_config, vocab_size, device, pretrained)
    optimizer = build_optimizer(config, model)
    connect(transformer_config, model, optimizer, config)
    return Training(model, optimizer, build_scheduler(config, optimizer), flops, device)


def vision_of(config: SFTConfig) -> Vision | None:
    """Returns how the model of a run sees images; None without --images."""
    folder = config.output.pretrained_checkpoint
    if not config.images.images or folder is None:
        return None
    return read_vision(folder, config.images.image_max_pixels)


def flops_of(config: SFTConfig, transformer_config: TransformerConfig, vocab_size: int) -> PackCost:
    """Returns the FLOPs of a pack."""
    cost = cost_of(transformer_config, padded_vocab_size(vocab_size, config))
    if config.lora.lora or config.images.freeze_language_model:
        # A trained matrix costs three products: forward, gradient of its input, gradient of itself.
        # Frozen matrices lack the last.
        cost = replace(cost, linear=cost.linear * 2 / 3, head=cost.head * 2 / 3)
    if config.training.logits_of_masked_tokens or config.preference.scores_answers:
        # The output layer runs for all tokens, not only for those with loss: no term of its own.
        # That of a reward model is one row.
        cost = replace(cost, head=0.0)
    return cost


def agreed_cost(
    config: SFTConfig, transformer_config: TransformerConfig, vocab_size: int
) -> PackCost | None:
    """Returns the seconds of a pack on this rank, from the file of --pack-cost; None without it.
    Collective with it.

    Raises ValueError if the file was measured for another model or differs between ranks, which
    would then compute different schedules.
    """
    fitted = config.packing.fitted_cost
    if fitted is None:
        return None
    cost = measured_cost(fitted, transformer_config, padded_vocab_size(vocab_size, config))
    if any(other != cost for other in gathered(cost)):
        raise ValueError(
            f"--pack-cost {fitted.path} must be the same file on all machines, but differs; copy it"
        )
    return cost


def padded_vocab_size(vocab_size: int, config: SFTConfig) -> int:
    """Returns the rows of the embedding, padding included.

    Padding rows take part in the softmax, so that the loss depends on their number. So the multiple
    is --make-vocab-size-divisible-by, a property of the model, and the tensor-parallel size enters
    only if it does not divide that.
    """
    unit = math.lcm(
        config.model.make_vocab_size_divisible_by, config.parallel.tensor_model_parallel_size
    )
    return -(-vocab_size // unit) * unit


def build_transformer_config(
    config: SFTConfig, device: Device, params_dtype: torch.dtype = torch.float32
) -> TransformerConfig:
    """Returns megatron-core's config of the model, with the values that packing requires (see
    `pipeline.check_config`).
    """
    model, parallel, packing = config.model, config.parallel, config.packing
    dtype = torch.bfloat16 if config.training.bf16 else params_dtype
    interleaved = config.num_virtual_stages is not None
    first = parallel.decoder_first_pipeline_num_layers
    last = parallel.decoder_last_pipeline_num_layers
    if first is not None and parallel.pipeline_model_parallel_size == 2:
        # With two stages the first count implies the last. Given both, megatron-core divides by
        # zero middle stages.
        last = None
    kernels = kernels_for(config, device)
    described = architecture(model) | {
        "attention_backend": AttnBackend[model.attention_backend],
        "bias_activation_fusion": kernels.bias_swiglu_fusion,
        "moe_grouped_gemm": kernels.moe_grouped_gemm,
        "moe_permute_fusion": kernels.moe_permute_fusion and has_fused_permutation(device),
        "gradient_accumulation_fusion": kernels.gradient_accumulation_fusion,
    }
    if model.recompute_granularity == "full":
        described["recompute_method"] = model.recompute_method or "uniform"
        described["recompute_num_layers"] = model.recompute_num_layers or 1
    cp_comm_types = [name.replace("allgather", "all_gather") for name in parallel.cp_comm_type]
    transformer_config = TransformerConfig(
        **described,
        cp_comm_type=cp_comm_types[0] if len(cp_comm_types) == 1 else cp_comm_types,
        layernorm_epsilon=model.norm_epsilon,
        moe_router_load_balancing_type="aux_loss" if model.moe_aux_loss_coeff else "none",
        tensor_model_parallel_size=parallel.tensor_model_parallel_size,
        pipeline_model_parallel_size=parallel.pipeline_model_parallel_size,
        virtual_pipeline_model_parallel_size=config.num_virtual_stages,
        num_layers_in_first_pipeline_stage=first,
        num_layers_in_last_pipeline_stage=last,
        account_for_embedding_in_pipeline_split=parallel.account_for_embedding_in_pipeline_split,
        account_for_loss_in_pipeline_split=parallel.account_for_loss_in_pipeline_split,
        context_parallel_size=parallel.context_parallel_size,
        expert_model_parallel_size=parallel.expert_model_parallel_size,
        expert_tensor_parallel_size=1 if model.num_experts is not None else None,
        sequence_parallel=parallel.sequence_parallel and parallel.tensor_model_parallel_size > 1,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=config.training.bf16,
        deterministic_mode=config.training.deterministic_mode,
        use_cpu_initialization=not device.is_gpu,
        # A pretrained checkpoint overwrites all weights.
        perform_initialization=config.output.pretrained_checkpoint is None,
        variable_seq_lengths=True,
        overlap_p2p_comm=interleaved,
        batch_p2p_comm=not interleaved,
        # Outputs of a stage are freed once they are sent. On CPU gloo may still be sending them.
        deallocate_pipeline_outputs=device.is_gpu,
        max_seqlen_per_dp_cp_rank=config.capacity_per_rank if packing.sequence_packing else None,
    )
    prepare_config(transformer_config, model)
    if (vision := vision_of(config)) is not None:
        check_stages(vision, config.layers_of_parts)
        transformer_config.mrope_section = list(vision.sections)
    # None of these is a field of megatron-core's dataclass. `Device.of` reads the first, core
    # attention the second, `tile_layers` the third, `cost_of` the fourth, `build_gpt` the fifth,
    # the sixth is one of later Megatron-LM's, and `build_training` completes the last.
    transformer_config.device = device  # type: ignore[attr-defined]
    transformer_config.query_groups_per_gather = parallel.query_groups_per_gather  # type: ignore[attr-defined]
    transformer_config.activation_options = config.activations  # type: ignore[attr-defined]
    transformer_config.layer_kinds = model.layer_kinds()  # type: ignore[attr-defined]
    transformer_config.kernels = kernels  # type: ignore[attr-defined]
    if packing.sequence_packing:
        scheduler = packing.sequence_packing_scheduler or "default"
        transformer_config.sequence_packing_scheduler = scheduler  # type: ignore[attr-defined]
        options = PackingOptions(
            over_length_policy=packing.over_length_policy,
            scheduling=config.scheduling,
            seed=config.training.seed,
            payloads=None
            if vision is None
            else payload_store(
                image_cost(config, vision),
                url_cache(config.images.image_url_cache, config.images.image_url_hosts),
            ),
        )
        transformer_config.sequence_packing_options = options  # type: ignore[attr-defined]
    return transformer_config


def build_model(
    config: SFTConfig,
    transformer_config: TransformerConfig,
    vocab_size: int,
    device: Device,
    pretrained: Pretrained | MegatronCheckpoint | None = None,
) -> list[DistributedDataParallel]:
    """Returns the model chunks of this rank under megatron-core's DistributedDataParallel, with
    `pretrained` weights if given.
    """
    parallel = config.parallel
    ddp_config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=config.training.bf16 and config.optimizer.main_grads_dtype == "fp32",
        overlap_grad_reduce=parallel.overlap_grad_reduce,
        overlap_param_gather=parallel.overlap_param_gather,
        use_distributed_optimizer=config.shards_optimizer,
    )
    gpts = [
        build_gpt(config, transformer_config, vocab_size, number).to(device.place)
        for number in range(config.num_virtual_stages or 1)
    ]
    vision = vision_of(config)
    adapter = pretrained.adapter if isinstance(pretrained, Pretrained) else None
    if isinstance(pretrained, MegatronCheckpoint):
        for gpt in gpts:
            CheckpointWeights(pretrained.path, gpt).read_all(vocab_size)
    elif pretrained is not None:
        # Before the optimizer is built, which copies the weights.
        read_weights(gpts, pretrained.weights, pretrained.folder)
    chunks = []
    # The order is: cast, add adapters, wrap. Adapters then stay float32, and
    # DistributedDataParallel, which allocates gradients for parameters that require them at that
    # moment, allocates none for frozen weights.
    for number, gpt in enumerate(gpts):
        module: torch.nn.Module = gpt
        if config.training.bf16:
            module = Float16Module(transformer_config, module)
        if config.lora.lora:
            tensors = None
            if isinstance(pretrained, Pretrained):
                tensors = adapted_tensors(pretrained.weights, config.lora)
            add_adapters(gpt, config.lora, config.training.seed, tensors)
            if adapter is not None:
                read_weights([gpt], adapter.weights, adapter.folder)
        if vision is not None:
            set_trained(gpt, vision, config.images)
        place_side_by_side(gpt)
        with side_by_side_in_buffers(module):
            chunk = DistributedDataParallel(
                config=transformer_config,
                ddp_config=ddp_config,
                module=module,
                # As in Megatron-LM: gradients of further chunks are reduced during the passes of
                # other chunks, so that buckets would gain nothing.
                disable_bucketing=number > 0,
            )
        chunks.append(chunk)
    # Only the first data-parallel rank has read the HuggingFace weights: send them to the others.
    if pretrained is not None:
        wait_for_all()
    for chunk in chunks:
        chunk.broadcast_params()
    return chunks


def build_gpt(
    config: SFTConfig, transformer_config: TransformerConfig, vocab_size: int, number: int
) -> GPTModel:
    """Builds chunk `number` of this rank. The first chunk of the first stage has the embedding, the
    last chunk of the last stage the output layer.
    """
    model = config.model
    stage = parallel_state.get_pipeline_model_parallel_rank()
    num_stages = parallel_state.get_pipeline_model_parallel_world_size()
    vp_stage = number if config.num_virtual_stages is not None else None
    block_spec = packed_block_spec(
        transformer_config, vp_stage, model, arguments_of_attention(model)
    )
    has_scores = config.preference.scores_answers
    vision = vision_of(config)
    gpt = GPTModel(
        config=transformer_config,
        transformer_layer_spec=block_spec,
        mtp_block_spec=packed_mtp_block_spec(transformer_config, block_spec, vp_stage=vp_stage),
        vocab_size=padded_vocab_size(vocab_size, config),
        max_sequence_length=model.max_position_embeddings or model.seq_length,
        pre_process=stage == 0 and number == 0,
        post_process=stage == num_stages - 1 and number == (config.num_virtual_stages or 1) - 1,
        # A reward model has no output layer, which the embeddings could be.
        share_embeddings_and_output_weights=not (
            model.untie_embeddings_and_output_weights or has_scores
        ),
        position_embedding_type=model.position_embedding_type,
        rotary_percent=model.rotary_percent,
        rotary_base=model.rotary_base,
        # Images are merged into the whole of a pack's embeddings, before they are cut.
        **({} if vision is None else {"scatter_embedding_sequence_parallel": False}),
        vp_stage=vp_stage,
    )
    gpt.model_type = ModelType.encoder_or_decoder  # megatron-core's schedules ask
    drop_unused_output_weight(gpt)
    if transformer_config.perform_initialization and transformer_config.use_cpu_initialization:
        draw_own_experts(gpt, config.training.seed)
    mend_expert_biases(gpt)
    share_whole(gpt)
    mask_padding(gpt)
    keep_frequencies(gpt)
    kernels: KernelConfig = transformer_config.kernels  # type: ignore[attr-defined]
    if kernels.moe_grouped_gemm:
        group_experts(gpt)
    if kernels.moe_permute_fusion and not transformer_config.moe_permute_fusion:
        gather_tokens(gpt)
    if not transformer_config.perform_initialization:
        mark_shards(gpt)
    add_to_gpt(gpt, model, vocab_size)
    keep_inputs_on_host(gpt)
    tile_layers(gpt, is_random=config.lora.lora and config.lora.lora_dropout > 0)
    if vision is not None:
        add_vision(gpt, vision)
    if has_scores:
        add_score_head(gpt, model.init_method_std, config.training.seed)
    elif config.training.logits_of_masked_tokens:
        keep_other_gradients(gpt)
    else:
        num_words = vocab_size if model.mask_vocab_padding else None
        is_fused = kernels.cross_entropy_loss_fusion
        skip_masked_tokens(
            gpt,
            num_words,
            logit_rule(model),
            is_fused=bool(is_fused),
            keeps_logits=config.training.keep_logits,
        )
    return gpt


def mark_shards(gpt: torch.nn.Module) -> None:
    """Marks the weights that are shards over tensor parallel, as megatron-core does where it
    initialises them.

    It takes unmarked weights for copies: the norm of the gradients would count those of one rank
    only, and clipping would do too little.
    """
    kinds = (ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding)
    for module in (module for module in gpt.modules() if isinstance(module, kinds)):
        if module.weight is not None and not hasattr(module.weight, "tensor_model_parallel"):
            dim = 1 if isinstance(module, RowParallelLinear) else 0
            set_tensor_model_parallel_attributes(module.weight, True, dim, 1)
