#!/usr/bin/env bash
# transformers 5.24.0, bitsandbytes 0.50.0: to skip one module more quantizes the head.
#
# Guess: llm_int8_skip_modules adds to what is skipped anyway, the head.
# Seen: without it the head stays as it is. With ["q_proj"] q_proj stays, and the head is quantized to
#   4 bits, without a word: logits of a QLoRA run, and of what is merged and saved after it, are those
#   of a rounded head. ["lm_head", "q_proj"] keeps both.
# Here: nothing is quantized in training; such folders are read as they stand.
set -euo pipefail
pins=(torch==2.13.0 transformers==5.24.0 accelerate==1.15.0 bitsandbytes==0.50.0)
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
environment=${FINDINGS_CACHE:-$scratch}/$(IFS=+; echo "${pins[*]}")
if [ ! -e "$environment/ready" ]; then
    python3 -m venv "$environment"
    "$environment/bin/pip" install --quiet --disable-pip-version-check "${pins[@]}"
    touch "$environment/ready"
fi
export CUDA_VISIBLE_DEVICES="" HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1
cat >"$scratch/transformers_skip_modules_replace.py" <<'PYTHON'
import torch
import transformers

transformers.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()
torch.manual_seed(0)
config = transformers.LlamaConfig(
    vocab_size=64, hidden_size=64, intermediate_size=64, num_hidden_layers=1,
    num_attention_heads=4, num_key_value_heads=2,
)
transformers.LlamaForCausalLM(config).save_pretrained("model")
kinds = {}
for skipped in (None, ["q_proj"], ["lm_head", "q_proj"]):
    quantized = transformers.AutoModelForCausalLM.from_pretrained(
        "model", device_map="cpu",
        quantization_config=transformers.BitsAndBytesConfig(
            load_in_4bit=True, llm_int8_skip_modules=skipped
        ),
    )
    modules = {"lm_head": quantized.lm_head, "q_proj": quantized.model.layers[0].self_attn.q_proj}
    kinds[str(skipped)] = {name: type(module).__name__ for name, module in modules.items()}
    print(skipped, kinds[str(skipped)])
assert kinds["None"] == {"lm_head": "Linear", "q_proj": "Linear4bit"}
assert kinds["['q_proj']"] == {"lm_head": "Linear4bit", "q_proj": "Linear"}
assert kinds["['lm_head', 'q_proj']"] == {"lm_head": "Linear", "q_proj": "Linear"}
PYTHON
cd "$scratch" && "$environment/bin/python" -W ignore transformers_skip_modules_replace.py
