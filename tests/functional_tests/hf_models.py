"""Tiny models of the HuggingFace families, trained by a plain loop of transformers and by the
product.

Both train on the same sequences with the same AdamW. What the product has is compared under
HuggingFace's names: as it writes a model, so it writes gradients.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Sequence
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import (
    gather_from_sequence_parallel_region,
    gather_from_tensor_model_parallel_region,
)
from megatron.core.utils import unwrap_model
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.functional import cross_entropy

from megatron.packing.model.loss import head
from megatron.packing.model.pipeline import PackedPasses
from megatron.packing.step.groups import is_data_rank
from megatron.sft.arguments.parse import parse_config
from megatron.sft.model import cpu_support
from megatron.sft.model.build import build_model, build_transformer_config
from megatron.sft.model.forward import forward_step
from megatron.sft.model.huggingface.companions import Companions
from megatron.sft.model.huggingface.pretrained import open_pretrained
from megatron.sft.model.huggingface.read import Pretrained
from megatron.sft.model.huggingface.write import write_folder
from megatron.sft.model.lora.names import AdapterWeights
from megatron.sft.model.lora.write import merged_values, write_adapter
from megatron.sft.model.optimizer import build_optimizer, build_scheduler, connect
from megatron.sft.options.config import SFTConfig
from tests.functional_tests.oracle import (
    CLIP_GRAD,
    CPU,
    Sample,
    _global_loss,
    _prepare,
    draws_of,
    sequences,
)
from tests.functional_tests.pieces import gradient_of

# Imported for their cost, most of what a fork that needs them takes: forked ranks have them.
for name in ("modeling_utils", "models.auto.modeling_auto", "models.auto.tokenization_auto"):
    if find_spec("transformers"):
        import_module(f"transformers.{name}")
if find_spec("peft"):
    import_module("peft")

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e6,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
}
LONG = {"rope_type": "longrope", "short_factor": [1.0, 1.5], "long_factor": [1.25, 3.0]}
LINEAR = {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}
_EXPERTS = {"moe_intermediate_size": 32, "num_experts": 8, "num_experts_per_tok": 3, "head_dim": 16}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama2": ("llama", {"num_key_value_heads": 8}),
    "llama3": ("llama", {"rope_parameters": LLAMA3, "tie_word_embeddings": True}),
    "llama-linear-biases": (
        "llama",
        {"rope_parameters": LINEAR, "attention_bias": True, "mlp_bias": True},
    ),
    "llama-dynamic": (
        "llama",
        {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
    ),
    "mistral": ("mistral", {"head_dim": 16, "sliding_window": 64, "vocab_size": 256}),
    "qwen2": ("qwen2", {}),
    "qwen2-yarn-tied": (
        "qwen2",
        {"rope_parameters": YARN | {"attention_factor": 1.2}, "tie_word_embeddings": True},
    ),
    "qwen3": ("qwen3", {"head_dim": 16, "tie_word_embeddings": True, "attention_bias": True}),
    "gemma": ("gemma", {"head_dim": 16, "num_key_value_heads": 1}),
    "mixtral": (
        "mixtral",
        {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 8},
    ),
    "qwen2-moe": (
        "qwen2_moe",
        _EXPERTS | {"shared_expert_intermediate_size": 48, "mlp_only_layers": [1]},
    ),
    "qwen3-moe": ("qwen3_moe", _EXPERTS | {"norm_topk_prob": True}),
    "qwen3-moe-plain": (
        "qwen3_moe",
        _EXPERTS | {"norm_topk_prob": False, "decoder_sparse_step": 2},
    ),
}
_WINDOWS = {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"] * 2}
_BASES = {
    "full_attention": LINEAR | {"rope_theta": 1e6},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}
_MIXTURE = {"num_experts_per_tok": 3, "head_dim": 16, "moe_intermediate_size": 32}
_DELTA_NET = {
    "layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 6,
}
_LATENT = {
    "num_key_value_heads": 8,
    "num_experts_per_tok": 3,
    "n_routed_experts": 8,
    "moe_intermediate_size": 24,
    "q_lora_rank": 20,
    "kv_lora_rank": 12,
    "qk_nope_head_dim": 10,
    "qk_rope_head_dim": 6,
    "v_head_dim": 8,
}
_SHARED = {"num_experts": 8, "shared_expert_intermediate_size": 48}
_AXES = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}
_GEMMA4 = _WINDOWS | {
    "head_dim": 16,
    "num_key_value_heads": 4,
    "global_head_dim": 24,
    "num_global_key_value_heads": 2,
    "attention_k_eq_v": True,
    "hidden_size_per_layer_input": 0,
    "final_logit_softcapping": 3.0,
}
FAMILY_MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "seed-oss": ("seed_oss", {"head_dim": 16, "attention_dropout": 0.0, "residual_dropout": 0.0}),
    "smollm3": ("smollm3", {}),
    "ernie4.5": ("ernie4_5", {"head_dim": 16, "use_bias": True}),
    "glm4-moe": (
        "glm4_moe",
        _MIXTURE | {"n_routed_experts": 8, "use_qk_norm": True, "attention_bias": True},
    ),
    "glm4-moe-groups": (
        "glm4_moe",
        _MIXTURE
        | {
            "n_routed_experts": 8,
            "num_experts_per_tok": 4,
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 2.5,
        },
    ),
    "phi3": ("phi3", {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}),
    "phi3-windows": ("phi3", {"sliding_window": 8}),
    # No sequence of the tests is as short as 8 tokens, so that transformers takes the list for
    # long ones for each; and none as long as 128.
    "phi3-long": (
        "phi3",
        {
            "original_max_position_embeddings": 8,
            "rope_parameters": LONG | {"partial_rotary_factor": 0.5},
        },
    ),
    "phi3-short": (
        "phi3",
        {
            "original_max_position_embeddings": 128,
            "rope_parameters": LONG | {"factor": 4.0, "partial_rotary_factor": 0.5},
        },
    ),
    "granite": (
        "granite",
        {
            "attention_multiplier": 0.3,
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.22,
            "logits_scaling": 4.0,
        },
    ),
    "olmo2": ("olmo2", {}),
    "glm4": ("glm4", {"head_dim": 16}),
    "gemma2": (
        "gemma2",
        _WINDOWS
        | {
            "head_dim": 16,
            "query_pre_attn_scalar": 20,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 3.0,
        },
    ),
    "gemma3": (
        "gemma3_text",
        _WINDOWS | {"head_dim": 16, "query_pre_attn_scalar": 20, "rope_parameters": _BASES},
    ),
    "gemma4": ("gemma4_text", _GEMMA4),
    "gemma4-unified": (
        "gemma4_unified_text",
        _GEMMA4 | {"num_global_key_value_heads": 1, "use_bidirectional_attention": "vision"},
    ),
    "gemma4-moe": (
        "gemma4_text",
        _GEMMA4
        | {
            "enable_moe_block": True,
            "num_experts": 8,
            "top_k_experts": 3,
            "moe_intermediate_size": 24,
        },
    ),
    "olmo3": (
        "olmo3",
        _WINDOWS | {"rope_parameters": _BASES | {"full_attention": YARN}},
    ),
    "exaone4": ("exaone4", {"sliding_window": 8, "sliding_window_pattern": 4}),
    "ministral3": (
        "ministral3",
        {
            "head_dim": 16,
            "rope_parameters": YARN
            | {
                "original_max_position_embeddings": 16,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "llama_4_scaling_beta": 0.1,
            },
        },
    ),
    "mistral-windows": ("mistral", {"sliding_window": 8}),
    "qwen2-windows": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 2},
    ),
    "minimax-m2": (
        "minimax_m2",
        {"num_local_experts": 8, "num_experts_per_tok": 3, "head_dim": 16, "rotary_dim": 8},
    ),
    "qwen3.5": ("qwen3_5_text", _DELTA_NET | {"head_dim": 16}),
    "qwen3.5-moe": ("qwen3_5_moe_text", _DELTA_NET | _MIXTURE | _SHARED),
    "qwen3-next": ("qwen3_next", _DELTA_NET | _MIXTURE | _SHARED),
    "qwen2.5-vl": ("qwen2_5_vl_text", {"rope_parameters": _AXES}),
    "qwen3-vl": (
        "qwen3_vl_text",
        {"head_dim": 16, "rope_parameters": _AXES | {"mrope_interleaved": True}},
    ),
    "qwen3-vl-moe": (
        "qwen3_vl_moe_text",
        # twice the width of an expert is not the model's: no tensor is square, as in no release
        _EXPERTS
        | {
            "moe_intermediate_size": 24,
            "rope_parameters": _AXES | {"mrope_interleaved": True},
        },
    ),
    "deepseek-v3": (
        "deepseek_v3",
        _LATENT
        | {
            "num_experts_per_tok": 4,
            "n_group": 4,
            "topk_group": 2,
            "first_k_dense_replace": 1,
            "rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 0.5},
        },
    ),
    "glm4-moe-lite": (
        "glm4_moe_lite",
        _LATENT | {"q_lora_rank": None, "v_head_dim": 24, "n_group": 1, "topk_group": 1},
    ),
    "mistral4": (
        "mistral4",
        _LATENT
        | {
            "n_shared_experts": 2,
            "routed_scaling_factor": 1.5,
            "rope_parameters": YARN
            | {
                "original_max_position_embeddings": 16,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "llama_4_scaling_beta": 0.1,
            },
        },
    ),
    "deepseek-v2": (
        "deepseek_v2",
        _LATENT | {"topk_method": "greedy", "first_k_dense_replace": 1},
    ),
    "gpt-oss": (
        "gpt_oss",
        _WINDOWS
        | {
            "num_local_experts": 8,
            "num_experts_per_tok": 3,
            "head_dim": 16,
            "swiglu_limit": 1.0,
            "rope_parameters": YARN | {"truncate": False},
        },
    ),
}
"""Models of families that differ from Llama in a mechanism; those of `MODELS` are its relatives."""
_VISION = {"depth": 2, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2}
_DEEP = {"out_hidden_size": 64, "num_position_embeddings": 16, "deepstack_visual_indexes": [0]}
VISION_MODELS: dict[str, dict[str, Any]] = {
    "qwen2_5_vl_text": {"out_hidden_size": 64, "fullatt_block_indexes": [1]},
    "qwen3_vl_text": _DEEP,
    "qwen3_vl_moe_text": _DEEP,
}
"""Families that are the text part of a vision model -> sizes of its tower."""
_EAGER = ("gemma2", "gpt_oss")
"""Families whose soft caps or sinks transformers' fast attention leaves out."""
_COMMON = {
    "pad_token_id": None,  # transformers gives the embedding of one no gradient
    # no multiple of a tensor-parallel size: the padding must stay out of the softmax
    "vocab_size": 250,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
}


class Trained(NamedTuple):
    """What a few steps came to; tensors by HuggingFace's names."""

    losses: list[float]
    logits: list[Tensor]
    """Of each sequence of the first step, [length, vocabulary]; empty where they are spread over
    context parallel.
    """
    gradients: dict[str, Tensor]
    """Of the first step."""


def sequences_in_order(step: int, lengths: Sequence[int]) -> list[Sample]:
    """The oracle's sequences with positions from zero on, which are all that rotary embeddings
    know.
    """
    return [
        sample._replace(position_ids=np.arange(len(sample.tokens)))
        for sample in sequences(step, lengths)
    ]


def write_model(
    name: str,
    folder: Path,
    dtype: torch.dtype = torch.float32,
    vocab_size: int | None = None,
    sizes: dict[str, int] | None = None,
    vision: dict[str, dict[str, Any]] | None = None,
) -> None:
    """Make one of `MODELS` with random weights, norms and biases too, in files of at most 100
    kB; with `vision` within a vision model, see `functional_tests.vision`.
    """
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

    _register_classes()
    kind, changes = (MODELS | FAMILY_MODELS)[name]
    changes = (changes if vocab_size is None else changes | {"vocab_size": vocab_size}) | (
        sizes or {}
    )
    torch.manual_seed(1)
    model: Any
    if kind in VISION_MODELS or vision is not None:
        tower, ids, rope = _VISION | VISION_MODELS.get(kind, {}), {}, changes.get("rope_parameters")
        if vision is not None:
            tower, ids, rope = vision["tower"], vision["ids"], vision["rope"]
        config = AutoConfig.for_model(
            kind.removesuffix("_text"),
            text_config=_COMMON | changes | {"rope_parameters": rope},
            vision_config=tower,
            **ids,
        )
        model = AutoModelForImageTextToText.from_config(config)
    else:
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **(_COMMON | changes)))
    for parameter in model.parameters():
        # Wide enough that the losses depend on everything, and the experts of a token differ
        # clearly.
        torch.nn.init.normal_(parameter, 1.0 if parameter.dim() == 1 else 0.0, 0.2)
    for buffer_name, buffer in model.named_buffers():
        if buffer_name in model.state_dict():
            torch.nn.init.normal_(buffer, 0.0, 0.2)
    model.to(dtype).save_pretrained(folder, max_shard_size="100kB")


def stack_experts(folder: Path) -> dict[str, Tensor]:
    """Writes a folder's eight experts of each layer as one tensor, and returns all tensors."""
    tensors = read_folder(folder)
    for layer in range(4):
        prefix = f"model.layers.{layer}.mlp.experts."
        gates, values, downs = (
            torch.stack([tensors.pop(f"{prefix}{e}.{name}_proj.weight") for e in range(8)])
            for name in ("gate", "up", "down")
        )
        tensors[f"{prefix}gate_up_proj"] = torch.cat((gates, values), 1)
        tensors[f"{prefix}down_proj"] = downs
    for file in folder.glob("model*"):
        file.unlink()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return tensors


def train_by_transformers(
    folder: Path,
    batches: Sequence[Sequence[Sample]],
    dtype: torch.dtype,
    lr: float = 1e-3,
    adapter: Path | None = None,
) -> Trained:
    """A plain loop: each sequence alone through transformers' own model, torch's AdamW; only PEFT's
    `adapter` if there is one, whose gradients have the names of its files then.
    """
    torch.set_default_dtype(torch.float32)
    options = {"experts_implementation": "eager"}
    model: Any = _class_of(folder).from_pretrained(
        folder,
        dtype=dtype,
        attn_implementation="eager" if _kind_of(folder) in _EAGER else "sdpa",
        **options,
    )
    if dtype == torch.float64:
        _keep_double(sys.modules[type(model).__module__])
        stored = read_folder(folder)
        for name, parameter in model.named_parameters():
            # Routers are read as float32, whatever the file has.
            is_rounded = parameter.dtype != dtype and name in stored
            parameter.data = (stored[name] if is_rounded else parameter.data).double()
    if adapter is not None:
        from peft import PeftModel

        model = PeftModel.from_pretrained(model, adapter, is_trainable=True)
    parameters = {
        name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad
    }
    # as transformers' Trainer, which also leaves out biases that experts have in one tensor
    is_decayed = {
        name: p.dim() > 1 and not name.endswith("_bias") for name, p in parameters.items()
    }
    optimizer = torch.optim.AdamW(
        [
            {
                "params": [p for name, p in parameters.items() if is_decayed[name] == decays],
                "weight_decay": 0.01 if decays else 0.0,
            }
            for decays in (True, False)
        ],
        lr=lr,
    )
    losses: list[float] = []
    logits: list[Tensor] = []
    gradients: dict[str, Tensor] = {}
    for batch in batches:
        num_tokens = sum(int((sample.loss_mask != 0).sum()) for sample in batch)
        loss = 0.0
        for sample in batch:
            inputs = {"input_ids": torch.from_numpy(sample.tokens)[None]}
            inputs |= getattr(sample, "inputs", dict)()  # images, see `vision`
            found = model(**inputs).logits[0]
            each = cross_entropy(
                found.to(_wide(dtype)), torch.from_numpy(sample.labels), reduction="none"
            )
            weighted = (each * torch.from_numpy(sample.loss_mask)).sum() / num_tokens
            weighted.backward()
            loss += weighted.item()
            if not losses:
                logits.append(found.detach())
        if not gradients:
            found_gradients = {name: p.grad for name, p in parameters.items()}
            on_disk = _on_disk_names if adapter is None else _names_of_peft
            gradients = on_disk(model, found_gradients)
        losses.append(loss)
        torch.nn.utils.clip_grad_norm_(list(parameters.values()), CLIP_GRAD)
        optimizer.step()
        optimizer.zero_grad()
    return Trained(losses, logits, gradients)


def _class_of(folder: Path) -> Any:
    """transformers' class for a folder with a language model or a vision model."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    _register_classes()
    has_tower = "vision_config" in json.loads((folder / "config.json").read_text())
    return AutoModelForImageTextToText if has_tower else AutoModelForCausalLM


def _register_classes() -> None:
    """Makes transformers find the class of Mistral Small 4's language model, which it has for use
    within a wrapper.
    """
    from transformers import AutoModelForCausalLM, Mistral4Config
    from transformers.models.mistral4.modeling_mistral4 import Mistral4ForCausalLM

    AutoModelForCausalLM.register(Mistral4Config, Mistral4ForCausalLM, exist_ok=True)


def _kind_of(folder: Path) -> str:
    kind: str = json.loads((folder / "config.json").read_text())["model_type"]
    return kind


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _keep_double(module: Any) -> None:
    """Float64 where transformers says float32: norms and routers; rotary angles are float32 on both
    sides.
    """
    module.double = float  # `float("-inf")` stays what it is
    if hasattr(module, "DeepseekV2RotaryEmbedding"):
        module.DeepseekV2RotaryEmbedding.forward = _angles_of_deepseek_v2
    for function in cpu_support._functions_of(module):
        if "Rotary" not in function.__qualname__:
            cpu_support.rewrite(function, {}, {"float32": "float64", "float": "double"})


def _angles_of_deepseek_v2(self: Any, x: Tensor, position_ids: Tensor) -> Tensor:
    """Its own takes cosines and sines by `torch.polar`, which rounds a few otherwise."""
    angles = position_ids[..., None].float() * self.inv_freq
    return torch.complex(angles.cos(), angles.sin()) * self.attention_scaling


def _on_disk_names(model: Any, gradients: dict[str, Tensor | None]) -> dict[str, Tensor]:
    """Gradients by the names of the model's files, in which experts are apart."""
    found = {name: torch.zeros(()) if g is None else g.clone() for name, g in gradients.items()}
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter_values = parameter.detach().clone()
            parameter.copy_(found[name])
            found[name] = parameter_values
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        written = read_folder(Path(folder))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(found[name])
    return written


def write_peft(model_folder: Path, folder: Path, options: dict[str, Any]) -> None:
    """An adapter that peft has made, with random values in A and B, as somebody's training leaves
    it.
    """
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(2)
    model = _class_of(model_folder).from_pretrained(model_folder)
    adapted = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", **options))
    for name, parameter in adapted.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter, 0.0, 0.1)
    adapted.save_pretrained(str(folder))


def _names_of_peft(model: Any, gradients: dict[str, Tensor | None]) -> dict[str, Tensor]:
    names = {name: re.sub(r"\.(modules_to_save\.)?default\b", "", name) for name in gradients}
    return {
        names[name]: gradient.clone()
        for name, gradient in gradients.items()
        if gradient is not None
    }


def read_folder(folder: Path) -> dict[str, Tensor]:
    """All tensors of a HuggingFace folder."""
    found: dict[str, Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        found |= load_file(file)
    return found


def largest_apart(found: Any, expected: Any) -> float:
    """Returns the largest difference between tensors, by name or in order, relative to the largest
    element of each (1e-6 at least).
    """
    if isinstance(expected, dict):
        assert found.keys() == expected.keys()
        found, expected = [found[name] for name in expected], list(expected.values())
    return max(
        ((one - other).abs().max() / other.abs().max().clamp(min=1e-6)).item()
        for one, other in zip(found, expected, strict=True)
    )


def train_by_product(
    text: str,
    folder: Path,
    batches: Sequence[Sequence[Sample]],
    dtype: torch.dtype,
    gradients_to: Path | None = None,
    weights_to: Path | None = None,
    lr: float = 1e-3,
) -> tuple[list[float], list[tuple[Tensor, Tensor]]]:
    """The product in the layout of `text`, on this rank: losses, and (labels, logits) of each pack
    of the first step where this rank has them. Writes the first step's gradients and the initial
    weights as HuggingFace folders.
    """
    config = options(text, folder, len(batches), lr)
    _prepare(config, dtype)
    packs = _note_logits()
    transformer_config = build_transformer_config(config, CPU, params_dtype=dtype)
    assert config.data.vocab_size is not None
    pretrained = open_pretrained(config, config.data.vocab_size)
    assert isinstance(pretrained, Pretrained)
    model = build_model(config, transformer_config, config.data.vocab_size, CPU, pretrained)
    gpts = [unwrap_model(chunk) for chunk in model]
    adapter = AdapterWeights(pretrained.weights, config.lora) if config.lora.lora else None
    if weights_to is not None:
        companions = Companions(config, None, config.data.vocab_size, _name(dtype))
        if adapter is not None:
            beside = partial(companions.write_beside_adapter, adapter)
            write_adapter(weights_to, gpts, adapter, beside)
            weights_to = weights_to.with_name("merged")
        values_of = merged_values(gpts)
        write_folder(
            weights_to,
            gpts,
            pretrained.weights,
            partial(_with_config, companions, dtype),
            100_000,
            values_of,
            pretrained.folder,
        )
    optimizer = build_optimizer(config, model)
    connect(transformer_config, model, optimizer, config)
    scheduler = build_scheduler(config, optimizer)
    rank, num_ranks = (
        parallel_state.get_data_parallel_rank(),
        parallel_state.get_data_parallel_world_size(),
    )
    draws_data = is_data_rank(ProcessGroupCollection.use_mpu_process_groups(["tp", "cp", "pp"]))
    forward_backward = PackedPasses(get_forward_backward_func())
    losses: list[float] = []
    first: list[tuple[Tensor, Tensor]] = []
    for batch in batches:
        draws = draws_of(batch, "even", "plain", rank, num_ranks)
        source = iter(draws) if draws_data else None
        for chunk in model:
            chunk.zero_grad_buffer()
        optimizer.zero_grad()
        found = forward_backward(
            forward_step_func=forward_step,
            data_iterator=source if len(model) == 1 else [source] * len(model),
            model=model if len(model) > 1 else model[0],
            num_microbatches=len(draws),
            seq_length=config.model.seq_length,
            micro_batch_size=1,
        )
        if not losses:
            first = list(packs)
            if gradients_to is not None:
                _write_gradients(gradients_to, gpts, adapter or pretrained.weights, dtype)
        losses.append(_global_loss(found))
        optimizer.step()
        scheduler.step(increment=config.training.global_batch_size)
    return losses, first


def options(text: str, folder: Path, num_steps: int, lr: float = 1e-3) -> SFTConfig:
    """The run's options; everything that the layouts share, and `text`."""
    common = (
        f"--pretrained-checkpoint {folder} --mock-data --seq-length 64 --sequence-packing "
        f"--train-iters {num_steps} --global-batch-size 720 --lr {lr} --lr-decay-style constant "
        f"--clip-grad {CLIP_GRAD} --eval-iters 0"
    )
    return parse_config([*common.split(), *text.split()], dist.get_world_size())


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _note_logits() -> list[tuple[Tensor, Tensor]]:
    """A list that grows by (labels [tokens], logits [tokens, vocabulary]) of each pack."""
    noted: list[tuple[Tensor, Tensor]] = []
    begin, compute = head._Head._begin, head._Head._loss
    given: list[Tensor] = []

    def note_labels(self: head._Head, gpt: Any, arguments: Any, options: dict[str, Any]) -> Any:
        given[:] = [options["labels"]]
        return begin(self, gpt, arguments, options)

    def note_logits(self: head._Head, labels: Tensor, logits: Any) -> Tensor:
        states = logits.states.detach()
        if self._layer.sequence_parallel:
            states = gather_from_sequence_parallel_region(states)
        whole = gather_from_tensor_model_parallel_region(states @ logits.weight.detach().t())
        self._words.rule.apply_(whole)
        noted.append((given[0][0].clone(), whole[:, 0]))
        return compute(self, labels, logits)

    head._Head._begin, head._Head._loss = note_labels, note_logits  # type: ignore[method-assign]  # in a forked rank only
    return noted


def _write_gradients(folder: Path, gpts: Sequence[Any], weights: Any, dtype: torch.dtype) -> None:
    held = [parameter.detach().clone() for gpt in gpts for parameter in gpt.parameters()]
    with torch.no_grad():
        for gpt in gpts:
            for parameter in gpt.parameters():
                parameter.copy_(gradient_of(parameter))
        if isinstance(weights, AdapterWeights):
            write_adapter(folder, gpts, weights, lambda _: None)
        else:
            write_folder(folder, gpts, weights, partial(_keep_dtype, dtype))
        for parameter, values in zip(
            (p for gpt in gpts for p in gpt.parameters()), held, strict=True
        ):
            parameter.copy_(values)


def _with_config(companions: Companions, dtype: torch.dtype, folder: Path) -> str:
    companions.write(folder)
    return _name(dtype)


def _keep_dtype(dtype: torch.dtype, folder: Path) -> str:
    return _name(dtype)


def logits_of(
    batch: Sequence[Sample], packs: Sequence[tuple[Tensor, Tensor]], vocab_size: int
) -> list[Tensor]:
    """Those of each sequence, found by its labels in some pack."""
    found = []
    for sample in batch:
        wanted = torch.from_numpy(sample.labels)
        places = [
            logits[start : start + len(wanted), :vocab_size]
            for labels, logits in packs
            for start in range(len(labels) - len(wanted) + 1)
            if torch.equal(labels[start : start + len(wanted)], wanted)
        ]
        assert places, "a sequence is in no pack"
        found.append(places[0])
    return found
