#!/usr/bin/env bash
# transformers 5.24.0: getattr with a default raises for a field that differs by layer (Gemma 4).
#
# Guess: `getattr(config, "head_dim", None)` gives a number or None, and `hasattr` True or False,
#   as for every other configuration.
# Seen: both raise RuntimeError for the default Gemma4TextConfig, whose head_dim is 256 with
#   windows and 512 without; its to_dict() has 256. With equal widths in all layers
#   (per_layer_config={}) they answer, and so they do for Gemma 3.
# Here: config.json is read as a dictionary (megatron/sft/model/huggingface); the doctor makes its
#   small models alike in all layers (megatron/packing/doctor/subjects/small_models.py).
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
cat >"$scratch/fields_by_layer.py" <<'PYTHON'
from transformers import AutoConfig


def asked(config):
    """What hasattr, and getattr with a default, answer for head_dim."""
    answers = []
    for ask in (hasattr, lambda *names: getattr(*names, None)):
        try:
            answers.append(ask(config, "head_dim"))
        except RuntimeError as error:
            answers.append(f"RuntimeError: {type(error).__name__}")
    return answers


gemma3, gemma4 = (AutoConfig.for_model(f"gemma{number}_text") for number in (3, 4))
alike = AutoConfig.for_model("gemma4_text", per_layer_config={})
print("gemma3_text", asked(gemma3))
print("gemma4_text", asked(gemma4), "to_dict():", gemma4.to_dict()["head_dim"])
print("gemma4_text, alike in all layers", asked(alike))
assert asked(gemma3) == [True, 256]
assert asked(gemma4) == ["RuntimeError: AmbiguousGlobalPerLayerAttributeError"] * 2
assert gemma4.to_dict()["head_dim"] == 256
assert asked(alike) == [True, 256]
PYTHON
cd "$scratch" && "$environment/bin/python" -W ignore fields_by_layer.py
