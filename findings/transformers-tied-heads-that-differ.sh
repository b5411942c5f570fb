#!/usr/bin/env bash
# transformers 5.24.0: a file with a head of its own is untied against config.json, which stays "tied".
#
# Guess: tie_word_embeddings=true decides: the head of the file is dropped, the embedding is the head,
#   as in transformers 4 and in servers.
# Seen: where the file has lm_head.weight with other values than the embedding (a merge that treats
#   them apart, an adapter of one of them), the model is not tied, and a warning says so. Saved again,
#   the folder has both tensors and still tie_word_embeddings=true: who goes by config.json reads
#   another model, whose logits differ.
# Here: such a folder is refused in a line that names both tensors
#   (megatron/sft/model/huggingface/folder.py).
set -euo pipefail
pins=(torch==2.13.0 transformers==5.24.0)
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
environment=${FINDINGS_CACHE:-$scratch}/$(IFS=+; echo "${pins[*]}")
if [ ! -e "$environment/ready" ]; then
    python3 -m venv "$environment"
    "$environment/bin/pip" install --quiet --disable-pip-version-check "${pins[@]}"
    touch "$environment/ready"
fi
export CUDA_VISIBLE_DEVICES="" HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1
cat >"$scratch/transformers_tied_heads_that_differ.py" <<'PYTHON'
import json
import torch
import transformers
from safetensors.torch import load_file, save_file

transformers.logging.set_verbosity_error()
torch.manual_seed(0)
config = transformers.LlamaConfig(
    vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=1,
    num_attention_heads=2, tie_word_embeddings=True,
)
transformers.LlamaForCausalLM(config).save_pretrained("tied")
tensors = load_file("tied/model.safetensors")
alone = sorted(name for name in tensors if "embed" in name or "head" in name)
tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] * 1.5
save_file(tensors, "tied/model.safetensors", {"format": "pt"})
model = transformers.AutoModelForCausalLM.from_pretrained("tied")
is_tied = model.lm_head.weight is model.model.embed_tokens.weight
has_own = torch.equal(model.lm_head.weight, tensors["lm_head.weight"])
model.save_pretrained("again")
saved = sorted(n for n in load_file("again/model.safetensors") if "embed" in n or "head" in n)
with open("again/config.json") as file:
    still = json.load(file)["tie_word_embeddings"]
print(f"tied {is_tied}, the file's head {has_own}; saved again: {saved}, tie_word_embeddings {still}")
assert alone == ["model.embed_tokens.weight"]
assert not is_tied and has_own and still is True
assert saved == ["lm_head.weight", "model.embed_tokens.weight"]
PYTHON
cd "$scratch" && "$environment/bin/python" -W ignore transformers_tied_heads_that_differ.py
