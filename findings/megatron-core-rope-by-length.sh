#!/usr/bin/env bash
# megatron-core 0.16.1: rope of a pack runs on over sequences if as many frequencies as tokens are given.
#
# Guess: frequencies longer than needed are harmless: each sequence of a pack takes its first ones
#   and starts at position 0.
# Seen: where the number of frequencies equals cu_seqlens[-1] exactly, as in a pack whose
#   max_seqlen is given as the pack's length, positions run on from one sequence to the next; with
#   one more or one less they restart. Plain rope is relative, so a loss moves by rounding alone;
#   scales that grow with position, and caches of keys, do not forgive it.
# Here: rotary angles are made per sequence once a microbatch
#   (megatron/packing/model/attention/rotary.py).
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
cat >"$scratch/megatron_core_rope_by_length.py" <<'PYTHON'
import os
import torch
import torch.distributed as dist
from megatron.core.models.common.embeddings.rope_utils import _apply_rotary_pos_emb_thd

os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29634")
dist.init_process_group("gloo", rank=0, world_size=1)
cu_seqlens = torch.tensor([0, 5, 8], dtype=torch.int32)
angles = torch.outer(torch.arange(32.0), 1 / 10000 ** (torch.arange(0, 8, 2) / 8))
frequencies = torch.cat([angles, angles], -1)[:, None, None]
queries = torch.ones(8, 1, 8)


def restarts(num_frequencies):
    """Returns whether the second sequence begins like the first one, at position 0."""
    rotated = _apply_rotary_pos_emb_thd(
        queries, cu_seqlens, frequencies[:num_frequencies], cp_group=dist.group.WORLD
    )
    return torch.equal(rotated[5], rotated[0])


restarts_by_count = {count: restarts(count) for count in (5, 7, 8, 9, 32)}
print("frequencies given -> positions restart:", restarts_by_count)
assert restarts_by_count == {5: True, 7: True, 8: False, 9: True, 32: True}
dist.destroy_process_group()
PYTHON
cd "$scratch" && "$environment/bin/python" -W ignore megatron_core_rope_by_length.py
