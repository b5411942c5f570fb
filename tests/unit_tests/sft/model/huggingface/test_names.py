"""Names of tensors in the spellings that transformers loads."""

import pytest

from megatron.sft.model.huggingface.names import naming, wrapper_message

LAYER = "layers.0.mlp.up_proj.weight"


def config(kind, text=None):
    return {"model_type": kind} | ({} if text is None else {"text_config": {"model_type": text}})


@pytest.mark.parametrize(
    ("model", "released", "others"),
    [
        (
            config("llama"),
            f"model.{LAYER}",
            [LAYER, f"model.model.{LAYER}"],
        ),
        (config("llama"), "lm_head.weight", ["model.lm_head.weight"]),
        (
            config("gemma3", "gemma3_text"),
            f"language_model.model.{LAYER}",
            [f"model.language_model.{LAYER}", f"language_model.{LAYER}"],
        ),
        (
            config("mistral3", "mistral"),
            "language_model.lm_head.weight",
            ["lm_head.weight", "model.lm_head.weight"],
        ),
        (
            config("qwen3_5", "qwen3_5_text"),
            f"model.language_model.{LAYER}",
            [f"language_model.{LAYER}", f"model.language_model.model.{LAYER}"],
        ),
        (config("qwen3_5_text"), f"model.{LAYER}", [f"model.language_model.{LAYER}"]),
        (
            config("mixtral"),
            "model.layers.0.block_sparse_moe.gate.weight",
            ["model.layers.0.mlp.gate.weight"],
        ),
    ],
)
def test_each_spelling_is_that_of_released_files(model, released, others):
    """A spelling that is not known is refused, or carried along as if it were a vision tower."""
    rename = naming(model, ()).rename
    assert {rename(name) for name in (released, *others)} == {released}


@pytest.mark.parametrize(
    ("model", "name"),
    [
        (config("llama"), f"model.language_model.{LAYER}"),
        (config("gemma3", "gemma3_text"), f"model.{LAYER}"),
        (config("gemma3", "gemma3_text"), "vision_tower.vision_model.encoder.layers.0.fc1.weight"),
        (config("qwen3_5", "qwen3_5_text"), f"language_model.model.{LAYER}"),
    ],
)
def test_spellings_that_transformers_does_not_load_stay(model, name):
    """They would be trained, and transformers would make them up."""
    assert naming(model, ()).rename(name) == name


def test_stacked_experts_have_the_names_in_memory():
    """transformers loads either, and an export has those that it was read with."""
    names = ["model.layers.0.mlp.experts.gate_up_proj"]
    rename = naming(config("mixtral"), names).rename
    assert rename("model.layers.0.block_sparse_moe.gate.weight") == "model.layers.0.mlp.gate.weight"


def test_a_wrapper_is_named_by_what_put_it_there():
    """Else the message says that all tensors are missing, beside a file that has them."""
    held = [f"_orig_mod.model.{LAYER}", "other"]
    assert "torch.compile" in wrapper_message(held, [f"model.{LAYER}"])
    assert wrapper_message(held, ["model.norm.weight"]) == ""
