#!/usr/bin/env bash
# megatron-core 0.16.1: a label of -100, or beyond the vocabulary, is trained, as a word whose logit is 0.
#
# Guess: -100 is ignored, as by torch's cross_entropy, and a label beyond the vocabulary raises.
# Seen: both have the loss logsumexp(logits) - 0 after the maximum is taken off, and a gradient
#   that is the softmax: all words are pushed down. Data whose labels hold -100 trains with a
#   finite loss unless each of them also has loss_mask 0; a label beyond the rows of the
#   embeddings is not found out.
# Here: labels must be the ids beside them or -100, which has weight 0
#   (megatron/sft/data/records/token_ids.py).
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
cat >"$scratch/megatron_core_labels_outside.py" <<'PYTHON'
import os
import tempfile
import torch
import torch.distributed as dist

store = tempfile.mktemp()
dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
from megatron.core import parallel_state

parallel_state.initialize_model_parallel()

from megatron.core.tensor_parallel.cross_entropy import vocab_parallel_cross_entropy

torch.manual_seed(1)
values = torch.randn(3, 1, 16)
logits = values.clone().requires_grad_()
losses = vocab_parallel_cross_entropy(logits * 1.0, torch.tensor([[3], [-100], [99]]))
losses.sum().backward()
expected = values.logsumexp(-1) - values.max(-1).values
print("labels 3, -100, 99: losses", [round(x, 4) for x in losses.flatten().tolist()])
print("sums of gradients over the vocabulary", logits.grad.sum(-1).flatten().tolist())
assert torch.allclose(losses[1:], expected[1:])
assert torch.allclose(logits.grad.sum(-1).flatten(), torch.tensor([0.0, 1.0, 1.0]), atol=1e-6)
PYTHON
cd "$scratch" && "$environment/bin/python" -W ignore megatron_core_labels_outside.py
