#!/usr/bin/env bash
# torch 2.13.0: clip_grad_norm_ of bfloat16 gradients has a norm of three digits; of float16, inf.
#
# Guess: the norm of all gradients is a float32 number, whatever type they have.
# Seen: it has the type of the gradients. In bfloat16 a norm of 246.95 is 248, so clipping to 1 leaves
#   0.998, and the logged grad_norm moves in steps of 0.4 to 0.8 %. In float16 a norm above 65,504 is
#   inf: 4,000 gradients of 2,000 become zeros, all of them, without an error.
# Here: gradients are float32, and so is their norm (megatron-core).
set -euo pipefail
pins=(torch==2.13.0 numpy==2.4.6)
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
environment=${FINDINGS_CACHE:-$scratch}/$(IFS=+; echo "${pins[*]}")
if [ ! -e "$environment/ready" ]; then
    python3 -m venv "$environment"
    "$environment/bin/pip" install --quiet --disable-pip-version-check "${pins[@]}"
    touch "$environment/ready"
fi
export CUDA_VISIBLE_DEVICES="" HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1
cat >"$scratch/torch_norm_in_the_gradients_type.py" <<'PYTHON'
import math
import torch


def clip(dtype, value, count):
    weights = [torch.nn.Parameter(torch.zeros(count, dtype=dtype)) for _ in range(3)]
    for weight in weights:
        weight.grad = torch.full_like(weight, value)
    true = math.sqrt(sum(weight.grad.double().pow(2).sum().item() for weight in weights))
    norm = torch.nn.utils.clip_grad_norm_(weights, 1.0)
    left = math.sqrt(sum(weight.grad.double().pow(2).sum().item() for weight in weights))
    print(f"{dtype}: true norm {true:.2f}, returned {norm.item():.2f} ({norm.dtype}), left {left:.4f}")
    return true, norm.item(), left


true, norm, left = clip(torch.bfloat16, 1 / 7, 1_000_000)
assert abs(norm / true - 1) > 0.003 and abs(left - 1) > 0.002
true, norm, left = clip(torch.float16, 2000.0, 4000)
assert math.isfinite(true) and norm == math.inf and left == 0
true, norm, left = clip(torch.float32, 1 / 7, 1_000_000)
assert abs(norm / true - 1) < 1e-3
PYTHON
cd "$scratch" && "$environment/bin/python" -W ignore torch_norm_in_the_gradients_type.py
