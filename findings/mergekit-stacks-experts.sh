#!/usr/bin/env bash
# mergekit 0.1.5 (transformers 5.24.0): a merge of Qwen3-MoE has tensors that no Qwen3-MoE file has.
#
# Guess: merged folders have the tensor names of the folders that were merged, experts one by one.
# Seen: names are those of the modules of transformers 5, where the experts of a layer are one
#   parameter. The inputs have mlp.experts.0.gate_proj.weight and so on, as published ones do and as
#   transformers 5 itself saves them; the merge has mlp.experts.gate_up_proj and mlp.experts.down_proj.
#   Their values are right, and transformers 5 reads them. A reader that goes by the published names
#   (transformers 4, converters) finds no experts.
# Here: both spellings are read (megatron/sft/model/huggingface/families/mixture.py).
set -euo pipefail
pins=(torch==2.13.0 transformers==5.24.0 mergekit==0.1.5)
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
environment=${FINDINGS_CACHE:-$scratch}/$(IFS=+; echo "${pins[*]}")
if [ ! -e "$environment/ready" ]; then
    python3 -m venv "$environment"
    "$environment/bin/pip" install --quiet --disable-pip-version-check "${pins[@]}"
    touch "$environment/ready"
fi
export CUDA_VISIBLE_DEVICES="" HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1
cat >"$scratch/mergekit_stacks_experts.py" <<'PYTHON'
import json
import os
import subprocess
import sys
import tokenizers
import torch
import transformers
from safetensors.torch import load_file

transformers.logging.set_verbosity_error()


def save_tokenizer(folder):
    alone = tokenizers.Tokenizer(tokenizers.models.BPE())
    alone.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=280, initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<s>", "</s>", "<|im_end|>"],
    )
    alone.train_from_iterator(["hello the sea and the sun"], trainer)
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=alone, bos_token="<s>", eos_token="</s>"
    )
    tokenizer.save_pretrained(folder)
    return len(tokenizer)


def merge(target, **recipe):
    with open("recipe.yml", "w") as file:
        json.dump(recipe, file)  # JSON is YAML
    command = os.path.join(os.path.dirname(sys.executable), "mergekit-yaml")
    subprocess.run([command, "recipe.yml", target], check=True, capture_output=True)
    return load_file(f"{target}/model.safetensors")
for seed, name in enumerate(("one", "two")):
    torch.manual_seed(seed)
    transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(
        vocab_size=320, hidden_size=32, intermediate_size=64, moe_intermediate_size=16,
        num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
        num_experts=4, num_experts_per_tok=2,
    )).save_pretrained(name)
    save_tokenizer(name)
merged = merge("merged", merge_method="linear", models=[
    dict(model=f"./{name}", parameters=dict(weight=0.5)) for name in ("one", "two")
])


def experts(tensors):
    return sorted(name.split("mlp.experts.")[1] for name in tensors if ".experts." in name)


def stacked(tensors, part):
    names = [f"model.layers.0.mlp.experts.{number}.{part}.weight" for number in range(4)]
    return torch.stack([tensors[name] for name in names])


inputs = [load_file(f"{name}/model.safetensors") for name in ("one", "two")]
mean = sum(stacked(tensors, "down_proj") for tensors in inputs) / 2
difference = (merged["model.layers.0.mlp.experts.down_proj"] - mean).abs().max().item()
print(f"inputs: {len(experts(inputs[0]))} tensors, {experts(inputs[0])[:2]} ...; merged: "
      f"{experts(merged)}, {difference:.0e} from the mean")
assert len(experts(inputs[0])) == 12
assert experts(merged) == ["down_proj", "gate_up_proj"] and difference < 1e-6
PYTHON
cd "$scratch" && "$environment/bin/python" -W ignore mergekit_stacks_experts.py
