"""What the trainer gives a model beside its options: a script with the plug-in has it, too."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PLACES = {
    "done": ["megatron/packing/plugin.py"],
    "demanded": ["megatron/packing/plugin_checks.py", "megatron/packing/plugin_rules.py"],
    "documented": ["docs/howto/plugin.md"],
    "script": [],
}
"""Files that name what a verdict says: the plug-in does it, refuses a script without it, or says
how to call it. What has nothing to do with packs is the script's own.
"""

ARGUMENTS = {
    "labels": "script",
    "packed_seq_params": "demanded",
    "loss_mask": "demanded",  # where further tokens are predicted; else it saves time alone
    "decoder_input": "script",  # words and images, by the script's own tower
    "padding_mask": "done",  # by `mask_padding`; layers of experts demand it
}
MENDS = {
    "define_te_general_gemm": "done",
    "auxiliary_losses.install": "done",
    # Faults of megatron-core in an unpacked script as much as in a packed one.
    "_ask_for_no_version_of_nothing": "script",
    "_recompute_norms_without_fp8": "script",
    "_recompute_without_a_compiler": "script",
    "_load_distributed_adam": "script",
    "_count_float32_weights_first": "script",
    "_tell_parameter_groups_apart_by_what_they_are": "script",
    "_save_without_other_processes": "script",
    "_sum_gradients_of_words": "script",  # on a CPU, in bfloat16
    # Checkpoints.
    "read.install": "script",
    "shares.install": "script",
    # Memory and time.
    "_keep_norms_on_the_device": "script",
    "_clip_in_place": "script",
    "cpu_offload.install": "script",
    "host_time.install": "script",
    "weight_gradients.install": "script",
}
PARTS = {
    "draw_own_experts": "script",  # on a CPU, of models that begin from nothing
    "mask_padding": "done",
    "keep_frequencies": "done",
    "skip_masked_tokens": "done",
    "drop_unused_output_weight": "demanded",
    "mend_expert_biases": "demanded",
    "keep_other_gradients": "script",  # done by `skip_masked_tokens`, and needed with it alone
    "group_experts": "documented",
    "gather_tokens": "documented",
    "tile_layers": "documented",
    "keep_inputs_on_host": "documented",
    "mark_shards": "script",  # of weights that no initialization has marked
    "share_whole": "script",  # one expert per token, as releases compute it
    "add_to_gpt": "script",  # the next two, and these are features
    "multiply_embeddings": "script",
    "adjust_logits": "script",
    "add_score_head": "script",  # of reward models
    "add_vision": "script",
}
SETTINGS = {
    "device": "script",  # else it is that of the tensors
    "variable_seq_lengths": "demanded",
    "overlap_p2p_comm": "demanded",
    "batch_p2p_comm": "demanded",
    "deallocate_pipeline_outputs": "demanded",
    "moe_router_load_balancing_type": "demanded",
    "max_seqlen_per_dp_cp_rank": "demanded",
    "sequence_packing_scheduler": "demanded",
    "finalize_model_grads_func": "demanded",
    "sequence_packing_options": "script",  # from the plug-in's flags
    "query_groups_per_gather": "documented",
    "activation_options": "documented",
    "layer_kinds": "script",  # the cost of layers, which is read from megatron-core's fields else
    "hetereogenous_dist_checkpoint": "script",  # for layers of unlike widths
    "kernels": "script",  # read by the trainer's own builder
    "grad_scale_func": "script",
    "no_sync_func": "script",
    "yarn_rotary_scaling_factor": "script",
    "yarn_mscale": "script",
    "yarn_mscale_all_dim": "script",
    "moe_router_pre_softmax": "script",  # how shares are made
    "apply_rope_fusion": "demanded",
    "mrope_section": "script",
    "expert_tensor_parallel_size": "demanded",
}
LAYOUT = {
    *("cp_comm_type", "layernorm_epsilon", "bf16", "params_dtype", "pipeline_dtype"),
    *("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size"),
    *("virtual_pipeline_model_parallel_size", "expert_model_parallel_size", "sequence_parallel"),
    *("num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage"),
    *("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split"),
    *("deterministic_mode", "use_cpu_initialization", "perform_initialization"),
}
"""Settings that every script chooses for itself."""


def nodes(file: str, function: str) -> Iterator[ast.AST]:
    tree = ast.parse((ROOT / "megatron/sft/model" / file).read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and node.name == function:
            yield from ast.walk(node)


def calls(file: str, function: str) -> Iterator[tuple[str, ast.Call]]:
    for node in nodes(file, function):
        if isinstance(node, ast.Call):
            yield ast.unparse(node.func), node


def keywords(file: str, function: str, callee: str) -> set[str]:
    named = [k.arg for name, call in calls(file, function) if name == callee for k in call.keywords]
    return {name for name in named if name}


def parts(file: str, function: str) -> set[str]:
    """Names of what is called with the model as its first argument."""
    return {
        name
        for name, call in calls(file, function)
        if call.args and ast.unparse(call.args[0]) == "gpt"
    }


def assigned_settings(file: str, function: str) -> set[str]:
    return {
        node.attr
        for node in nodes(file, function)
        if isinstance(node, ast.Attribute)
        and isinstance(node.ctx, ast.Store)
        and ast.unparse(node.value) == "transformer_config"
    }


def test_the_list_of_what_the_trainer_gives_is_whole() -> None:
    """A new argument or mend of the trainer's would be missing in scripts, whose loss shows
    nothing; decide what the plug-in does about it, and list it here.
    """
    assert keywords("forward.py", "forward_step", "model") == ARGUMENTS.keys()
    assert {name for name, _ in calls("mcore_fixes.py", "install")} == MENDS.keys()
    assert parts("build.py", "build_gpt") | parts("gpt_additions.py", "add_to_gpt") == PARTS.keys()
    settings = keywords("build.py", "build_transformer_config", "TransformerConfig")
    for file, function in (
        ("build.py", "build_transformer_config"),
        ("gpt_additions.py", "prepare_config"),
        ("optimizer.py", "connect"),
    ):
        settings |= assigned_settings(file, function)
    assert settings == SETTINGS.keys() | LAYOUT


@pytest.mark.parametrize("names", [ARGUMENTS, MENDS, PARTS, SETTINGS])
def test_each_verdict_holds(names: dict[str, str]) -> None:
    """A list that says "done" of what the plug-in has lost would hide the loss."""
    for name, verdict in names.items():
        texts = [(ROOT / path).read_text() for path in PLACES[verdict]]
        word = "mask_padding" if name == "padding_mask" else name.split(".")[0]
        assert not texts or any(word in text for text in texts), f"{name} is not {verdict}"
