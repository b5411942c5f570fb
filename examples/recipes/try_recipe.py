"""Train two steps of a recipe here: its model shrunken, with random weights, on one process.

python -m examples.recipes.try_recipe examples/recipes/qwen3-8b-lora.yaml
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

import yaml

from examples.tiny_images import make_data

MODELS = Path(__file__).parent / "models"
"""config.json of each model, as far as it decides what is computed."""
SMALL = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 128,
    "moe_intermediate_size": 32,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "shared_expert_intermediate_size": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "num_experts_per_tok": 2,
    "top_k_experts": 2,
    "query_pre_attn_scalar": 16,
    "global_head_dim": 32,
    "num_global_key_value_heads": 1,
    "rotary_dim": 8,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "vocab_size": 320,
    "pad_token_id": 0,
}
ONE_PROCESS = {
    "tensor_model_parallel_size": 1,
    "pipeline_model_parallel_size": 1,
    "num_layers_per_virtual_pipeline_stage": None,
    "context_parallel_size": 1,
    "expert_model_parallel_size": 1,
    "sequence_parallel": False,
}


def model_config(recipe: dict[str, Any]) -> dict[str, Any]:
    """Returns config.json of the recipe's model, as it is released."""
    return json.loads((MODELS / f"{recipe['pretrained_checkpoint']}.json").read_text())


def shrunken(config: dict[str, Any]) -> dict[str, Any]:
    """Returns the text part of a model's config.json, of the same kind and a thousandth of the
    size.
    """
    text = config.get("text_config", config)
    small = {**text, **{name: value for name, value in SMALL.items() if name in text}}
    small.pop("quantization_config", None)
    if "kv_lora_rank" in text:  # heads have no groups there
        small["num_key_value_heads"] = small["num_attention_heads"]
    if text.get("n_group", 1) > 1:
        small |= {"n_group": 2, "topk_group": 1}
    if text.get("first_k_dense_replace"):
        small["first_k_dense_replace"] = 1
    if "long_factor" in (text.get("rope_scaling") or {}):  # of each pair of channels
        pairs = int(SMALL["head_dim"] * text["partial_rotary_factor"]) // 2
        small["rope_scaling"] = {
            name: value[:pairs] if isinstance(value, list) else value
            for name, value in text["rope_scaling"].items()
        }
    if "layer_types" in text:  # of models with several kinds the last layers are of both
        small["layer_types"] = text["layer_types"][-SMALL["num_hidden_layers"] :]
    return small


def write_text_model(folder: Path, released: dict[str, Any]) -> None:
    """Writes the text part of a model with random weights as transformers does."""
    import transformers

    config = shrunken(released)
    kind = config["model_type"]
    made = transformers.CONFIG_MAPPING[kind](
        **{name: value for name, value in config.items() if name != "model_type"}
    )
    auto = transformers.AutoModelForCausalLM
    if kind == "mistral4":  # which that does not list
        from transformers.models.mistral4.modeling_mistral4 import Mistral4ForCausalLM

        auto.register(type(made), Mistral4ForCausalLM, exist_ok=True)
    auto.from_config(made).save_pretrained(folder)


def write_vision_model(folder: Path, config: dict[str, Any]) -> None:
    """Writes a vision model with random weights, its tokenizer and its image processor."""
    import transformers

    folder.mkdir()
    ids = make_data.write_tokenizer(folder)
    text = shrunken(config)
    tower = {
        name: value for name, value in make_data.TOWER.items() if name in config["vision_config"]
    }
    made = transformers.CONFIG_MAPPING[config["model_type"]](
        text_config=text, vision_config=tower | {"out_hidden_size": text["hidden_size"]}, **ids
    )
    transformers.AutoModelForImageTextToText.from_config(made).save_pretrained(folder)


def vision_options(folder: Path, model: Path) -> dict[str, Any]:
    """Returns the options of data for a vision model, and makes a chat about a picture."""
    picture = make_data.Picture("circle", "red", 3)
    picture.draw(folder / "picture.png", Random(1))
    (question, answer), *_ = picture.questions()
    turns = [
        {"role": "user", "content": f"<image> {question}"},
        {"role": "assistant", "content": answer},
    ]
    record = {"messages": turns, "images": ["picture.png"]}
    (folder / "chats.jsonl").write_text((json.dumps(record) + "\n") * 64)
    return {"tokenizer_type": "HuggingFaceTokenizer", "tokenizer_model": str(model)}


def try_recipe(path: Path, place: Path, num_steps: int = 2) -> list[str]:
    """Makes model, data and options in the folder `place`; returns the command that trains."""
    recipe = yaml.safe_load(path.read_text())
    has_images = recipe.get("images", False)
    write = write_vision_model if has_images else write_text_model
    write(place / "model", model_config(recipe))
    turns = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello. " * 9}]
    record: dict[str, Any] = {"messages": turns}
    if recipe.get("loss", "sft") != "sft":
        record = {"prompt": turns[:1], "chosen": "Hello. " * 9, "rejected": "Go away."}
    (place / "chats.jsonl").write_text((json.dumps(record) + "\n") * 64)
    recipe.pop("train_epochs")
    recipe |= ONE_PROCESS | {
        "pretrained_checkpoint": str(place / "model"),
        "tokenizer_type": "ByteLevelTokenizer",
        "data_path": str(place / "chats.jsonl"),
        "seq_length": 256,
        "global_batch_size": 8,
        "train_iters": num_steps,
        "eval_iters": 1,
        "bf16": False,
        "num_workers": 0,
        "save": str(place / "checkpoints"),
        "load": str(place / "checkpoints"),
        "save_hf": str(place / "out"),
    }
    if has_images:
        recipe |= vision_options(place, place / "model")
    (place / "run.yaml").write_text(yaml.safe_dump(recipe))
    return [sys.executable, "-m", "megatron.sft", "--config", str(place / "run.yaml")]


def main() -> None:
    """Tries the recipes that are named; status 1 where one fails."""
    parser = argparse.ArgumentParser(description="Train two steps of recipes with small models.")
    parser.add_argument("recipes", nargs="+", type=Path)
    parser.add_argument("--write", type=Path, help="file for a table of what came of them")
    options = parser.parse_args()
    failed, rows = [], []
    for path in options.recipes:
        print(f"=== {path.name}", flush=True)
        with TemporaryDirectory() as place:
            done = subprocess.run(
                try_recipe(path, Path(place)), stdout=subprocess.PIPE, text=True, check=False
            )
            written = sorted(each.name for each in Path(place, "out").glob("*.safetensors"))
        print(done.stdout, flush=True)
        if done.returncode:
            failed.append(path.name)
        losses = re.findall(r"^step \d+/\d+.*?loss ([\d.]+)", done.stdout, re.MULTILINE)
        files = ", ".join(written)
        rows.append(f"| {path.name} | {done.returncode} | {' '.join(losses)} | {files} |")
    if options.write is not None:
        head = (
            "# Two steps of each recipe\n\n`make recipes`: the options of the file, on one process "
            "and a small model of random\nweights.\n\n"
            "| recipe | status | losses of the steps | written |\n|---|---|---|---|\n"
        )
        options.write.write_text(head + "\n".join(rows) + "\n")
    sys.exit(f"failed: {', '.join(failed)}" if failed else 0)


if __name__ == "__main__":
    main()
