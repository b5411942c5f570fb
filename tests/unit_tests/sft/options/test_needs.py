"""All options of a run: which act only with another, and what a user reads who forgets that one."""

from dataclasses import MISSING, fields

import pytest

from megatron.packing.flag_help import Command
from megatron.packing.flag_needs import Condition
from megatron.packing.flags import FlagError
from megatron.sft.arguments.parse import parse_with_notes
from megatron.sft.options.config import GROUPS
from tests.unit_tests.sft.command_line import BASE

FIELDS = {field.name: field for group in GROUPS for field in fields(group)}
KEYS = ("only_with", "idle_without")
ACT_ALONE = """
    num_layers hidden_size num_attention_heads kv_channels ffn_hidden_size swiglu geglu quick_geglu
    num_experts mtp_num_layers window_size attention_output_gate linear_attention_freq kv_lora_rank
    normalization
    apply_layernorm_1p position_embedding_type disable_bias_linear add_qkv_bias qk_layernorm
    add_proj_bias norm_position softmax_scale softmax_type attn_logit_softcapping
    final_logit_softcapping
    embedding_multiplier residual_multiplier logits_scaling make_vocab_size_divisible_by
    recompute_granularity seq_length max_position_embeddings norm_epsilon scale_embeddings
    untie_embeddings_and_output_weights mask_vocab_padding hidden_dropout attention_dropout
    init_method_std attention_backend tensor_model_parallel_size pipeline_model_parallel_size
    context_parallel_size query_groups_per_gather mlp_chunks_for_training use_distributed_optimizer
    overlap_grad_reduce distributed_timeout_minutes
    sequence_packing over_length_policy data_path valid_data_path mock_data tokenizer_type
    tokenizer_model num_workers prefetch_global_batches train_iters train_epochs train_samples
    global_batch_size lr micro_batch_size lr_decay_style lr_warmup_iters lr_warmup_samples
    lr_warmup_fraction weight_decay clip_grad adam_beta1 adam_beta2 adam_eps bf16
    logits_of_masked_tokens keep_logits fit_to_memory deterministic_mode seed eval_iters
    exit_interval exit_duration_in_mins skip_nan_steps lora save load pretrained_checkpoint save_hf
    dry_run
    log_interval run_dir tensorboard_dir wandb_project gradient_accumulation_fusion
    cross_entropy_loss_fusion loss kv_lora_rank global_kv_channels layer_scalar value_layernorm
""".split()
"""Options that need none."""
CHECKED_ELSEWHERE = """
    num_query_groups group_query_attention moe_layer_freq moe_shared_expert_intermediate_size
    window_attn_skip_freq qk_layernorm_over_heads window_rotary_base query_scale_beta
    moe_shared_expert_gate moe_branch_norms moe_router_enable_expert_bias
    recompute_method recompute_num_layers fine_grained_activation_offloading
    num_layers_per_virtual_pipeline_stage num_virtual_stages_per_pipeline_rank
    decoder_first_pipeline_num_layers decoder_last_pipeline_num_layers expert_model_parallel_size
    overlap_param_gather blend_mode blend_weight_schedule blend_weights_by chat_template
    chat_template_kwargs lr_wsd_decay_iters use_precision_aware_optimizer bias_swiglu_fusion
    moe_grouped_gemm moe_permute_fusion images
""".split()
"""Options that need more than a value of one other option. `__post_init__` or `SFTConfig.check`
refuse them alone, or they are options of the model, which folders of models set as well.
"""


def test_every_option_says_what_it_needs():
    """A new option that acts only with another would be ignored without it, as --lora-rank was."""
    declared = {name for name, field in FIELDS.items() if set(KEYS) & set(field.metadata)}
    assert not declared & {*ACT_ALONE, *CHECKED_ELSEWHERE}
    assert declared | {*ACT_ALONE, *CHECKED_ELSEWHERE} == set(FIELDS)


@pytest.mark.parametrize("name", CHECKED_ELSEWHERE)
def test_those_checked_elsewhere_are_refused_alone(name):
    """The list would hide an option that is ignored."""
    values = {
        "chat_template": "x.jinja",
        "chat_template_kwargs": '{"a": 1}',
        "blend_mode": "random",
    }
    values |= {"blend_weights_by": "tokens", "blend_weight_schedule": "{}"}
    values |= {"recompute_method": "block", "decoder_last_pipeline_num_layers": "1"}
    switch = FIELDS[name].default is False or name.endswith(("fusion", "gemm"))
    layers = ["1"] * 8 if name in ("moe_layer_freq", "window_attn_skip_freq") else ["2"]
    value = [] if switch else [values[name]] if name in values else layers
    with pytest.raises(FlagError, match=r" needs? | belong together"):
        parse_notes(f"--{name.replace('_', '-')}", *value)


def test_conditions_name_options():
    """A condition on a name that is no option counts as met."""
    for field in FIELDS.values():
        for key in KEYS:
            texts = field.metadata.get(key, ())
            for text in (texts,) if isinstance(texts, str) else texts:
                for alternative in text.split("|"):
                    condition = Condition.parse(alternative)
                    parent = FIELDS[condition.name]
                    assert parent.default is not MISSING
                    if condition.sign == ">=":
                        assert isinstance(parent.default, int)


def parse_notes(*arguments: str, base: str = f"{BASE} --mock-data") -> list[str]:
    return parse_with_notes([*base.split(), *arguments], 8, Command())[1]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("--lora-rank 16 --lora-alpha 32", "--lora-rank needs --lora; pass it"),
        ("--lora-dropout 0.1", "--lora-dropout needs --lora"),
        ("--lora-experts all", "--lora-experts needs --lora"),
        ("--lora-merge", "--lora-merge needs --lora and --save-hf"),
        ("--keep-best", "--keep-best needs --save; pass it"),
        ("--early-stopping 2 --eval-iters 0", "--early-stopping needs --eval-iters of at least 1"),
        ("--optimizer-offload-fraction 1.0", "--optimizer-offload-fraction needs --optimizer-cpu"),
        ("--outlier-delay-steps 4", "--outlier-delay-steps needs --sequence-packing"),
    ],
)
def test_another_run_than_the_one_meant_is_refused(arguments, said):
    """`--lora-rank 16 --lora-alpha 32` trained all weights in silence: both are defaults."""
    with pytest.raises(FlagError) as failure:
        parse_notes(*arguments.split())
    assert str(failure.value).startswith(said)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("--moe-router-topk 4", "--moe-router-topk has no effect without --num-experts"),
        ("--moe-aux-loss-coeff 0.01", "--moe-aux-loss-coeff has no effect without --num-experts"),
        ("--rotary-base 1e6", "--rotary-base has no effect without --position-embedding-type rope"),
        (
            "--sequence-parallel",
            "--sequence-parallel has no effect without --tensor-model-parallel",
        ),
        ("--cp-comm-type a2a", "--cp-comm-type has no effect without --context-parallel-size of"),
        ("--cp-comm-type p2p", None),
        ("--exp-avg-dtype fp32", None),
        ("--eval-iters 0 --eval-interval 100", "--eval-interval has no effect without --eval-ite"),
        ("--lr-decay-style constant --min-lr 1e-5", "--min-lr has no effect without --lr-decay"),
        ("--lr-wsd-decay-style cosine", "--lr-wsd-decay-style has no effect without --lr-decay-s"),
        ("--max-bad-samples-in-a-row 5", "--max-bad-samples-in-a-row has no effect without --ski"),
        ("--sample-tokens 9", "--sample-tokens has no effect without --sample-prompts"),
        ("--split 90,10,0", "--split has no effect without --data-path"),
        ("--mtp-loss-scaling-factor 0.3", "--mtp-loss-scaling-factor has no effect without --mtp"),
        ("--vocab-size 999", None),
    ],
)
def test_an_option_without_effect_gets_a_note(arguments, said):
    """A run that is sound otherwise goes on, and its log says what was not done."""
    notes = [line for line in parse_notes(*arguments.split()) if "no effect" in line]
    assert len(notes) == (said is not None)
    assert said is None or notes[0].startswith(f"note: {said}")


def test_split_is_idle_beside_validation_data():
    """A part of the training data would be missed there."""
    base = f"{BASE} --data-path a.jsonl --valid-data-path b.jsonl --split 90,10,0"
    assert parse_notes(base=base) == ["note: --split has no effect with --valid-data-path"]
