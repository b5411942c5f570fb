#!/usr/bin/env bash
# SGLang 0.5.23: adapters of language models are scaled by alpha / r, whatever adapter_config.json says.
#
# Guess: use_rslora and alpha_pattern of an adapter are taken, as in vLLM 0.33, or it is refused.
# Seen: its reader takes r, lora_alpha, target_modules and use_dora. An adapter of rank 16 and alpha 32
#   trained with use_rslora has a scale of 8, and is served with 2; alpha_pattern has no effect. No
#   warning. (Its adapters of image models do take both.)
# Here: `--lora-rslora` says so at the start of a run, and `--lora-merge` writes a whole model, which any
#   server scales right (megatron/sft/arguments/value_notes.py).
set -euo pipefail
pins=(huggingface-hub==2.4.0)
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
environment=${FINDINGS_CACHE:-$scratch}/$(IFS=+; echo "${pins[*]}")
if [ ! -e "$environment/ready" ]; then
    python3 -m venv "$environment"
    "$environment/bin/pip" install --quiet --disable-pip-version-check "${pins[@]}"
    touch "$environment/ready"
fi
if [ ! -e "$environment/sglang" ]; then
    "$environment/bin/pip" download --quiet --disable-pip-version-check --no-deps --dest "$scratch" sglang==0.5.23
    "$environment/bin/python" -m zipfile -e "$scratch"/sglang-*.whl "$environment/sglang"
fi
source=$environment/sglang/sglang/srt
export SGLANG_SOURCE=$source
export HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1
cat >"$scratch/sglang_adapters_scale.py" <<'PYTHON'
import ast
import importlib.util
import json
import math
import os
from pathlib import Path

source = Path(os.environ["SGLANG_SOURCE"])
spec = importlib.util.spec_from_file_location("lora_config", source / "lora/lora_config.py")
reader = importlib.util.module_from_spec(spec)
spec.loader.exec_module(reader)
# The one line that scales, of a module that cannot be imported without a GPU's kernels.
tree = ast.parse((source / "lora/lora.py").read_text())
(line,) = [
    node for node in ast.walk(tree)
    if isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == "self.scaling"
]


class Adapter:
    def __init__(self, folder):
        self.config = reader.LoRAConfig(folder)
        self.scaling = eval(ast.unparse(line.value), {"self": self})


folder = Path("adapter")
folder.mkdir()
config = {"peft_type": "LORA", "r": 16, "lora_alpha": 32, "target_modules": ["q_proj"]}
scales = {}
for name, more in {
    "plain": {}, "rslora": {"use_rslora": True}, "pattern": {"alpha_pattern": {"q_proj": 128}}
}.items():
    (folder / "adapter_config.json").write_text(json.dumps(config | more))
    scales[name] = Adapter(str(folder)).scaling
print("scales:", scales, "of", ast.unparse(line), "; trained with", 32 / math.sqrt(16), "and", 128 / 16)
assert scales == {"plain": 2.0, "rslora": 2.0, "pattern": 2.0}
PYTHON
cd "$scratch" && "$environment/bin/python" -W ignore sglang_adapters_scale.py
