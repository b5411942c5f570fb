#!/usr/bin/env bash
# peft 0.21.2: target_modules="all-linear" adapts routers and experts, with twice the rank in gate and up.
#
# Guess: all-linear means every nn.Linear but the head; expert tensors are no nn.Linear, so they
#   are left out, and r is the rank of each adapter.
# Seen: on a mixture the router and both expert tensors are adapted as target_parameters;
#   gate_up_proj gets rank_pattern and alpha_pattern of twice r and lora_alpha, so half of a
#   file's expert rows are not where r says. The saved adapter_config.json lists names that the
#   user never gave.
# Here: read, trained and written as peft has it (megatron/sft/model/lora/peft_folder.py,
#   --lora-gate-up doubled); docs/reference/training.md says what all-linear is.
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
cat >"$scratch/peft_all_linear_experts.py" <<'PYTHON'
import json
import peft
import transformers

transformers.logging.set_verbosity_error()
config = transformers.MixtralConfig(
    vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=1,
    num_attention_heads=4, num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2,
)
model = transformers.AutoModelForCausalLM.from_config(config)
options = peft.LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM")
model = peft.get_peft_model(model, options)
ranks = {
    name.removeprefix("base_model.model.model.layers.0.").split(".lora_A")[0]: parameter.shape[0]
    for name, parameter in model.named_parameters()
    if ".lora_A." in name
}
print("rows of lora_A", ranks)
model.save_pretrained("adapter")
saved = json.load(open("adapter/adapter_config.json"))
print({key: saved[key] for key in ("r", "rank_pattern", "alpha_pattern", "target_parameters")})
assert ranks["mlp.gate"] == 8
assert ranks["mlp.experts.base_layer"] == 4 * 16  # four experts of twice the rank
assert ranks["mlp.experts"] == 4 * 8
assert saved["rank_pattern"] == {r".*\.gate_up_proj": 16}
assert set(saved["target_parameters"]) == {"gate.weight", "gate_up_proj", "down_proj"}
PYTHON
cd "$scratch" && "$environment/bin/python" -W ignore peft_all_linear_experts.py
