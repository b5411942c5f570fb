#!/usr/bin/env bash
# transformers 4.57.6: a config.json with rope_parameters alone is read with rope_theta 10000.
#
# Guess: a folder that transformers 5 has written either loads in transformers 4 with its own rope
#   base, or is refused.
# Seen: transformers 5 writes rope_parameters and no rope_theta. 4.57.6 keeps the unknown key,
#   takes the default base 10000 and says nothing: Llama 3's 500000 is lost, and answers get worse
#   with length.
# Here: --save-hf writes both spellings, which transformers 4.57 and 5.24 read alike
#   (megatron/sft/model/huggingface/older_rope.py).
set -euo pipefail
pins=(torch==2.13.0 transformers==4.57.6)
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
environment=${FINDINGS_CACHE:-$scratch}/$(IFS=+; echo "${pins[*]}")
if [ ! -e "$environment/ready" ]; then
    python3 -m venv "$environment"
    "$environment/bin/pip" install --quiet --disable-pip-version-check "${pins[@]}"
    touch "$environment/ready"
fi
export CUDA_VISIBLE_DEVICES="" HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1
cat >"$scratch/transformers_4_rope_parameters.py" <<'PYTHON'
import json
import transformers

transformers.logging.set_verbosity_error()
fields = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 64, "hidden_size": 32,
    "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 8192,
}
smallest = {}
for name, rope in (
    ("as transformers 5 writes it", {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}),
    ("as released", {"rope_theta": 5e5}),
):
    with open("config.json", "w") as file:
        json.dump(fields | rope, file)
    config = transformers.AutoConfig.from_pretrained(".")
    model = transformers.AutoModelForCausalLM.from_config(config)
    smallest[name] = model.model.rotary_emb.inv_freq[-1].item()
    print(name, "rope_theta", config.rope_theta, "lowest frequency", smallest[name])
assert abs(smallest["as transformers 5 writes it"] - 10000 ** (-6 / 8)) < 1e-6
assert abs(smallest["as released"] - 5e5 ** (-6 / 8)) < 1e-6
PYTHON
cd "$scratch" && "$environment/bin/python" -W ignore transformers_4_rope_parameters.py
