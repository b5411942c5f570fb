#!/usr/bin/env bash
# transformers 5.24.0: Gemma 3 and OLMo 3 drop a rope that is written as other families take it.
#
# Guess: what a Llama reads (rope_scaling with `type`, as transformers 4 wrote it; one
#   rope_parameters for all layers; rope_theta) holds for Gemma 3 and OLMo 3, too, or is refused.
# Seen: rope_scaling {"type": "linear"} stretches nothing, {"rope_type": "linear"} does; one
#   rope_parameters for all layers is ignored, its rope_theta included; and OLMo 3's rope_theta is
#   that of layers that see all tokens alone, the others stay at 500,000. No warning names it.
# Here: the former two are refused in a line, rope_theta is read as transformers reads it
#   (megatron/sft/model/huggingface/families/config_fields.py, olmo.py).
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
cat >"$scratch/ropes_of_kinds.py" <<'PYTHON'
import copy
import json
from pathlib import Path

from transformers import AutoConfig, AutoModelForCausalLM

SIZES = {
    "vocab_size": 50, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 6,
    "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 8,
}


def frequencies(kind, fields):
    """Radians per position of the last pair of channels: of full layers, and of others."""
    Path("config.json").write_text(json.dumps({"model_type": kind, **SIZES, **fields}))
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained("."))
    buffers = dict(model.model.rotary_emb.named_buffers())
    names = ("full_attention_inv_freq", "sliding_attention_inv_freq")
    return tuple(round(buffers.get(n, buffers.get("inv_freq"))[-1].item(), 9) for n in names)


linear = {"factor": 8.0}
for kind in ("llama", "gemma3_text", "olmo3"):
    plain = frequencies(kind, {})
    older = frequencies(kind, {"rope_scaling": {"type": "linear", **linear}})
    newer = frequencies(kind, {"rope_scaling": {"rope_type": "linear", **linear}})
    flat = {"rope_type": "linear", "rope_theta": 1234.0, **linear}
    whole = frequencies(kind, {"rope_parameters": copy.deepcopy(flat)})
    print(kind, {"plain": plain, "type": older, "rope_type": newer, "rope_parameters": whole})
    assert newer != plain
    if kind == "llama":
        assert older == newer
        assert whole != plain
    else:
        assert older == plain
        assert whole == plain
theta = frequencies("olmo3", {"rope_theta": 1234.0})
print("olmo3 rope_theta 1234", theta)
assert theta[0] != frequencies("olmo3", {})[0]
assert theta[1] == frequencies("olmo3", {})[1]
PYTHON
cd "$scratch" && "$environment/bin/python" -W ignore ropes_of_kinds.py
