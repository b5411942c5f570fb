"""pure. Rules over the options of several groups: what contradicts what in a run."""

from __future__ import annotations

import math
from typing import Any

from megatron.packing.flags import flag_of
from megatron.packing.model.options import Architecture
from megatron.packing.rules import Rule, needs
from megatron.sft.options.preference import REFERENCED


def _uneven_batch(options: Any, data_parallel_size: int) -> object:
    return options.global_batch_size % (data_parallel_size * options.micro_batch_size)


def _uneven_interleaving(options: Any, run: Any, data_parallel_size: int) -> dict[str, int]:
    per_draw = data_parallel_size * options.micro_batch_size
    microbatches = options.global_batch_size // per_draw
    is_uneven = (
        not options.sequence_packing
        and run.num_virtual_stages
        and microbatches % options.pipeline_model_parallel_size
    )
    return {"microbatches": microbatches} if is_uneven else {}


def _router_is_constant(options: Any) -> bool:
    return (
        options.num_experts is not None
        and options.moe_router_topk == 1
        and not options.moe_router_pre_softmax
        and options.pretrained_checkpoint is None
    )


def _recomputed_runs_are_torn(options: Any, run: Any) -> dict[str, int]:
    of_run = 1 if options.recompute_method == "block" else options.recompute_num_layers or 1
    uneven = [layers for layers in run.layers_of_parts if layers % of_run]
    return {"layers": uneven[0]} if uneven else {}


def _ranks_are_not_grouped(options: Any) -> bool:
    tensor = options.tensor_model_parallel_size
    experts = tensor if options.num_experts is None else options.expert_model_parallel_size
    return (
        options.use_tp_pp_dp_mapping
        and options.pipeline_model_parallel_size > 1
        and experts != tensor * options.context_parallel_size
    )


def _dump_after_the_end(options: Any) -> dict[str, int]:
    last = options.train_iters or math.inf  # by --train-epochs: not known yet
    beyond = [step for step in options.dump_schedule if step > last]
    return {"step": beyond[0]} if beyond else {}


_DROPOUTS = ("hidden_dropout", "attention_dropout", "lora_dropout")


def _dropout_of_pairs(options: Any) -> dict[str, str]:
    if options.loss not in REFERENCED:
        return {}
    flags = [flag_of(name) for name in _DROPOUTS if getattr(options, name)]
    return {"flag": flags[0]} if flags else {}


PREFERENCE_RULES = (
    Rule(
        when=lambda options: options.loss != "sft" and not options.sequence_packing,
        why="{loss} needs {sequence_packing.flag}: a pair is a tree, whose prompt is computed once",
        way_out="pass it",
    ),
    Rule(
        when=lambda options: options.loss != "sft" and options.mock_data,
        why="{loss} needs pairs of answers, which {mock_data.flag} does not have",
        way_out="pass --data-path",
    ),
    Rule(
        when=lambda options: options.loss != "sft" and options.mtp_num_layers is not None,
        why="{loss} must not be used with {mtp_num_layers.flag}, which predicts no trees",
        way_out="drop one",
    ),
    Rule(
        when=lambda options: options.loss != "sft" and options.train_turns is not None,
        why="{train_turns.flag} chooses turns to imitate, but {loss} compares last answers",
        way_out="drop it",
    ),
    Rule(
        when=lambda options: options.loss != "sft" and options.logits_of_masked_tokens,
        why="{loss} must not be used with {logits_of_masked_tokens.flag}",
        way_out="drop it",
    ),
    Rule(
        when=lambda options: options.loss == "reward" and options.over_length_policy == "truncate",
        why="{over_length_policy.flag} truncate cuts answers, of which {loss} scores the last "
        "token",
        way_out="pass {over_length_policy.flag} drop",
    ),
    Rule(
        when=lambda options: (
            options.loss == "reward"
            and options.lora
            and "score" not in options.lora_modules_to_save
        ),
        why="{lora_modules_to_save.flag} must have score with {loss}, whose head has no adapter",
        way_out="add it, or merge the adapter of {lora_adapter.flag} into its model first",
    ),
    Rule(
        when=lambda options: options.loss == "reward" and "lm_head" in options.lora_modules_to_save,
        why="{lora_modules_to_save.flag} must not have lm_head with {loss}, whose head is score",
        way_out="take it out",
    ),
    Rule(
        when=lambda options: options.loss != "reward" and "score" in options.lora_modules_to_save,
        why="{lora_modules_to_save.flag} score is the head of reward models",
        way_out="pass {loss.flag} reward, or take it out",
    ),
    Rule(
        when=lambda options: options.loss == "reward" and options.sample_prompts is not None,
        why="{sample_prompts.flag} needs a model that generates, but {loss} trains one of scores",
        way_out="drop it",
    ),
    Rule(
        when=lambda options: options.loss == "reward" and options.doctor,
        why="{doctor.flag} examines losses of words, but {loss} trains scores",
        way_out="drop it",
    ),
    Rule(
        when=_dropout_of_pairs,
        why="{loss} compares with a reference without dropout, so that {flag} must be 0",
        way_out="pass {flag} 0",
    ),
    Rule(
        when=lambda options: (
            options.loss in REFERENCED and options.finetune and options.load is not None
        ),
        why="{loss} takes the weights of {pretrained_checkpoint.flag} for its reference, but "
        "{finetune.flag} loads others",
        way_out="pass the checkpoint as {pretrained_checkpoint.flag}",
    ),
    Rule(
        when=lambda options: (
            options.loss == "kto"
            and (not options.loss_type or "kto" in options.loss_type)
            and options.global_batch_size < 2
        ),
        why="{loss} needs a {global_batch_size.flag} of at least 2: it compares with the answer to "
        "another prompt of the batch",
        way_out="raise it, or pass {loss_type.flag} apo_zero_unpaired",
    ),
)
"""Rules of preference tuning."""

IMAGE_RULES = (
    *needs("images", "pretrained_checkpoint", "sequence_packing"),
    Rule(
        when=lambda options: options.images and options.loss != "sft",
        why="{images.flag} trains answers by imitation, not {loss}",
        way_out="drop one",
    ),
    Rule(
        when=lambda options: options.images and options.mtp_num_layers is not None,
        why="{images.flag} must not be used with {mtp_num_layers.flag}, which would predict images",
        way_out="drop one",
    ),
    Rule(
        when=lambda options: options.images and options.pack_cost is not None,
        why="{pack_cost.flag} has times of packs without images",
        way_out="drop it: the tower and the language model are then both counted in FLOPs",
    ),
    Rule(
        when=lambda options: options.images and options.sample_prompts is not None,
        why="{sample_prompts.flag} answers by text alone, without the images of {images.flag}",
        way_out="drop it, and ask the model of --save-hf by megatron-sft chat",
    ),
    Rule(
        when=lambda options: options.lora and options.freeze_language_model,
        why="{lora.flag} trains the language model, which {freeze_language_model.flag} freezes",
        way_out="drop one",
    ),
    Rule(
        when=lambda options: (
            options.freeze_language_model
            and options.pipeline_model_parallel_size > 1
            and options.use_distributed_optimizer
        ),
        why="{freeze_language_model.flag} leaves later pipeline stages nothing to train, of which "
        "{use_distributed_optimizer.flag} cannot be saved",
        way_out="drop one",
    ),
    Rule(
        when=lambda options: options.images and options.doctor,
        why="{doctor.flag} examines the language model without the tower of {images.flag}",
        way_out="drop it",
    ),
    Rule(
        when=lambda options: (
            options.lora
            and (options.tower_lr or options.projector_lr)
            and options.save_hf is not None
            and not options.lora_merge
        ),
        why="{save_hf.flag} would write an adapter, which has no place for the tower that "
        "{tower_lr.flag} and {projector_lr.flag} train",
        way_out="pass {lora_merge.flag}",
    ),
)
"""Rules of images."""

LENGTH_RULES = (
    Rule(
        when=_dump_after_the_end,
        why="{dump_schedule.flag} {step} must be at most {train_iters}, the last step",
    ),
    Rule(
        when=lambda options, run: (
            {"capacity": run.capacity_per_rank, "least": run.smallest_capacity_per_rank}
            if options.sequence_packing and run.capacity_per_rank < run.smallest_capacity_per_rank
            else {}
        ),
        why="{max_seqlen_per_dp_cp_rank.flag} {capacity} must hold a sequence of {seq_length} in "
        "this parallel layout",
        way_out="raise it to {least}",
    ),
    Rule(
        when=lambda options, run: (
            {"multiple": run.alignment.pack}
            if not options.sequence_packing and options.seq_length % run.alignment.pack
            else {}
        ),
        why="{seq_length} must be a multiple of {multiple} in this parallel layout without packing",
    ),
)
"""Rules of lengths, of sequences and of the run."""

RUN_RULES = (
    Rule(
        when=lambda options: options.train_epochs is not None and options.mock_data,
        why="{train_epochs.flag} needs {data_path.flag}, as {mock_data.flag} never ends",
        way_out="pass {train_iters.flag}",
    ),
    Rule(
        when=_uneven_batch,
        why="{global_batch_size} must be a multiple of {micro_batch_size} times the data-parallel "
        "size {data_parallel_size}",
    ),
    Rule(
        when=_uneven_interleaving,
        why="an interleaved pipeline of {pipeline_model_parallel_size.value} stages needs a "
        "multiple of {pipeline_model_parallel_size.value} microbatches, but {global_batch_size} "
        "makes {microbatches}",
    ),
    Rule(
        when=lambda options: (
            options.outlier_delay_steps and options.sequence_packing_scheduler == "empty"
        ),
        why="{outlier_delay_steps.flag} needs a scheduler that mixes what was loaded",
        way_out="pass {sequence_packing_scheduler.flag} default",
    ),
    Rule(
        when=_router_is_constant,
        why="{moe_router_topk} needs {moe_router_pre_softmax.flag}: the share of one expert among "
        "the chosen is constant, and would not train the router",
    ),
    Rule(
        when=_recomputed_runs_are_torn,
        why="{recompute_num_layers} must divide the layers of a stage, {layers}",
        way_out="lower it, or pass {recompute_method.flag} block",
    ),
    Rule(
        when=lambda options, run: (
            options.mtp_num_layers is not None and not run.layers_of_parts[-1]
        ),
        why="{mtp_num_layers.flag} needs a layer on the last pipeline stage, which is the kind of "
        "layer it is",
        way_out="drop {account_for_loss_in_pipeline_split.flag}",
    ),
    Rule(
        when=lambda options: len(options.cp_comm_type) not in (1, options.num_layers),
        why="{cp_comm_type.flag} must be one value, or one for each of {num_layers}",
    ),
    Rule(
        when=lambda options: (
            options.fine_grained_activation_offloading
            and (options.recompute_granularity != "full" or options.recompute_method == "block")
        ),
        why="{fine_grained_activation_offloading.flag} needs {recompute_granularity.flag} full, of "
        "all layers",
        way_out="pass it, without {recompute_method.flag} block",
    ),
    Rule(
        when=lambda run: run.num_virtual_stages == 1,
        why="{num_layers_per_virtual_pipeline_stage.flag} leaves one virtual stage per rank",
        way_out="lower it or drop it",
    ),
    Rule(
        when=_ranks_are_not_grouped,
        why="{use_tp_pp_dp_mapping.flag} with a pipeline needs {context_parallel_size.flag} 1, and "
        "with {num_experts.flag} an {expert_model_parallel_size.flag} of tensor times context "
        "parallel size: megatron-core cannot group others",
    ),
    *LENGTH_RULES,
    *PREFERENCE_RULES,
    *IMAGE_RULES,
    Rule(
        when=lambda options: options.sample_prompts is not None and options.mock_data,
        why="{sample_prompts.flag} needs words",
        way_out="pass {data_path.flag}, not {mock_data.flag}",
    ),
    Rule(
        when=lambda options: options.lora and options.mtp_num_layers is not None,
        why="{lora.flag} must not be used with {mtp_num_layers.flag}, whose layers have no "
        "adapters",
        way_out="drop one",
    ),
    Rule(
        when=lambda options, run: options.lora and 0 in run.layers_of_parts,
        why="{lora.flag} needs a layer on every pipeline stage",
        way_out="embedding or loss has one alone: drop "
        "{account_for_embedding_in_pipeline_split.flag} and "
        "{account_for_loss_in_pipeline_split.flag}",
    ),
    Rule(
        when=lambda options: options.use_precision_aware_optimizer and options.lora,
        why="{use_precision_aware_optimizer.flag} saves little with {lora.flag}, and was not "
        "checked with it",
        way_out="drop one",
    ),
    *needs("use_precision_aware_optimizer", "use_distributed_optimizer"),
    Rule(
        when=lambda options: options.keep_logits and options.final_logit_softcapping is not None,
        why="{keep_logits.flag} does not work with {final_logit_softcapping.flag}",
        way_out="drop it",
    ),
)
"""Facts: options, by name; run, the `SFTConfig`; data_parallel_size."""

_OWN_KERNEL_RULES = {
    "cross_entropy_loss_fusion": Rule(
        when=lambda options: options.logits_of_masked_tokens,
        why="and {logits_of_masked_tokens.flag} exclude one another",
    ),
    "gradient_accumulation_fusion": Rule(
        when=lambda options: options.lora,
        why="is of weights that {lora.flag} does not train",
        way_out="drop it",
    ),
}
KERNEL_RULES = {
    kernel: (
        *Architecture.kernel_rules.get(kernel, ()),
        *((_OWN_KERNEL_RULES[kernel],) if kernel in _OWN_KERNEL_RULES else ()),
    )
    for kernel in (*Architecture.kernel_rules, "gradient_accumulation_fusion")
}
"""As those of `Architecture`, with what else a run has."""
