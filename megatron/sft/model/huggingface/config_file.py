"""pure. Reads the config.json of a HuggingFace folder, and checks the types of its values. `config`
turns them into options.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron.packing.user_files import Kind, check_types, read_json
from megatron.sft.model.huggingface.files import no_config

_KINDS: Mapping[Kind, str] = {
    str: "model_type hidden_act hidden_activation",
    int: "num_key_value_heads head_dim max_position_embeddings sliding_window decoder_sparse_step "
    "max_window_layers no_rope_layer_interval first_k_dense_replace n_shared_experts n_group "
    "topk_group rotary_dim full_attention_interval",
    float: "rms_norm_eps rope_theta partial_rotary_factor router_jitter_noise "
    "query_pre_attn_scalar attn_logit_softcapping final_logit_softcapping rope_local_base_freq "
    "attention_multiplier embedding_multiplier residual_multiplier logits_scaling "
    "routed_scaling_factor attention_dropout swiglu_limit swiglu_alpha",
    bool: "tie_word_embeddings attention_bias mlp_bias norm_topk_prob qkv_bias use_sliding_window "
    "use_bias use_qk_norm attention_out_bias",
    list: "mlp_only_layers layer_types no_rope_layers",
    dict: "rope_scaling rope_parameters quantization_config text_config",
}
"""Type -> keys whose value must be of this type, unless it is missing or null."""


def read_config(folder: str | Path) -> dict[str, Any]:
    """Returns the content of config.json in a HuggingFace folder. Raises ValueError if it is
    missing, is not a JSON object, or has a value of a wrong type.
    """
    path = Path(folder) / "config.json"
    if not path.is_file():
        raise ValueError(no_config(Path(folder)))
    try:
        config = read_json(path, any_integer=True)
    except ValueError as failure:
        raise ValueError(f"{path} must be JSON, but is not: {failure}") from None
    check_types(config, _KINDS, path)
    if config.get("text_config"):
        check_types(config["text_config"], _KINDS, path)
    return config
