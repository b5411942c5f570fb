"""Changes to the tensors of sound HuggingFace folders: types, additions, losses, heads, names."""

from __future__ import annotations

import json
from collections.abc import Mapping

import torch

from tests.functional_tests.folder_mutations import EQUAL, REFUSED, Model, change

_QWEN_TEXT = ("qwen3_5_text", "qwen3_5_moe_text")


def _cast(model: Model, dtype: torch.dtype, part: str = "") -> None:
    """Casts tensors whose names have `part`."""
    model.write({name: t.to(dtype) if part in name else t for name, t in model.tensors.items()})


@change
def all_bfloat16(model: Model) -> str:
    _cast(model, torch.bfloat16)
    return EQUAL


@change
def all_float16(model: Model) -> str:
    _cast(model, torch.float16)
    return EQUAL


@change
def all_float64(model: Model) -> str:
    _cast(model, torch.float64)
    return EQUAL


@change
def norms_wider_than_the_rest(model: Model) -> str:
    _cast(model, torch.bfloat16, "_proj")
    return EQUAL


@change
def weights_in_eight_bits(model: Model) -> str:
    _cast(model, torch.float8_e4m3fn, "_proj")
    return REFUSED


@change
def weights_as_integers(model: Model) -> str:
    _cast(model, torch.int8, model.some_weight)
    return REFUSED


@change
def old_frequencies(model: Model) -> str:
    model.write(
        model.tensors | {f"{model.body}layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}
    )
    return EQUAL


@change
def old_cosines(model: Model) -> str:
    model.write(
        model.tensors | {f"{model.body}layers.0.self_attn.rotary_emb.cos_cached": torch.ones(8)}
    )
    return EQUAL


@change
def state_of_transformer_engine(model: Model) -> str:
    name = f"{model.body}layers.0.mlp.up_proj._extra_state"
    model.write(model.tensors | {name: torch.zeros(3, dtype=torch.uint8)})
    return EQUAL


@change
def an_unknown_tensor(model: Model) -> str:
    model.write(model.tensors | {f"{model.body}layers.0.self_attn.gamma": torch.ones(4)})
    return REFUSED


@change
def head_of_a_classifier(model: Model) -> str:
    model.write(model.tensors | {"score.weight": torch.ones(2, 64)})
    return EQUAL if model.is_nested else REFUSED


@change
def head_with_bias(model: Model) -> str:
    model.write(model.tensors | {model.head.replace("weight", "bias"): torch.ones(250)})
    return REFUSED


def _without(model: Model, name: str) -> str:
    model.write({key: tensor for key, tensor in model.tensors.items() if key != name})
    return REFUSED


@change
def without_a_weight(model: Model) -> str:
    return _without(model, model.some_weight)


@change
def without_the_last_norm(model: Model) -> str:
    return _without(model, f"{model.body}norm.weight")


@change
def without_the_embedding(model: Model) -> str:
    return _without(model, model.embedding)


@change
def without_the_head(model: Model) -> str:
    return "" if model.is_tied else _without(model, model.head)


@change
def a_longer_norm(model: Model) -> str:
    model.write(model.tensors | {f"{model.body}norm.weight": torch.ones(65)})
    return REFUSED


@change
def more_rows_of_embedding(model: Model) -> str:
    more = torch.cat((model.tensors[model.embedding], torch.ones(6, 64)))
    model.write(model.tensors | {model.embedding: more})
    return REFUSED


@change
def fewer_layers_by_config(model: Model) -> str:
    if model.is_nested:
        return ""
    model.edit_config(num_hidden_layers=3, layer_types=None)
    further = model.kind in ("glm4_moe", "minimax_m2")
    return EQUAL if further else REFUSED


@change
def head_equal_to_the_embedding(model: Model) -> str:
    model.write(model.tensors | {model.head: model.tensors[model.embedding]})
    return EQUAL


@change
def head_unlike_the_embedding(model: Model) -> str:
    model.write(model.tensors | {model.head: model.tensors[model.embedding] + 0.1})
    return REFUSED if model.is_tied else EQUAL


@change
def root_head_unlike_the_embedding(model: Model) -> str:
    tensors = {name: t for name, t in model.tensors.items() if name != model.head}
    model.write(tensors | {"lm_head.weight": model.tensors[model.embedding] + 0.1})
    return REFUSED if model.is_tied else EQUAL


@change
def root_head_equal_to_the_embedding(model: Model) -> str:
    tensors = {name: t for name, t in model.tensors.items() if name != model.head}
    model.write(tensors | {"lm_head.weight": model.tensors[model.embedding]})
    return EQUAL


@change
def head_instead_of_the_embedding(model: Model) -> str:
    tensors = {name: t for name, t in model.tensors.items() if name != model.embedding}
    model.write(tensors | {model.head: model.tensors[model.embedding]})
    return EQUAL if model.is_tied else REFUSED


@change
def head_below_the_model(model: Model) -> str:
    tensors = {name: t for name, t in model.tensors.items() if name != model.head}
    head = model.tensors.get(model.head, model.tensors[model.embedding])
    model.write(tensors | {"model.lm_head.weight": head})
    return EQUAL


def _body(model: Model, prefix: str) -> None:
    """Renames the body of a language model."""
    model.rename(lambda name: prefix + name[len(model.body) :] if _is_body(model, name) else name)


def _is_body(model: Model, name: str) -> bool:
    return name.startswith(
        tuple(f"{model.body}{part}" for part in ("embed_tokens.", "layers.", "norm."))
    )


def _spelled(prefix: str, kinds: Mapping[str, str], name: str) -> None:
    """Registers a spelling of the body, with what is right by the kind of a model."""

    def spell(model: Model) -> str:
        _body(model, prefix)
        llava = model.kind in ("gemma3", "mistral3")
        group = "llava" if llava else "flat"
        if "qwen3_5" in model.kind:
            group = "qwen3_5_text" if model.kind in _QWEN_TEXT else "qwen3_5"
        return kinds.get(group, REFUSED)

    spell.__name__ = name
    change(spell)


_LLAVA = {"llava": EQUAL}
_LLAMA = {"flat": EQUAL, "qwen3_5_text": EQUAL}
_spelled("", _LLAMA, "names_without_prefix")
_spelled("model.", _LLAMA, "names_of_llama")
_spelled("model.model.", _LLAMA, "names_of_lightning")
_spelled("language_model.", _LLAVA | {"qwen3_5": EQUAL}, "names_of_language_model")
_spelled("language_model.model.", _LLAVA, "names_of_transformers_4")
_spelled("language_model.model.model.", _LLAVA, "names_with_two_models")
_spelled(
    "model.language_model.",
    _LLAVA | {"qwen3_5": EQUAL, "qwen3_5_text": EQUAL},
    "names_of_transformers_5",
)
_spelled(
    "model.language_model.model.",
    _LLAVA | {"qwen3_5": EQUAL, "qwen3_5_text": EQUAL},
    "names_of_both",
)
_spelled("model.language_model.model.model.", _LLAVA, "names_of_both_with_two_models")
_spelled("model.model.language_model.", _LLAVA | {"qwen3_5": EQUAL}, "names_of_lightning_and_5")
_spelled("model.text_model.", {}, "names_of_text_model")
_spelled("transformer.", {}, "names_of_gpt2")


@change
def half_of_the_names_without_prefix(model: Model) -> str:
    model.rename(
        lambda name: name[len(model.body) :] if _is_body(model, name) and len(name) % 2 else name
    )
    return REFUSED if model.is_nested else EQUAL


@change
def half_of_the_names_of_transformers_5(model: Model) -> str:
    if model.kind not in ("gemma3", "mistral3"):
        return ""
    new = "model.language_model."
    model.rename(
        lambda name: (
            new + name[len(model.body) :] if _is_body(model, name) and len(name) % 2 else name
        )
    )
    return EQUAL


@change
def one_tensor_in_two_spellings(model: Model) -> str:
    _twice(model, 0.0)
    return EQUAL


@change
def two_tensors_in_two_spellings(model: Model) -> str:
    _twice(model, 0.5)
    return REFUSED


def _twice(model: Model, difference: float) -> None:
    name = f"{model.body}norm.weight"
    other = f"model.{name}" if model.kind != "gemma3" else "model.language_model.norm.weight"
    model.write(model.tensors | {other: model.tensors[name] + difference})


def _wrapped(prefix: str, name: str) -> None:
    def wrap(model: Model) -> str:
        model.rename(lambda tensor: prefix + tensor)
        return REFUSED

    wrap.__name__ = name
    change(wrap)


_wrapped("module.", "names_of_data_parallel")
_wrapped("_orig_mod.", "names_of_torch_compile")
_wrapped("module._orig_mod.", "names_of_compiled_data_parallel")
_wrapped("base_model.model.", "names_of_peft")
_wrapped("_fsdp_wrapped_module.", "names_of_fsdp")


@change
def names_in_memory(model: Model) -> str:
    """As `state_dict()` has them: stacked experts, the names of a wrapper's modules."""
    import transformers

    config = json.loads((model.folder / "config.json").read_text())
    held = getattr(transformers, config["architectures"][0]).from_pretrained(
        model.folder, dtype=torch.float32
    )
    state = held.state_dict()
    if model.is_tied:
        state.pop("lm_head.weight")
    model.write(state)
    return EQUAL


@change
def layers_that_predict_further_tokens(model: Model) -> str:
    model.write(model.tensors | {"mtp.fc.weight": torch.ones(4, 8)})
    return EQUAL if model.is_nested or model.kind in _QWEN_TEXT else REFUSED


@change
def a_layer_beyond_the_last(model: Model) -> str:
    numbers = [
        int(name.removeprefix(f"{model.body}layers.").split(".")[0])
        for name in model.tensors
        if name.startswith(f"{model.body}layers.")
    ]
    name = f"{model.body}layers.{max(numbers) + 1}.input_layernorm.weight"
    model.write(model.tensors | {name: torch.ones(64)})
    return EQUAL if model.kind in ("glm4_moe", "minimax_m2") else REFUSED


@change
def a_vision_tower(model: Model) -> str:
    model.write(model.tensors | {"model.visual.proj.weight": torch.ones(3, 5)})
    return EQUAL if model.is_nested or model.kind in _QWEN_TEXT else REFUSED


@change
def no_vision_tower(model: Model) -> str:
    if not model.is_nested:
        return ""
    model.write(
        {
            name: t
            for name, t in model.tensors.items()
            if name == model.head or _is_body(model, name)
        }
    )
    return EQUAL


@change
def vision_tower_named_as_in_memory(model: Model) -> str:
    if model.kind not in ("gemma3", "mistral3"):
        return ""
    towers = ("vision_tower.", "multi_modal_projector.")
    model.rename(lambda name: f"model.{name}" if name.startswith(towers) else name)
    return EQUAL
