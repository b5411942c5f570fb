#!/usr/bin/env bash
# torch 2.13.0: whether tokens meet a frozen weight as one matrix is decided by strides that have no effect.
#
# Guess: matmul of [tokens, 1, width] with a weight [width, out] is one product of matrices.
# Seen: where the dimension of size 1 has the stride of a transposed batch, and the weight takes
#   no gradient (LoRA), it is bmm of one product per token with the weight expanded: several times
#   as slow, and rounded otherwise. A weight with a gradient, and the same numbers with other
#   strides, are mm. Embeddings of one pack transposed to [tokens, 1, width] have such strides.
# Here: tokens are made one matrix before each weight; a test counts bmm (docs/LOG.md).
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
cat >"$scratch/torch_frozen_weight_by_strides.py" <<'PYTHON'
import torch

values = torch.randn(1, 64, 32)
found = {}
for is_frozen in (True, False):
    for name, tokens in (("transposed", values.transpose(0, 1)), ("copied", values.reshape(64, 1, 32))):
        weight = torch.randn(32, 16, requires_grad=not is_frozen)
        tokens = tokens.detach().requires_grad_()
        with torch.profiler.profile() as profile:
            tokens @ weight
        names = {event.key for event in profile.key_averages()}
        found[is_frozen, name] = sorted(names & {"aten::mm", "aten::bmm"})
        print("frozen" if is_frozen else "trained", name, tokens.stride(), found[is_frozen, name])
assert found[True, "transposed"] == ["aten::bmm"]
assert found[True, "copied"] == found[False, "transposed"] == found[False, "copied"] == ["aten::mm"]
PYTHON
cd "$scratch" && "$environment/bin/python" -W ignore torch_frozen_weight_by_strides.py
