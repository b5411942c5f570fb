#!/usr/bin/env bash
# torch 2.13.0: to read the state of a new optimizer is counted as its first step.
#
# Guess: torch.distributed.checkpoint.state_dict.get_optimizer_state_dict of an optimizer that has not
#   stepped returns an empty or zero state, and changes nothing.
# Seen: it makes a step with gradients and a learning rate of zero. Weights stay, but AdamW is at step
#   1 from then on: its first real update is 0.74 of what it would be, as moments are corrected for
#   two steps. Hooks of the optimizer's step run, too. A run that saves before its first step trains
#   otherwise than one that does not. A reader of a checkpoint overwrites the state and sees nothing.
# Here: states are saved by megatron-core, which makes none (the first save is after a step).
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
cat >"$scratch/torch_state_dict_makes_a_step.py" <<'PYTHON'
import torch
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict


def first_update(saves_before):
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.0)
    hooks = []
    optimizer.register_step_post_hook(lambda *_: hooks.append(1))
    if saves_before:
        get_optimizer_state_dict(model, optimizer)
    before, hooks_before = model.weight.detach().clone(), len(hooks)
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    return (before - model.weight).max().item(), hooks_before


plain, _ = first_update(False)
after, hooks = first_update(True)
print(f"first update {plain:.4f}; after get_optimizer_state_dict {after:.4f}, and its hooks ran "
      f"{hooks} time")
assert abs(plain - 0.1) < 1e-4 and abs(after - 0.0744) < 1e-3 and hooks == 1
PYTHON
cd "$scratch" && "$environment/bin/python" -W ignore torch_state_dict_makes_a_step.py
