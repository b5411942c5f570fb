#!/usr/bin/env bash
# mergekit 0.1.5: with tokenizer_source a merged chat model has no generation_config.json.
#
# Guess: a merge copies what stands beside the weights of its base; tokenizer_source says where tokens
#   come from, and leaves rows of the embedding that no token has.
# Seen: generation_config.json is copied as one of the tokenizer's files, and with tokenizer_source
#   none of those is copied. Ends of generation that only stand there (<|im_end|> beside config.json's
#   </s>, as Qwen, Llama 3 and Gemma have it) are lost: a server goes on after the answer. Rows beyond
#   the tokenizer are cut off, and vocab_size with them: 320 become 282 here.
# Here: `--save-hf` writes generation_config.json with the ends of the template; the model's folder
#   needs one for that. Copy the base's into a merged folder.
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
cat >"$scratch/mergekit_ends_are_lost.py" <<'PYTHON'
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
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(
        vocab_size=320, hidden_size=32, intermediate_size=64, num_hidden_layers=1,
        num_attention_heads=4, bos_token_id=0, eos_token_id=1,
    ))
    model.generation_config.eos_token_id = [1, 2]
    model.save_pretrained(name)
    num_tokens = save_tokenizer(name)
recipe = dict(
    merge_method="linear", base_model="./one",
    models=[dict(model=f"./{name}", parameters=dict(weight=0.5)) for name in ("one", "two")],
)
seen = {}
for target, more in (("plain", {}), ("sourced", dict(tokenizer_source="base"))):
    rows = len(merge(target, **recipe, **more)["model.embed_tokens.weight"])
    ends = None
    if os.path.exists(f"{target}/generation_config.json"):
        with open(f"{target}/generation_config.json") as file:
            ends = json.load(file)["eos_token_id"]
    with open(f"{target}/config.json") as file:
        config = json.load(file)
    seen[target] = rows, config["vocab_size"], ends, config["eos_token_id"]
    print(f"{target}: rows, vocab_size, generation's ends, config's end: {seen[target]}")
assert seen["plain"] == (320, 320, [1, 2], 1)
assert seen["sourced"] == (num_tokens, num_tokens, None, 1) and num_tokens < 320
PYTHON
cd "$scratch" && "$environment/bin/python" -W ignore mergekit_ends_are_lost.py
