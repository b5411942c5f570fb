#!/usr/bin/env bash
# transformers 5.24.0: max_window_layers of three Qwen families names three different sets of layers.
#
# Guess: with use_sliding_window true, sliding_window 8 and max_window_layers 3 the same layers of
#   Qwen2, Qwen2-MoE, Qwen3 and Qwen3-MoE attend to a window; the name says that the first 3 do.
# Seen: of 6 layers, Qwen2 and Qwen3 give it to layers 3, 4 and 5, Qwen2-MoE to layers 0 and 2
#   (every other one below 3), Qwen3-MoE to all of them: it reads neither max_window_layers nor
#   layer_types.
# Here: each family has the windows that transformers gives it
#   (megatron/sft/model/huggingface/families/qwen2.py, qwen3.py).
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
cat >"$scratch/qwen_windows.py" <<'PYTHON'
import torch
from transformers import AutoConfig, AutoModelForCausalLM

fields = {
    "vocab_size": 50, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 6,
    "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 8, "num_experts": 4,
    "num_experts_per_tok": 2, "moe_intermediate_size": 8, "shared_expert_intermediate_size": 8,
    "use_sliding_window": True, "sliding_window": 8, "max_window_layers": 3,
}
expected = {
    "qwen2": [3, 4, 5], "qwen3": [3, 4, 5], "qwen2_moe": [0, 2], "qwen3_moe": [0, 1, 2, 3, 4, 5],
}
found = {}
for kind in expected:
    torch.manual_seed(1)
    config = AutoConfig.for_model(kind, **fields)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    attentions = model(torch.arange(20)[None], output_attentions=True).attentions
    # The last of 20 tokens sees the first one, unless the layer has a window of 8.
    found[kind] = [i for i, weights in enumerate(attentions) if not weights[0, :, -1, 0].any()]
    print(kind, "layers with a window:", found[kind], flush=True)
assert found == expected
PYTHON
cd "$scratch" && "$environment/bin/python" -W ignore qwen_windows.py
