#!/usr/bin/env bash
# transformers 5.24.0 (torch 2.13.0): saving a model over an older one can leave the old weights.
#
# Guess: model.save_pretrained(FOLDER) makes FOLDER hold this model: from_pretrained(FOLDER) returns
#     what was saved last, whatever was saved there before.
# Seen: a model that is saved in shards over one that was saved in a single file leaves that file
#     there. from_pretrained prefers the single file, and returns the OLD weights without a word.
#     The other way round an index stays that names shards which are gone.
# Here: a folder whose single file and shards differ is refused in one line, an index without its
#     shards is ignored (megatron/sft/model/huggingface/files.py and folder.py).
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
cd "$scratch"
"$environment/bin/python" - <<'PYTHON'
import os
import sys

import torch
from transformers import LlamaConfig, LlamaForCausalLM

config = LlamaConfig(
    vocab_size=100, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2
)
before, trained = LlamaForCausalLM(config), LlamaForCausalLM(config)
before.save_pretrained("model")
trained.save_pretrained("model", max_shard_size="20KB")
loaded = LlamaForCausalLM.from_pretrained("model").lm_head.weight
print("files after both saves:", *sorted(os.listdir("model")))
is_old, is_new = (torch.equal(loaded, one.lm_head.weight) for one in (before, trained))
print("loaded weights are those of the first save:", is_old)
print("loaded weights are those of the last save:", is_new)

trained.save_pretrained("again", max_shard_size="20KB")
trained.save_pretrained("again")
print("files after shards, then one file:", *sorted(os.listdir("again")))
index_stays = "model.safetensors.index.json" in os.listdir("again")
sys.exit(0 if is_old and not is_new and index_stays else "otherwise than stated")
PYTHON
