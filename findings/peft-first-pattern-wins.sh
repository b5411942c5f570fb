#!/usr/bin/env bash
# peft 0.21.2: of two rank patterns that match, the first written one counts, not the closer one.
#
# Guess: the longer pattern, or the later one, overrides: a rank for all q_proj, and another one
#   for that of layer 0.
# Seen: the first key of the dict that matches the end of a module's name is taken. With q_proj
#   written first, layer 0's own rank is never used; a warning is only given for patterns that
#   match no module at all.
# Here: adapters with patterns of ranks are refused by name
#   (megatron/sft/model/lora/peft_folder.py).
set -euo pipefail
pins=(torch==2.13.0 transformers==5.24.0 peft==0.21.2)
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
environment=${FINDINGS_CACHE:-$scratch}/$(IFS=+; echo "${pins[*]}")
if [ ! -e "$environment/ready" ]; then
    python3 -m venv "$environment"
    "$environment/bin/pip" install --quiet --disable-pip-version-check "${pins[@]}"
    touch "$environment/ready"
fi
export CUDA_VISIBLE_DEVICES="" HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1
cat >"$scratch/peft_first_pattern_wins.py" <<'PYTHON'
import peft
import transformers

transformers.logging.set_verbosity_error()


def ranks(pattern):
    model = transformers.AutoModelForCausalLM.from_config(
        transformers.LlamaConfig(
            vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4
        )
    )
    options = peft.LoraConfig(r=8, target_modules=["q_proj"], rank_pattern=pattern)
    model = peft.get_peft_model(model, options)
    return [p.shape[0] for name, p in model.named_parameters() if "lora_A" in name]


general, special = {"q_proj": 4}, {r"layers\.0\.self_attn\.q_proj": 2}
found = [ranks(general | special), ranks(special | general)]
print("ranks of layers 0 and 1, general pattern first:", found[0], "special one first:", found[1])
assert found == [[4, 4], [2, 4]]
PYTHON
cd "$scratch" && "$environment/bin/python" -W ignore peft_first_pattern_wins.py
