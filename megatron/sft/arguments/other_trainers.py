"""pure. Names that other trainers have for options: each is answered with ours, in one line.

TRL and HuggingFace's Trainer, LLaMA-Factory, Axolotl and ms-swift, on the command line and as keys
of YAML. A name that several of them have means the same in each; one with a star stands for all of
its kind.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from fnmatch import fnmatchcase

from megatron.sft.arguments.megatron_flags import refusal_of
from megatron.sft.options.preference import LEFT_OUT, LOSS_TYPES

_OURS = {
    "--pretrained-checkpoint FOLDER (a folder on this machine)": """
        model_name_or_path model_name model base_model base_model_config model_id_or_path
    """,
    "--data-path FILE": "dataset dataset_name datasets train_file train_data dataset_path data",
    "--valid-data-path FILE": "val_dataset eval_dataset validation_file test_datasets eval_data",
    "--split 95,5 (shares of --data-path)": """
        val_size val_set_size split_dataset_ratio validation_split_percentage dataset_test_split
        dataset_train_split
    """,
    "--seq-length": """
        max_length max_seq_length cutoff_len sequence_len model_max_length max_seq_len
    """,
    "--over-length-policy": "truncation_strategy truncation_mode excess_length_strategy",
    "--sequence-packing": """
        packing sample_packing neat_packing padding_free dpo_padding_free packing_strategy
        group_by_length eval_packing eval_sample_packing multipack
    """,
    "--lr": "learning_rate max_lr",
    "--tower-lr": "vit_lr vision_lr vision_tower_lr",
    "--projector-lr": "aligner_lr merger_lr mm_projector_lr",
    "--image-max-pixels": "max_pixels",
    "--freeze-language-model": "freeze_llm",
    "--image-root": "media_dir image_folder image_dir",
    "--lr-decay-style": "lr_scheduler_type lr_scheduler",
    "--lr-warmup-fraction": "warmup_ratio",
    "--lr-warmup-iters N or --lr-warmup-fraction X": "warmup_steps num_warmup_steps",
    "--min-lr X": "lr_scheduler_kwargs cosine_min_lr_ratio",
    "--deterministic-mode": "full_determinism",
    "--lora-experts": "lora_target_parameters target_parameters",
    "--data-columns": "field_* message_field_* message_property_mappings text_column",
    "--train-epochs": "num_train_epochs num_epochs max_epochs epochs",
    "--train-iters": "max_steps max_train_steps",
    "--global-batch-size, sequences of a step over all ranks": """
        per_device_train_batch_size gradient_accumulation_steps train_batch_size batch_size
        per_gpu_train_batch_size
    """,
    "--clip-grad": "max_grad_norm gradient_clipping",
    "--adam-eps": "adam_epsilon",
    "--recompute-granularity full": """
        gradient_checkpointing gradient_checkpointing_kwargs activation_checkpointing
        activation_checkpointing_kwargs
    """,
    "--bf16": """
        torch_dtype dtype fp16 tf32 bf16_full_eval fp16_full_eval mixed_precision pure_bf16 bfloat16
        float16 compute_dtype infer_dtype precision
    """,
    "--attention-backend": """
        attn_implementation attn_impl flash_attn flash_attention xformers_attention sdp_attention
        use_flash_attn flash_attention_2 flash_attn_2 eager_attention sage_attention
    """,
    "--save FOLDER (checkpoints) and --save-hf FOLDER (the model)": "output_dir export_dir",
    "--save-interval": "save_steps save_strategy saves_per_epoch checkpointing_steps",
    "--keep-checkpoints": "save_total_limit",
    "--keep-best": "load_best_model_at_end metric_for_best_model greater_is_better",
    "--load FOLDER": "resume_from_checkpoint auto_resume_from_checkpoints",
    "--eval-interval": """
        eval_steps eval_strategy evaluation_strategy evals_per_epoch do_eval eval_on_start
    """,
    "--eval-iters, global batches of an evaluation": "per_device_eval_batch_size eval_batch_size",
    "--early-stopping": "early_stopping_patience",
    "--log-interval": "logging_steps logging_strategy logging_first_step",
    "--tensorboard-dir FOLDER": "logging_dir use_tensorboard",
    "--tensorboard-dir FOLDER or --wandb-project NAME": """
        report_to swanlab_* use_swanlab
        comet_* use_comet mlflow_* use_mlflow trackio_* use_trackio logger log_with
    """,
    "--wandb-project NAME": "use_wandb project",
    "--wandb-exp-name": "run_name wandb_name wandb_run_id",
    "--num-workers": """
        dataloader_num_workers dataset_num_proc preprocessing_num_workers dataset_processes
    """,
    "--seed": "data_seed",
    "--chat-template FILE": "template chat_template_path chat_template_jinja",
    "--tokenizer-model FOLDER": "tokenizer_name_or_path tokenizer_name tokenizer_config tokenizer",
    "--beta": """
        pref_beta dpo_beta kto_beta orpo_beta orpo_alpha simpo_beta cpo_beta rlhf_beta
        reference_policy_kl_penalty ref_policy_kl_penalty
    """,
    "--loss-type sigmoid_norm": "dpo_norm_loss preference_average_log_probs",
    "--loss-type sigmoid bco_pair --loss-weights 1 X": "pref_bco_weight",
    "--loss (dpo, simpo, orpo, cpo, kto) and --loss-type": "pref_loss dpo_loss_type loss_fn",
    "--reference-file FILE, which megatron-sft score writes": "precompute_ref_*",
    "--simpo-gamma": "gamma",
    "--simpo-gamma, which is this ratio times --beta": "gamma_beta_ratio simpo_gamma_beta_ratio",
    "--loss-type sigmoid sft --loss-weights 1 X": """
        rpo_alpha pref_ftx dpo_sft_loss_weight sft_loss_weight nll_loss_weight
    """,
    "--label-smoothing, with --loss-type robust": "dpo_label_smoothing",
    "--loss-weights, one for each of --loss-type": "preference_loss_weight dpo_loss_weights",
    "--f-divergence-type": "f_divergence",
    "--desirable-weight": "kto_chosen_weight kto_desirable_weight",
    "--undesirable-weight": "kto_rejected_weight kto_undesirable_weight",
    "--lora": "use_peft finetuning_type adapter train_type tuner_type sft_type peft_type",
    "--lora-rank": "lora_r peft_r",
    "--lora-target-modules": """
        lora_target target_modules lora_target_linear lora_task_type lora_layers_to_transform
    """,
    "--lora-modules-to-save": "additional_target modules_to_save",
    "--lora-adapter FOLDER": "adapter_name_or_path lora_model_dir adapters",
    "--lora-rslora": "use_rslora peft_use_rslora",
    "--lora-merge": "merge_lora merge_adapter",
    "--use-distributed-optimizer (ZeRO-1; --tensor-model-parallel-size and "
    "--pipeline-model-parallel-size share the weights)": """
        deepspeed fsdp fsdp_* deepspeed_* zero zero_* zero3 sharding_strategy dp_shard_size
        use_fsdp use_deepspeed ds_config
    """,
    "--tensor-model-parallel-size": "tensor_parallel_size tp tp_size",
    "--pipeline-model-parallel-size": "pipeline_parallel_size pp pp_size",
    "--context-parallel-size": """
        sequence_parallel_degree sequence_parallel_size context_parallel_degree cp cp_size
        ring_attn_size
    """,
    "--expert-model-parallel-size": "expert_parallel_size ep ep_size",
    "--distributed-timeout-minutes": "ddp_timeout",
    "--moe-aux-loss-coeff": "router_aux_loss_coef output_router_logits aux_loss_coef",
    "--softmax-scale": "attention_scale attention_multiplier",
    "--skip-bad-samples": "strict",
    "weights before the files of --data-path": "mix_strategy interleave_probs interleave_prob",
    "--nproc-per-node": "num_processes num_gpus gpus n_gpu n_gpus num_gpus_per_node nproc",
    "--exit-duration-in-mins": "max_time",
}
_WAYS = {
    "drop it: only what the assistant says is trained": """
        assistant_only_loss completion_only_loss train_on_inputs train_on_prompt mask_history
        loss_scale train_on_responses_only roles_to_train train_on_eos train_on_eot
    """,
    "pass --loss dpo, cpo, simpo, orpo, kto or reward, and --loss-type for its variants; methods "
    "that generate answers (GRPO, PPO) are not offered": """
        stage do_train rl task rlhf_type trainer_cls
    """,
    "drop it: the reference is what the run begins with, --pretrained-checkpoint with its "
    "--lora-adapter": """
        ref_model* ref_adapters* mcore_ref_* ref_load sync_ref_model ref_model_mixup_alpha
        ref_model_sync_steps ref_adapter_name model_adapter_name
        force_use_ref_model tr_dpo
    """,
    "pass --loss simpo or cpo, which have no reference": "reference_free",
    "drop it: dropout is off in preference tuning": "disable_dropout",
    "drop it: no reward model judges answers here; --loss reward trains one": """
        reward_* teacher_*
    """,
    "drop it: answers are given, not generated, so that GRPO, PPO and other online methods are not "
    "here; trainers that generate (verl, NeMo-RL) can take this packing as a plug-in": """
        ppo_* grpo_* num_generations* generation_batch_size steps_per_generation use_vllm vllm_*
        sglang_* lmdeploy_* epsilon epsilon_high importance_sampling_level scale_rewards
        num_iterations mask_truncated_completions *entropy_coef* log_completions kl_coef
    """,
    "drop it: its weights need sums of squared probabilities of each token (WPO)": """
        use_weighting dpo_use_weighting
    """,
    "drop it: --seq-length limits a prompt with its answer": """
        max_prompt_length max_completion_length max_target_length
    """,
    "drop it: evaluations compare given answers": """
        generate_during_eval dpo_generate_during_eval
    """,
    "drop it: padding does not exist in packs": "padding_value label_pad_token_id",
    "drop it: the loss is cross-entropy": "use_dft_loss enable_dft_loss use_eaft*",
    "drop it: the optimizer is Adam": """
        optim optimizer optim_* galore_* qgalore_* apollo_* use_apollo badam_* use_adam_mini
        use_muon lomo* lisa_*
    """,
    "drop it: all weights are trained, or adapters (--lora)": """
        freeze_* trainable_* unfrozen_parameters use_llama_pro llamapro_*
    """,
    "drop it: megatron-sft chat generates": """
        max_new_tokens temperature top_p top_k min_p do_sample num_beams repetition_penalty
        length_penalty generation_config stop_words do_predict predict_with_generate
    """,
    "drop it: nothing is downloaded; hf download makes the folder": """
        cache_dir model_revision revision hub_revision hf_hub_token use_auth_token
        hf_use_auth_token download_mode use_modelscope
    """,
    "drop it: the processes that other sizes leave are data parallel": """
        dp dp_size data_parallel_size dp_replicate_size
    """,
    "drop it: layers are shared out by --tensor-model-parallel-size and others": """
        device_map max_memory low_cpu_mem_usage parallelism_config accelerator_config
    """,
    "drop it: it has no equal here": """
        log_level* logging_nan_inf_filter log_on_each_node disable_tqdm prediction_loss_only
        eval_delay eval_do_concat_batches eval_accumulation_steps include_for_metrics debug
        skip_memory_metrics label_names model_init_kwargs use_fast_tokenizer tokenizer_use_fast
        tokenizer_legacy resize_vocab upcast_* include_effective_tokens_per_second
        compute_accuracy gc_steps group_by_modality_length save_first_step
    """,
    "drop it: megatron-core does this": """
        ddp_backend ddp_bucket_cap_mb ddp_broadcast_buffers ddp_find_unused_parameters
        ddp_static_graph activation_offloading use_reentrant_gc dataloader_pin_memory
        dataloader_persistent_workers dataloader_prefetch_factor dataloader_drop_last
        torch_empty_cache_steps use_cache average_tokens_across_devices
    """,
    "drop it: training data are shuffled by --seed": """
        shuffle shuffle_dataset dataset_shuffle disable_shuffling shuffle_merged_datasets
        shuffle_buffer_size train_dataloader_shuffle
    """,
    "drop it: of other media images alone are trained, with --images": """
        image_* video_* audio_* min_pixels crop_to_patches
    """,
    "drop it: tower and projector are frozen without --tower-lr and --projector-lr": """
        freeze_vision_tower freeze_vit freeze_aligner freeze_multi_modal_projector
    """,
    "drop it: weights are not quantized": """
        load_in_4bit load_in_8bit quantization_bit quantization_method quant_method quant_bits
        bnb_4bit_quant_type bnb_4bit_compute_dtype use_bnb_nested_quant
    """,
    "drop it: nothing is sent away; upload the folder of --save-hf": """
        push_to_hub hub_model_id hub_strategy hub_token hub_private_repo hub_always_push
    """,
    "drop it: nothing is cached or compiled beforehand": """
        overwrite_cache dataset_prepared_path streaming buffer_size torch_compile* liger_*
        use_liger_kernel enable_liger_kernel use_unsloth* lazy_tokenize tokenized_path
        load_from_cache_file use_liger_loss use_logits_to_keep dpo_use_logits_to_keep
        dpo_use_liger_kernel
    """,
    "drop it: files of a run are never overwritten": "overwrite_output_dir",
    "drop it: the chat template has them": """
        special_tokens eos_token bos_token pad_token system default_system tool_format
        agent_template
    """,
    "drop it: the layout of each record is found by itself": """
        dataset_text_field dataset_kwargs formatting remove_unused_columns columns dataset_dir
        dataset_config dataset_format
    """,
    "thoughts are trained as the records have them; for the template's variable pass "
    '--chat-template-kwargs {"enable_thinking": ...}': "enable_thinking",
    "drop it: tokens are counted in every run": "include_num_input_tokens_seen",
    "drop it: files of weights are safetensors": "save_safetensors load_safetensors",
    "drop it: without --save nothing but --save-hf is written": "save_only_model",
    "drop it: code of a model's folder is never run": "trust_remote_code",
    "drop it: this is not offered": """
        neftune_noise_alpha use_dora label_smoothing_factor plot_loss max_samples use_galore
        use_badam ema use_ema ema_* loraplus_* pissa_* loftq_* oft_* boft_* vera_* adalora_* reft_*
        relora* use_pose pose_* curriculum_sampling lora_bias lora_dtype init_lora_weights
        init_weights peft_init_lora_weights peft_use_dora rank_pattern alpha_pattern
        lora_rank_pattern lora_alpha_pattern shift_attn mixture_of_depths
        auto_find_batch_size plugins external_plugins report_to_hub pad_to_sequence_len
        pad_to_multiple_of wandb_watch wandb_log_model
        loss_watchdog_threshold loss_watchdog_patience model_author use_hf
        cross_entropy_fusion_impl
    """,
}
ANSWERS = {
    **{name: f"is {ours} here" for ours, names in _OURS.items() for name in names.split()},
    **{name: f"({way})" for way, names in _WAYS.items() for name in names.split()},
}
"""Name of another trainer, with underscores -> what to do."""


def _answer(name: str) -> str | None:
    """Returns what to do about a name with underscores; None if no other trainer has it."""
    pattern = next((each for each in ANSWERS if "*" in each and fnmatchcase(name, each)), None)
    return ANSWERS.get(name, ANSWERS.get(pattern or ""))


_ONLINE = frozenset("grpo gspo dapo ppo rloo reinforce online_dpo xpo nash_md gkd".split())
"""Methods that people pass to --loss, and that are not offered."""
_REWARD = frozenset("rm reward_model reward_modeling reward_trainer".split())
_CHOICE_OF_LOSS = re.compile(r"argument --loss: invalid choice: '([^']*)'")


def answer_to_loss(message: str) -> str | None:
    """Returns what to do about a --loss that argparse refuses with this message; None if nobody has
    a loss of this name.
    """
    match = _CHOICE_OF_LOSS.search(message)
    name = "" if match is None else match[1].lower().replace("-", "_")
    if name in _ONLINE:
        return (
            f"--loss {name} is of a method that generates answers while it trains, which is not "
            "offered; take a trainer with an engine for that, such as verl or TRL"
        )
    if name in _REWARD:
        return f"--loss {name} is --loss reward here"
    losses = [loss for loss, types in LOSS_TYPES.items() if name in types]
    if losses:
        return f"--loss {name} is --loss {losses[0]} --loss-type {name} here"
    return f"--loss-type {name} is not offered: {LEFT_OUT[name]}" if name in LEFT_OUT else None


def answers_to(unknown: Iterable[str], ours: Iterable[str]) -> dict[str, str]:
    """Returns what to do about each of these options, as the user wrote them; none about a name
    that nobody has.

    ours: our flags. `["--learning_rate", "--weight_decay"] -> {"--learning_rate": "is --lr here",
    "--weight_decay": "is --weight-decay"}`
    """
    flags = set(ours)
    of_world = "--world-size" in flags  # of a command that starts no processes
    found = {}
    for name in dict.fromkeys(unknown):
        plain = name.lstrip("-").replace("-", "_")
        flag = "--" + plain.replace("_", "-")
        if flag in flags:
            found[name] = f"is {flag}"
        elif (answer := _answer(plain.lower())) is not None:
            found[name] = answer
            if of_world:
                found[name] = found[name].replace("--nproc-per-node", "--world-size")
        elif of_world and flag == "--nproc-per-node":
            found[name] = "is --world-size here"
        elif (way := refusal_of(flag)) is not None:
            found[name] = f"({way})"
    return found
