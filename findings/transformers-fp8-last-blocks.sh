#!/usr/bin/env bash
# transformers 5.24.0: fp8 weights whose rows are no multiple of the block are dequantized wrongly.
#
# Guess: scales of blocks of 128 belong to rows 0-127, 128-255 and so on, as weight_block_size says,
#   and the last block is smaller: DeepSeek-V3's kv_a_proj_with_mqa has 576 rows and 5 scales.
# Seen: with dequantize=True the size of a block is rows / scales, whatever config.json says. 256
#   rows are right. 192 rows with 2 scales are read as two blocks of 96: every projection is wrong,
#   single weights by up to 141 %, and nothing warns. 320 rows with 3 scales end in an error.
# Here: blocks are those of weight_block_size, the last one smaller
#   (megatron/sft/model/huggingface/quantized/pairs.py).
set -euo pipefail
pins=(transformers==5.24.0 torch==2.13.0 accelerate==1.15.0)
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
environment=${FINDINGS_CACHE:-$scratch}/$(IFS=+; echo "${pins[*]}")
if [ ! -e "$environment/ready" ]; then
    python3 -m venv "$environment"
    "$environment/bin/pip" install --quiet --disable-pip-version-check "${pins[@]}"
    touch "$environment/ready"
fi
export HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 CUDA_VISIBLE_DEVICES=
cat >"$scratch/last_blocks.py" <<'PYTHON'
import json
from pathlib import Path

import torch
import transformers
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, FineGrainedFP8Config, LlamaConfig

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()
SIZE = 128


def write(hidden_size):
    """A Llama in fp8, by the definition of the format: its folder, and projections in float32."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(
        LlamaConfig(
            hidden_size=hidden_size,
            intermediate_size=256,
            num_hidden_layers=1,
            num_attention_heads=4,
            vocab_size=64,
            dtype="float32",
        )
    )
    folder = Path(str(hidden_size))
    model.save_pretrained(folder)
    tensors, projections = {}, {}
    for name, weight in model.state_dict().items():
        tensors[name] = weight
        if name.endswith("proj.weight"):
            rows, columns = weight.shape
            scales = torch.rand(-(-rows // SIZE), -(-columns // SIZE)) + 0.5
            by_value = scales.repeat_interleave(SIZE, 0)[:rows].repeat_interleave(SIZE, 1)
            by_value = by_value[:, :columns]
            codes = (weight / by_value).to(torch.float8_e4m3fn)
            tensors |= {name: codes, f"{name}_scale_inv": scales}
            projections[name] = codes.float() * by_value
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "fp8",
        "weight_block_size": [SIZE, SIZE],
        "activation_scheme": "dynamic",
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder, projections


def largest_error(hidden_size):
    folder, projections = write(hidden_size)
    read = AutoModelForCausalLM.from_pretrained(
        folder,
        dtype=torch.float32,
        quantization_config=FineGrainedFP8Config(dequantize=True),
    ).state_dict()
    errors = [
        float((read[name] / right - 1)[right != 0].abs().max())
        for name, right in projections.items()
    ]
    return sum(error > 1e-6 for error in errors), len(errors), max(errors)


for hidden_size in (256, 192):
    num_wrong, num_all, error = largest_error(hidden_size)
    print(f"hidden size {hidden_size}: {num_wrong} of {num_all} projections differ, by {error:.0%}")
    assert num_wrong == (0 if hidden_size == 256 else num_all)
assert error > 0.3
try:
    largest_error(320)
except Exception as failure:
    print(f"hidden size 320: {type(failure).__name__}")
else:
    raise AssertionError("320 rows are read")
PYTHON
cd "$scratch"
"$environment/bin/python" -W ignore last_blocks.py
