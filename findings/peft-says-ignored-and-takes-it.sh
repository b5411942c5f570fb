#!/usr/bin/env bash
# peft 0.21.2: a rank pattern for experts' parameters is said to be ignored, and is taken.
#
# Guess: a key of rank_pattern of which peft says "did not match any targeted module and were ignored"
#   has no effect.
# Seen: with target_parameters the pattern is compared with module names for the warning, and with
#   parameter names for the adapter. "down_proj" is said to be ignored, alpha_pattern alike, and the
#   adapter has rank 2 instead of 4 per expert, and a scale of 8 instead of 2. Who takes the warning
#   at its word leaves the pattern in the file, and reads another adapter than he thinks.
# Here: a pattern that changes an expert is refused by its name; it was noted as without effect
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
cat >"$scratch/peft_says_ignored_and_takes_it.py" <<'PYTHON'
import warnings
import peft
import transformers

transformers.logging.set_verbosity_error()
config = transformers.Qwen3MoeConfig(
    vocab_size=64, hidden_size=32, intermediate_size=64, moe_intermediate_size=16,
    num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2, head_dim=8, num_experts=4,
    num_experts_per_tok=2,
)
adapter = peft.LoraConfig(
    r=4, lora_alpha=8, target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
    rank_pattern={"down_proj": 2}, alpha_pattern={"down_proj": 16},
)
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    model = peft.get_peft_model(transformers.Qwen3MoeForCausalLM(config), adapter)
said = [str(warning.message) for warning in caught if "_pattern" in str(warning.message)]
found = {
    module.parameter_name: (module.r["default"], module.scaling["default"])
    for module in model.modules() if hasattr(module, "parameter_name")
}
print(*said, sep="\n")
print("rank and scale:", found)
assert len(said) == 2 and all("did not match" in line and "ignored" in line for line in said)
assert found == {"gate_up_proj": (4, 2.0), "down_proj": (2, 8.0)}
PYTHON
cd "$scratch" && "$environment/bin/python" peft_says_ignored_and_takes_it.py 2>/dev/null
