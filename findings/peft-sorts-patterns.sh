#!/usr/bin/env bash
# peft 0.21.2: an adapter is saved with its patterns in alphabetical order, and the first one counts.
#
# Guess: an adapter with two alpha patterns that both match a module is read again with the scales
#   that it was trained with.
# Seen: {"q_proj": 32, ".*proj": 8} is trained with a scale of 8 for q_proj. save_pretrained writes
#   the keys sorted, ".*proj" first, and the folder is read with a scale of 2: the same weights,
#   other logits, no warning. A rank pattern in that order cannot be loaded.
# Here: such an adapter is refused by the module that the first key of the file changes
#   (megatron/sft/model/lora/peft_folder.py); `--save` and `--save-hf` write one pattern at most.
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
cat >"$scratch/peft_sorts_patterns.py" <<'PYTHON'
import json
import peft
import torch
import transformers

transformers.logging.set_verbosity_error()


def base():
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=1,
        num_attention_heads=4, num_key_value_heads=2,
    )
    return transformers.LlamaForCausalLM(config)


def scales(model):
    return {
        name.rpartition(".")[2]: module.scaling["default"]
        for name, module in model.named_modules()
        if isinstance(module, peft.tuners.lora.LoraLayer)
    }


tokens = torch.arange(8).unsqueeze(0)
adapter = peft.LoraConfig(
    r=4, lora_alpha=16, target_modules=["q_proj", "k_proj"], init_lora_weights=False,
    alpha_pattern={"q_proj": 32, ".*proj": 8},
)
trained = peft.get_peft_model(base(), adapter).eval()
trained.save_pretrained("adapter")
with open("adapter/adapter_config.json") as file:
    written = list(json.load(file)["alpha_pattern"])
again = peft.PeftModel.from_pretrained(base(), "adapter").eval()
weights = dict(trained.named_parameters())
assert all(torch.equal(weights[name], weight) for name, weight in again.named_parameters())
with torch.no_grad():
    change = (trained(tokens).logits - again(tokens).logits).abs().max().item()
print(f"trained {scales(trained)}, written {written}, read {scales(again)}; logits differ by {change:.2f}")
assert written == [".*proj", "q_proj"]
assert scales(trained) == {"q_proj": 8.0, "k_proj": 2.0}
assert scales(again) == {"q_proj": 2.0, "k_proj": 2.0}
assert change > 0.05
PYTHON
cd "$scratch" && "$environment/bin/python" -W ignore peft_sorts_patterns.py
