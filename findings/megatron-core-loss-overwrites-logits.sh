#!/usr/bin/env bash
# megatron-core 0.16.1: vocab_parallel_cross_entropy overwrites float32 logits, and leaves bfloat16 ones.
#
# Guess: a loss does not change its input.
# Seen: the maximum is subtracted in place from logits.float(), which is a copy of bfloat16 logits
#   and the very tensor of float32 ones. Log-probabilities of the chosen tokens, entropies and
#   z-losses that are computed from the logits after the loss are other ones in float32, and right
#   in bfloat16; argmax and softmax are right in both, so that accuracy does not show it.
# Here: the loss has its own kernels (megatron/packing/model/loss); logits are not read after it.
set -euo pipefail
pins=(torch==2.13.0 numpy==2.4.6 packaging==25.0 psutil==7.0.0 megatron-core==0.16.1)
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
environment=${FINDINGS_CACHE:-$scratch}/$(IFS=+; echo "${pins[*]}")
if [ ! -e "$environment/ready" ]; then
    python3 -m venv "$environment"
    "$environment/bin/pip" install --quiet --disable-pip-version-check "${pins[@]}"
    touch "$environment/ready"
fi
export CUDA_VISIBLE_DEVICES="" HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1
cat >"$scratch/megatron_core_loss_overwrites_logits.py" <<'PYTHON'
import os
import tempfile
import torch
import torch.distributed as dist

store = tempfile.mktemp()
dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
from megatron.core import parallel_state

parallel_state.initialize_model_parallel()

from megatron.core.tensor_parallel.cross_entropy import vocab_parallel_cross_entropy

moved = {}
for dtype in (torch.float32, torch.bfloat16):
    torch.manual_seed(1)
    logits = (torch.randn(4, 1, 16) + 3).to(dtype)
    before = logits.clone()
    vocab_parallel_cross_entropy(logits, torch.arange(4)[:, None])
    moved[dtype] = (logits - before).abs().max().item()
print("logits moved by", moved)
assert moved[torch.float32] > 1 and moved[torch.bfloat16] == 0
PYTHON
cd "$scratch" && "$environment/bin/python" -W ignore megatron_core_loss_overwrites_logits.py
