"""pure. Changes of a config.json that `config_fields` tries: of each field that any family has, in
each family, whether or not it is a field there.
"""

from __future__ import annotations

from collections.abc import Iterator, Set
from typing import Any, NamedTuple

MISSING = "(missing)"
"""In place of a value: the field is left out."""
_SWITCH = (True, False)
_FULL, _WINDOW, _LINEAR = "full_attention", "sliding_attention", "linear_attention"
_FACTOR = (0.0, 0.5, 2.0)
_RATE = (0.0, 0.1)

VALUES: dict[str, tuple[Any, ...]] = {
    "model_type": (),
    # Sizes.
    "vocab_size": (200, 300),
    "hidden_size": (32, 128),
    "intermediate_size": (48, 0),
    "moe_intermediate_size": (16, 0),
    "shared_expert_intermediate_size": (16, 0),
    "num_hidden_layers": (2, 3, 5),
    "num_attention_heads": (4, 16),
    "num_key_value_heads": (1, 4, 8),
    "head_dim": (8, 16, 20),
    "max_position_embeddings": (16, 64, 4096),
    "original_max_position_embeddings": (8, 16, 64),
    "num_experts": (4, 0),
    "num_local_experts": (4, 0),
    "n_routed_experts": (4, 0),
    "num_experts_per_tok": (1, 2, 0),
    "n_shared_experts": (0, 1, 2),
    "linear_num_key_heads": (1, 4),
    "linear_num_value_heads": (2, 8),
    "linear_key_head_dim": (4, 16),
    "linear_value_head_dim": (4, 16),
    "linear_conv_kernel_dim": (2, 3),
    # Norms, activations, biases.
    "rms_norm_eps": (1e-2, 0.1, 1, 0.0),
    "layer_norm_eps": (1e-2,),
    "layer_norm_epsilon": (1e-2,),
    "norm_eps": (1e-2,),
    "hidden_act": ("silu", "swish", "gelu", "gelu_pytorch_tanh", "gelu_new", "relu"),
    "hidden_activation": ("silu", "gelu", "gelu_pytorch_tanh", "relu"),
    "attention_bias": _SWITCH,
    "attention_out_bias": _SWITCH,
    "mlp_bias": _SWITCH,
    "qkv_bias": _SWITCH,
    "use_bias": _SWITCH,
    "add_bias_linear": _SWITCH,
    "use_qk_norm": _SWITCH,
    "qk_layernorm": _SWITCH,
    "use_qkv_bias": _SWITCH,
    "swiglu_limit": (0.5, 2, 0.0),
    "swiglu_alpha": (1.0, 1.702),
    # Attention.
    "sliding_window": (8, 1, 0, 4096, -1),
    "use_sliding_window": _SWITCH,
    "max_window_layers": (0, 2, 28),
    "sliding_window_pattern": (1, 2, 6, "LLLG"),
    "layer_types": (
        [_FULL] * 4,
        [_WINDOW] * 4,
        [_FULL, _WINDOW] * 2,
        [_FULL, _LINEAR] * 2,
        [_FULL] * 3,
        [_FULL] * 5,
        [],
        ["attention"] * 4,
    ),
    "full_attention_interval": (1, 2, 4),
    "no_rope_layers": ([1, 0, 1, 0], [1] * 4, [0] * 4, []),
    "no_rope_layer_interval": (1, 2),
    "attention_chunk_size": (8,),
    "query_pre_attn_scalar": (4, 16.5, 64),
    "attention_multiplier": (0.1, 0.5, 1),
    "attn_logit_softcapping": (1.5, 50, 0.0),
    "final_logit_softcapping": (1.5, 30, 0.0),
    "use_bidirectional_attention": (True, False, "all"),
    "is_causal": _SWITCH,
    "is_decoder": _SWITCH,
    "is_encoder_decoder": _SWITCH,
    "attention_output_gate": _SWITCH,
    "attn_output_gate": _SWITCH,
    "use_cache": _SWITCH,
    "attention_sink": _SWITCH,
    # Multipliers.
    "embedding_multiplier": _FACTOR,
    "residual_multiplier": _FACTOR,
    "logits_scaling": (0.5, 2.0),
    "logit_scale": _FACTOR,
    "scale_depth": (1.4,),
    "routed_scaling_factor": (0.5, 2.5, 0.0),
    # Routers.
    "norm_topk_prob": _SWITCH,
    "scoring_func": ("softmax", "sigmoid"),
    "topk_method": ("greedy", "noaux_tc"),
    "n_group": (1, 2, 4),
    "topk_group": (1, 2),
    "first_k_dense_replace": (0, 1, 2, 4),
    "mlp_only_layers": ([], [0], [1, 2], [0, 1, 2, 3]),
    "mlp_layer_types": (["dense", "sparse"] * 2,),
    "decoder_sparse_step": (1, 2, 3, 0),
    "moe_layer_freq": (1, 2),
    "use_routing_bias": _SWITCH,
    "shared_expert_gate": _SWITCH,
    "router_jitter_noise": _RATE,
    "output_router_logits": _SWITCH,
    "router_aux_loss_coef": _RATE,
    # Ropes; `ROPES` has whole ones.
    "rope_theta": (1e3, 5e5, 500, 0),
    "rope_local_base_freq": (100.0, 1e6),
    "rotary_emb_base": (100.0,),
    "partial_rotary_factor": (0.25, 0.5, 1.0, 1),
    "rotary_dim": (4, 8, 64),
    "rotary_pct": (0.5,),
    "rope_interleaved": _SWITCH,
    "llama_4_scaling_beta": (0.1,),
    # Training.
    "attention_dropout": (0.0, 0.1, 1),
    "hidden_dropout": _RATE,
    "residual_dropout": _RATE,
    "resid_pdrop": _RATE,
    "embd_pdrop": _RATE,
    "embedding_dropout": _RATE,
    "layerdrop": _RATE,
    "initializer_range": (0.5,),
    "pretraining_tp": (1, 2),
    # Others.
    "tie_word_embeddings": _SWITCH,
    "tie_encoder_decoder": _SWITCH,
    "pad_token_id": (0, 7),
    "bos_token_id": (0,),
    "eos_token_id": (0, [1, 2]),
    "dtype": ("bfloat16", "float32"),
    "torch_dtype": ("bfloat16", "float32"),
    "chunk_size_feed_forward": (16,),
    "num_nextn_predict_layers": (0, 1),
    "num_mtp_layers": (0, 1),
    "mtp_num_hidden_layers": (1,),
    "per_layer_config": ({}, {"1": {"sliding_window": 8}}, {"1": {"intermediate_size": 48}}),
    "tie_last_hidden_states": _SWITCH,
    "vision_feature_layer": (-2,),
    "auto_map": ({"AutoModelForCausalLM": "modeling_other.Other"},),
    "unknown_field": (1,),
}
"""Field -> values to try. Null and a missing field are tried besides."""

_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
_LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
ROPES: tuple[dict[str, Any], ...] = (
    {},
    {"rope_type": "default"},
    {"rope_type": "default", "factor": 2.0},
    {"type": "default"},
    {"rope_type": None},
    {"rope_theta": 500.0},
    {"rope_type": "default", "partial_rotary_factor": 0.5},
    {"rope_type": "linear", "factor": 2.0},
    {"type": "linear", "factor": 2},
    {"rope_type": "linear", "factor": 0.5},
    {"rope_type": "linear", "factor": 2.0, "partial_rotary_factor": 0.5},
    {"rope_type": "dynamic", "factor": 2.0},
    _LLAMA3,
    _LLAMA3 | {"rope_theta": 5e5},
    {key: value for key, value in _LLAMA3.items() if not key.startswith("original")},
    _LLAMA3 | {"low_freq_factor": 2, "high_freq_factor": 3},
    _LLAMA3 | {"low_freq_factor": 4.0},
    _LLAMA3 | {"factor": 0.5},
    _YARN,
    _YARN | {"rope_theta": 500.0},
    _YARN | {"type": "yarn", "rope_type": MISSING},
    _YARN | {"original_max_position_embeddings": MISSING},
    _YARN | {"original_max_position_embeddings": 16.0},
    _YARN | {"factor": None},
    _YARN | {"factor": 1.0},
    _YARN | {"factor": 0.5},
    _YARN | {"attention_factor": 1.14},
    _YARN | {"attention_factor": 1.1386},
    _YARN | {"attention_factor": 1.1386294361119891},
    _YARN | {"attention_factor": 1.0},
    _YARN | {"attention_factor": 1},
    _YARN | {"attention_factor": 0.0},
    _YARN | {"attention_factor": 1.5, "mscale": 1.0, "mscale_all_dim": 1.0},
    _YARN | {"beta_fast": 4, "beta_slow": 2.0},
    _YARN | {"beta_fast": 1.0, "beta_slow": 8.0},
    _YARN | {"beta_fast": 0, "beta_slow": 0},
    _YARN | {"beta_fast": None, "beta_slow": None},
    _YARN | {"truncate": False},
    _YARN | {"truncate": True},
    _YARN | {"truncate": None},
    _YARN | {"mscale": 1.0, "mscale_all_dim": 1.0},
    _YARN | {"mscale": 0.707, "mscale_all_dim": 0.707},
    _YARN | {"mscale": 1.0, "mscale_all_dim": 0.0},
    _YARN | {"mscale": 0.5, "mscale_all_dim": 1.0},
    _YARN | {"mscale": 2.0},
    _YARN | {"llama_4_scaling_beta": 0.1},
    _YARN | {"llama_4_scaling_beta": 0.1, "original_max_position_embeddings": 16},
    _YARN | {"partial_rotary_factor": 0.5},
    {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4},
    {"rope_type": "su", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4},
    {"rope_type": "proportional", "partial_rotary_factor": 0.5},
    {"mrope_section": [2, 1, 1], "rope_type": "default", "mrope_interleaved": True},
    {"mrope_section": [2, 1, 1], "rope_type": "default"},
)
"""Ropes that are tried as `rope_parameters`, and as `rope_scaling` beside a `rope_theta`."""
_OF_KINDS: tuple[dict[str, Any], ...] = (
    {_FULL: {"rope_type": "default", "rope_theta": 1e3}},
    {_WINDOW: {"rope_type": "default", "rope_theta": 1e3}},
    {_FULL: _YARN | {"rope_theta": 1e3}, _WINDOW: {"rope_type": "default", "rope_theta": 5e2}},
    {_FULL: {"rope_type": "default"}, _WINDOW: {"rope_type": "linear", "factor": 2.0}},
    {_FULL: _YARN | {"truncate": False}, _WINDOW: {"rope_type": "default"}},
    {_FULL: _YARN, _WINDOW: _YARN},
    {_FULL: _YARN | {"attention_factor": 1.3}, _WINDOW: _LLAMA3},
    {
        _FULL: {"rope_type": "linear", "factor": 2.0},
        _WINDOW: {"rope_type": "linear", "factor": 3.0},
    },
    {_FULL: _LLAMA3, _WINDOW: None},
    {_FULL: None, _WINDOW: {"rope_type": "default"}},
    {_FULL: {"partial_rotary_factor": 0.5}, _WINDOW: {"partial_rotary_factor": 0.5}},
    {_FULL: {"rope_type": "default"}, "rope_theta": 1e3},
    {"full_attention": {}, "sliding_attention": {}},
)
_TOGETHER: tuple[dict[str, Any], ...] = (
    {"attention_bias": True, "mlp_bias": True},
    {"attention_bias": True, "attention_out_bias": True},
    {"attention_bias": True, "attention_out_bias": True, "mlp_bias": True},
    {"attention_bias": False, "attention_out_bias": True},
    {"attention_bias": False, "mlp_bias": True},
    {"use_sliding_window": True, "sliding_window": 8},
    {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 0},
    {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 2},
    {"use_sliding_window": True, "sliding_window": None},
    {"use_sliding_window": False, "sliding_window": 8, "layer_types": [_WINDOW, _FULL] * 2},
    {"use_sliding_window": True, "sliding_window": 8, "layer_types": [_WINDOW, _FULL] * 2},
    {"use_sliding_window": True, "sliding_window": 8, "layer_types": [_FULL] * 4},
    {"use_sliding_window": True, "sliding_window": 8, "layer_types": MISSING},
    {"sliding_window": 8, "layer_types": [_WINDOW] * 4},
    {"sliding_window": 8, "layer_types": [_WINDOW, _FULL] * 2},
    {"sliding_window": 8, "layer_types": [_FULL] * 4},
    {"sliding_window": 8, "layer_types": MISSING},
    {"sliding_window": 8, "layer_types": None},
    {"sliding_window": 8, "layer_types": MISSING, "sliding_window_pattern": 2},
    {"sliding_window": 8, "layer_types": MISSING, "sliding_window_pattern": None},
    {"sliding_window": None, "layer_types": [_WINDOW, _FULL] * 2},
    {"sliding_window": None, "layer_types": MISSING},
    {"sliding_window": MISSING, "layer_types": MISSING},
    {"layer_types": MISSING, "full_attention_interval": 2},
    {"layer_types": MISSING, "full_attention_interval": 1},
    {"sliding_window": 8, "no_rope_layers": [1, 0, 1, 0], "layer_types": MISSING},
    {
        "use_sliding_window": True,
        "sliding_window": 8,
        "no_rope_layers": [1, 0, 1, 0],
        "layer_types": MISSING,
    },
    {"no_rope_layers": MISSING, "no_rope_layer_interval": 2},
    {"no_rope_layers": MISSING, "no_rope_layer_interval": 1},
    {"use_bidirectional_attention": True, "sliding_window": 8},
    {"output_router_logits": True, "router_aux_loss_coef": 0.5},
    {"output_router_logits": True, "router_aux_loss_coef": 0.0},
    {"num_experts_per_tok": 1, "norm_topk_prob": True},
    {"num_experts_per_tok": 1, "norm_topk_prob": False},
    {"num_experts_per_tok": 1, "norm_topk_prob": True, "routed_scaling_factor": 2.5},
    {"n_group": 2, "topk_group": 1, "num_experts_per_tok": 2},
    {"n_group": 4, "topk_group": 2, "num_experts_per_tok": 4},
    {"n_group": 4, "topk_group": 4},
    {"n_group": 1, "topk_group": 2},
    {"num_experts": 4, "num_local_experts": 8},
    {"num_experts": 8, "num_local_experts": 4},
    {"num_local_experts": MISSING, "num_experts": 4},
    {"num_experts": MISSING, "num_local_experts": 4},
    {"n_routed_experts": MISSING, "num_local_experts": 4},
    {"n_routed_experts": MISSING, "num_experts": 4},
    {"hidden_act": "gelu", "hidden_activation": "gelu_pytorch_tanh"},
    {"hidden_act": "gelu", "hidden_activation": None},
    {"hidden_act": "gelu_pytorch_tanh", "hidden_activation": None},
    {"hidden_act": "gelu_pytorch_tanh", "hidden_activation": MISSING},
    {"head_dim": None, "num_attention_heads": 4},
    {"head_dim": MISSING, "num_attention_heads": 4},
    {"max_position_embeddings": 64, "original_max_position_embeddings": 16, "rope_scaling": _YARN},
    {
        "max_position_embeddings": 64,
        "original_max_position_embeddings": 16,
        "rope_scaling": _LLAMA3,
    },
    {"rope_parameters": _YARN, "rope_scaling": None},
    {"rope_parameters": None, "rope_scaling": _YARN},
    {"rope_parameters": None, "rope_scaling": None},
    {"rope_parameters": None, "rope_scaling": None, "rope_theta": 500.0},
    {"rope_parameters": MISSING, "rope_scaling": MISSING, "rope_theta": 500.0},
    {"rope_parameters": MISSING, "rope_theta": None},
    {"rope_parameters": {"rope_type": "default", "rope_theta": 1e3}, "rope_theta": 500.0},
    {"rope_parameters": {"rope_type": "default"}, "rope_theta": 500.0},
    {"rope_parameters": {"rope_type": "default", "rope_theta": None}, "rope_theta": 500.0},
    {"rope_parameters": {"rope_type": "default"}, "partial_rotary_factor": 0.5},
    {
        "rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.25},
        "partial_rotary_factor": 0.5,
    },
    {"rope_parameters": {"rope_type": "default"}, "rotary_dim": 4},
    {"rope_parameters": {"rope_type": "default"}, "rotary_dim": 4, "partial_rotary_factor": 0.5},
    {"rope_parameters": MISSING, "rope_theta": 500.0, "partial_rotary_factor": 0.5},
    {"rope_parameters": MISSING, "rope_local_base_freq": 100.0},
    {"rope_parameters": MISSING, "rope_local_base_freq": 100.0, "rope_theta": 500.0},
    {"rope_parameters": MISSING, "rope_local_base_freq": None, "rope_theta": None},
    {
        "rope_parameters": MISSING,
        "rope_local_base_freq": 100.0,
        "rope_theta": 500.0,
        "rope_scaling": {"rope_type": "linear", "factor": 2.0},
    },
    {"sliding_window": 8, "layer_types": [_WINDOW, _FULL] * 2, "rope_parameters": _YARN},
    {"attention_multiplier": MISSING, "logits_scaling": MISSING},
    {"attention_dropout": 0.1, "residual_dropout": 0.1},
)
"""Changes of several fields at once."""


class Mutation(NamedTuple):
    """One change of a config.json."""

    changes: dict[str, Any]
    """Field -> value, or `MISSING`."""
    level: str
    """`text`: of the language model's fields; `wrapper`: of the multimodal model's around it."""

    @property
    def title(self) -> str:
        """Returns the change in a line."""
        text = ", ".join(f"{name} {value}" for name, value in self.changes.items())
        return f"wrapper: {text}" if self.level == "wrapper" else text

    def apply(self, config: dict[str, Any]) -> dict[str, Any]:
        """Returns the changed config.json."""
        if self.level == "wrapper" or "text_config" not in config:
            return _changed(config, self.changes)
        return config | {"text_config": _changed(config["text_config"], self.changes)}


def mutations(config: dict[str, Any], known: Set[str], has_rope_cases: bool) -> Iterator[Mutation]:
    """Yields the changes to try of a config.json.

    known: names of fields that a side reads, or that are declared. The others are changed at once.
    has_rope_cases: whether every rope is tried, or only some.
    """
    text = config.get("text_config", config)
    for level in ["text", "wrapper"] if "text_config" in config else ["text"]:
        fields = config if level == "wrapper" else text
        names = dict.fromkeys((*VALUES, *fields))
        yield Mutation({n: VALUES[n][0] for n in names if n not in known and VALUES.get(n)}, level)
        for name in names:
            is_part = name in ("text_config", "vision_config") or (name, level) == (
                "model_type",
                "text",
            )
            if is_part or name not in known or (level == "wrapper" and name not in fields):
                continue
            now = fields.get(name, MISSING)
            for value in (*VALUES.get(name, ()), None, MISSING):
                if value != now or type(value) is not type(now):
                    yield Mutation({name: value}, level)
    for changes in _TOGETHER:
        if any(name in known for name in changes):
            yield Mutation(changes, "text")
    for number, rope in enumerate(ROPES):
        if has_rope_cases or number % 7 == 0:
            without = {key: value for key, value in rope.items() if value != MISSING}
            yield Mutation({"rope_parameters": without}, "text")
            older = {"rope_parameters": MISSING, "rope_scaling": without, "rope_theta": 1e3}
            yield Mutation(older, "text")
    for ropes in _OF_KINDS if has_rope_cases else _OF_KINDS[2:3]:
        yield Mutation({"rope_parameters": ropes}, "text")


def _changed(fields: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    merged = fields | changes
    return {name: value for name, value in merged.items() if value != MISSING}
