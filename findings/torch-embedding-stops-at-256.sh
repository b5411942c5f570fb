#!/usr/bin/env bash
# torch 2.13.0, CPU: the gradient of a word in bfloat16 stops growing at 256.
#
# Guess: the embedding's gradient for a token that occurs 10,000 times is right to bfloat16's rounding
#   (0.4 %), as gradients of matrices and norms are, and as they are on a GPU.
# Seen: rows are added one by one in bfloat16. 10,000 ones make 256, as 256 + 1 is 256 there, and
#   2,000 random rows for three words are 2 % off. So it is for weight[ids]; index_select and
#   index_add sum in float32: 9,984, which is 10,000 rounded. The bias of a LayerNorm stops, too.
# Here: on a CPU words are selected by index_select (megatron/sft/model/mcore_fixes.py).
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
cat >"$scratch/torch_embedding_stops_at_256.py" <<'PYTHON'
import torch

ids = torch.full((10_000,), 3)


def gradient(look_up):
    weight = torch.zeros(10, 4, dtype=torch.bfloat16, requires_grad=True)
    look_up(weight).sum().backward()
    return weight.grad[3, 0].item()


counted = {
    "embedding": gradient(lambda weight: torch.nn.functional.embedding(ids, weight)),
    "weight[ids]": gradient(lambda weight: weight[ids]),
    "index_select": gradient(lambda weight: weight.index_select(0, ids)),
}
norm = torch.nn.LayerNorm(4, dtype=torch.bfloat16)
norm(torch.randn(10_000, 4).bfloat16()).sum().backward()
print("gradient of a word that occurs 10,000 times, 1 each:", counted)
print("gradient of LayerNorm's bias over 10,000 tokens:", norm.bias.grad.tolist())
assert counted == {"embedding": 256.0, "weight[ids]": 256.0, "index_select": 9984.0}
assert norm.bias.grad.max() < 1000
PYTHON
cd "$scratch" && "$environment/bin/python" -W ignore torch_embedding_stops_at_256.py
