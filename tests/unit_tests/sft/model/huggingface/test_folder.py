"""The files of a HuggingFace folder, before any tensor is read."""

import json

import pytest
import torch
from safetensors.torch import save_file

from megatron.sft.model.huggingface.families.registry import FAMILIES, language_model
from megatron.sft.model.huggingface.folder import (
    INDEX,
    SINGLE,
    carried_tensors,
    check_folder,
    fingerprint,
    open_folder,
)
from megatron.sft.model.huggingface.weights import Weights
from megatron.sft.options.model import ModelConfig

VOCAB_SIZE = 40


def weights(**changes):
    options = {
        "num_layers": 2,
        "hidden_size": 16,
        "num_attention_heads": 4,
        "group_query_attention": True,
        "num_query_groups": 2,
        "ffn_hidden_size": 24,
        "swiglu": True,
        "disable_bias_linear": True,
        "position_embedding_type": "rope",
        "normalization": "RMSNorm",
        "untie_embeddings_and_output_weights": True,
        "seq_length": 8,
    }
    return Weights(ModelConfig(**{**options, **changes}), VOCAB_SIZE, FAMILIES["llama"])


def tensors_of(expected):
    return {
        part.name: torch.randn(part.shape) for weight in expected.all() for part in weight.parts
    }


def check(folder, expected=None):
    check_folder(open_folder(folder), expected or weights())


def test_a_whole_folder_is_taken(tmp_path):
    """In one file, in several with an index, and of a model without its head's prefix."""
    tensors = tensors_of(weights())
    single, several, bare = (tmp_path / name for name in ("single", "several", "bare"))
    for folder in (single, several, bare):
        folder.mkdir()
    save_file(tensors, single / SINGLE)
    weight_map = {name: f"part{number % 3}.safetensors" for number, name in enumerate(tensors)}
    for file in set(weight_map.values()):
        save_file(
            {name: tensors[name] for name in tensors if weight_map[name] == file}, several / file
        )
    (several / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    save_file(
        {name.removeprefix("model."): tensor for name, tensor in tensors.items()}, bare / SINGLE
    )
    for folder in (single, several, bare):
        check(folder)
        assert open_folder(folder).tensors.keys() == tensors.keys()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            lambda t: t.pop("model.layers.1.mlp.up_proj.weight"),
            ["lacks model.layers.1.mlp.up_proj.weight"],
        ),
        (lambda t: t.pop("lm_head.weight"), ["lacks lm_head.weight"]),
        (
            lambda t: t.update({"model.layers.2.mlp.up_proj.weight": torch.zeros(1)}),
            ["no place", "layers.2.mlp"],
        ),
        (lambda t: t.update({"score.weight": torch.zeros(1)}), ["no place", "score.weight"]),
        (
            lambda t: t.update({"model.norm.weight": torch.zeros(17)}),
            ["model.norm.weight of shape [17]", "[16]"],
        ),
        (
            lambda t: t.update(
                {"model.layers.0.mlp.up_proj.weight": torch.zeros(24, 16, dtype=torch.int8)}
            ),
            ["I8", "quantized", "up_proj"],
        ),
    ],
)
def test_other_tensors_are_refused_with_their_names(tmp_path, change, words):
    """A part of the model would stay random, or a part of the file unread."""
    tensors = tensors_of(weights())
    change(tensors)
    save_file(tensors, tmp_path / SINGLE)
    with pytest.raises(ValueError, match=str(tmp_path)) as failure:
        check(tmp_path)
    for word in words:
        assert word in str(failure.value)


def test_old_files_frequencies_are_passed_over(tmp_path):
    """Llama's first conversions hold them."""
    tensors = tensors_of(weights()) | {
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(2)
    }
    save_file(tensors, tmp_path / SINGLE)
    check(tmp_path)


def test_a_tied_head_must_be_the_embedding(tmp_path):
    """transformers takes the file's head, and leaves the two untied without a word."""
    expected = weights(untie_embeddings_and_output_weights=False)
    tensors = tensors_of(expected)
    assert "lm_head.weight" not in tensors
    save_file(
        tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()},
        tmp_path / SINGLE,
    )
    check(tmp_path, expected)
    save_file(
        tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"] + 1e-3}, tmp_path / SINGLE
    )
    with pytest.raises(ValueError, match="tie_word_embeddings"):
        check(tmp_path, expected)


def test_broken_folders_are_refused(tmp_path):
    """Each in a line with a way out."""
    with pytest.raises(ValueError, match="has neither"):
        open_folder(tmp_path)
    (tmp_path / "pytorch_model-00001-of-00002.bin").touch()
    with pytest.raises(ValueError, match=r"pickles .*save_pretrained"):
        open_folder(tmp_path)
    save_file(tensors_of(weights()), tmp_path / SINGLE)
    content = (tmp_path / SINGLE).read_bytes()
    for size in (0, 7, 100, len(content) - 1):
        (tmp_path / SINGLE).write_bytes(content[:size])
        with pytest.raises(ValueError, match="copy it again"):
            open_folder(tmp_path)
    (tmp_path / SINGLE).unlink()
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"a": "gone.safetensors"}}))
    with pytest.raises(ValueError, match=r"gone\.safetensors"):
        open_folder(tmp_path)
    (tmp_path / "part.safetensors").write_bytes(content)
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"a": "part.safetensors"}}))
    open_folder(tmp_path)  # transformers reads whole files
    (tmp_path / "config.json").write_text(json.dumps({"text_config": {}}))
    with pytest.raises(ValueError, match="names a, which none"):
        open_folder(tmp_path)


def test_fingerprint_tells_models_apart_but_not_files(tmp_path):
    """Adapters beside a base of the same shapes and other values compute nonsense; resharded, it is
    the same base.
    """
    tensors = tensors_of(weights())
    first = list(tensors)[:3]
    for name in ("one", "two", "three"):
        (tmp_path / name).mkdir()
    save_file(tensors, tmp_path / "one" / SINGLE)
    index = {name: "a.safetensors" if name in first else "b.safetensors" for name in tensors}
    save_file({name: tensors[name] for name in first}, tmp_path / "two" / "a.safetensors")
    save_file(
        {name: t for name, t in tensors.items() if name not in first},
        tmp_path / "two" / "b.safetensors",
    )
    (tmp_path / "two" / INDEX).write_text(json.dumps({"weight_map": index}))
    save_file(tensors | {first[1]: tensors[first[1]] + 1}, tmp_path / "three" / SINGLE)
    one, two, three = (
        fingerprint(open_folder(tmp_path / name)) for name in ("one", "two", "three")
    )
    assert one == two != three


def test_two_names_of_one_tensor_must_be_equal(tmp_path):
    """One of the two would be trained and the other loaded."""
    tensors = tensors_of(weights())
    name = "model.layers.0.input_layernorm.weight"
    for difference in (0.0, 1.0):
        other = {name.removeprefix("model."): tensors[name] + difference}
        save_file(tensors | other, tmp_path / SINGLE)
        if difference == 0.0:
            check(tmp_path)
            continue
        with pytest.raises(ValueError, match="two names of one tensor"):
            open_folder(tmp_path)


def test_shards_beside_a_file_must_hold_the_same(tmp_path):
    """save_pretrained leaves older shards or an older file, and transformers reads the file."""
    tensors = tensors_of(weights())
    save_file(tensors, tmp_path / SINGLE)
    index = {"weight_map": dict.fromkeys(tensors, "part.safetensors")}
    (tmp_path / INDEX).write_text(json.dumps(index))
    check(tmp_path)  # the shards are gone
    for difference in (0.0, 1.0):
        save_file(
            {name: t + difference for name, t in tensors.items()}, tmp_path / "part.safetensors"
        )
        if difference == 0.0:
            check(tmp_path)
    with pytest.raises(ValueError, match="two models"):
        open_folder(tmp_path)


def test_a_tied_embedding_may_be_stored_as_the_head(tmp_path):
    """transformers ties the two, whichever is there."""
    expected = weights(untie_embeddings_and_output_weights=False)
    tensors = tensors_of(expected)
    tensors["lm_head.weight"] = tensors.pop("model.embed_tokens.weight")
    save_file(tensors, tmp_path / SINGLE)
    with pytest.raises(ValueError, match=r"lacks model\.embed_tokens"):
        check(tmp_path, expected)
    config = {"model_type": "llama", "tie_word_embeddings": True}
    (tmp_path / "config.json").write_text(json.dumps(config))
    check(tmp_path, expected)


def test_names_of_a_wrapper_are_named(tmp_path):
    """transformers makes all weights up, and training begins from noise."""
    save_file({f"module.{name}": t for name, t in tensors_of(weights()).items()}, tmp_path / SINGLE)
    with pytest.raises(ValueError, match=r"'module\.' .*DistributedDataParallel"):
        check(tmp_path)


@pytest.mark.parametrize("head", ["lm_head.weight", "model.lm_head.weight"])
def test_a_head_of_a_multimodal_model_is_not_carried_along(tmp_path, head):
    """transformers computes with it, and an export would hold it untrained."""
    config = {"model_type": "gemma3", "tie_word_embeddings": True}
    config["text_config"] = {"model_type": "gemma3_text"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    family, _, prefix = language_model(config)
    model = weights(untie_embeddings_and_output_weights=False)._model
    expected = Weights(model, VOCAB_SIZE, family, prefix)
    tensors = tensors_of(expected)
    embedding = tensors["language_model.model.embed_tokens.weight"]
    tower = {"model.vision_tower.proj.weight": torch.ones(2)}
    save_file(tensors | tower | {head: embedding.clone()}, tmp_path / SINGLE)
    check(tmp_path, expected)
    assert [*carried_tensors(open_folder(tmp_path), expected)] == ["vision_tower.proj.weight"]
    save_file(tensors | {head: embedding + 1}, tmp_path / SINGLE)
    with pytest.raises(ValueError, match="tie_word_embeddings"):
        check(tmp_path, expected)
