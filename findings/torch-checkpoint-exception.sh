#!/usr/bin/env bash
# torch 2.13.0: what torch.distributed.checkpoint raises is no Exception.
#
# Guess: a checkpoint that does not fit raises a ValueError or RuntimeError, which `except
#   Exception` around loading catches, to fall back to an older one.
# Seen: each error of a rank is wrapped into CheckpointException, which derives from
#   BaseException: `except Exception` lets it through, and so do retries of libraries. `except
#   ValueError` does not see the ValueError that is inside.
# Here: caught by what it is (megatron/sft/base_exceptions.py), and told in a line that names the
#   file.
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
cat >"$scratch/torch_checkpoint_exception.py" <<'PYTHON'
import torch
import torch.distributed.checkpoint as checkpoint

checkpoint.save({"weight": torch.zeros(4, 4)}, checkpoint_id="saved", no_dist=True)
caught = []
try:
    try:
        checkpoint.load({"weight": torch.zeros(2, 4)}, checkpoint_id="saved", no_dist=True)
    except Exception as error:
        caught.append(type(error))
except BaseException as error:
    kind = type(error)
    inner = [type(one[0]) for one in error.failures.values()]
    print("except Exception caught", caught, "; it was", kind.__mro__, "around", inner)
assert caught == [] and not issubclass(kind, Exception) and inner == [ValueError]
PYTHON
cd "$scratch" && "$environment/bin/python" -W ignore torch_checkpoint_exception.py
