#!/usr/bin/env bash
# torch 2.13.0, gloo: reduce to rank 0 overwrites a part of the other ranks' tensors.
#
# Guess: on ranks other than the destination the tensor is an input and stays as it is.
# Seen: a part of the tensor of rank 1 holds the sum, the rest its own values: whoever reads it
#   later reads half of each.
# Here: nothing calls reduce, and tests of ranks spoil what it leaves
#   (tests/functional_tests/gloo_guard.py).
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
cat >"$scratch/gloo_reduce_other_ranks.py" <<'PYTHON'
import os
import torch
import torch.distributed as dist
import torch.multiprocessing as processes


def rank_main(rank, results):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29633")
    dist.init_process_group("gloo", rank=rank, world_size=2)
    values = torch.full((4,), float(rank + 1))
    dist.reduce(values, 0)
    results[rank] = values.tolist()
    dist.barrier()


if __name__ == "__main__":
    with processes.Manager() as manager:
        results = manager.dict()
        processes.spawn(rank_main, (results,), nprocs=2)
        results = dict(results)
    print("rank 0", results[0], "rank 1, whose values were 2", results[1])
    assert results[0] == [3, 3, 3, 3]
    assert results[1] == [2, 2, 3, 3]
PYTHON
cd "$scratch" && "$environment/bin/python" -W ignore gloo_reduce_other_ranks.py
