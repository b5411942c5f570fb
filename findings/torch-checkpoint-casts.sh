#!/usr/bin/env bash
# torch 2.13.0: torch.distributed.checkpoint refuses other shapes, and converts other types in silence.
#
# Guess: a tensor whose type is not the saved one is refused, as one of another shape is; or
#   converted with a warning.
# Seen: float32 goes into whatever tensor is given: 3e38 is inf in float16, 1.7 is 1 in int32, 300
#   is 44 in uint8. Nothing is said. Lists are no tensors: of four given items and three saved
#   ones three come back.
# Here: another precision is loaded on purpose; whether a run had --bf16 is recorded with its
#   options (megatron/sft/model/checkpoints/content.py).
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
cat >"$scratch/torch_checkpoint_casts.py" <<'PYTHON'
import torch
import torch.distributed.checkpoint as checkpoint

checkpoint.save(
    {"weight": torch.tensor([1.7, 300.0, 3e38]), "counts": [1, 2, 3]}, checkpoint_id="saved", no_dist=True
)
found = {}
for dtype in (torch.float16, torch.int32):
    state = {"weight": torch.zeros(3, dtype=dtype)}
    checkpoint.load(state, checkpoint_id="saved", no_dist=True)
    found[dtype] = state["weight"].tolist()
state = {"counts": [0, 0, 0, 9]}
checkpoint.load(state, checkpoint_id="saved", no_dist=True)
print(found, state)
assert found[torch.float16][2] == float("inf")
assert found[torch.int32][:2] == [1, 300]
assert state["counts"] == [1, 2, 3]
PYTHON
cd "$scratch" && "$environment/bin/python" -W ignore torch_checkpoint_casts.py
