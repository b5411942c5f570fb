#!/usr/bin/env bash
# torch 2.13.0, gloo: MAX over ranks loses a NaN or keeps it, by the rank that has it.
#
# Guess: a NaN on any rank is in the maximum, as in torch.maximum; or is never, as in torch.fmax.
# Seen: of two ranks, a NaN of rank 0 is in the result of both ranks, a NaN of rank 1 in none: a
#   check such as all_reduce(MAX) of losses sees half of the failures. MIN does the same.
# Here: losses are summed, and a NaN survives a sum (megatron/sft/training/finite.py); tests of
#   ranks refuse MAX and MIN of a NaN (tests/functional_tests/gloo_guard.py).
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
cat >"$scratch/gloo_max_of_nan.py" <<'PYTHON'
import math
import os
import torch
import torch.distributed as dist
import torch.multiprocessing as processes


def rank_main(rank, results):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29632")
    dist.init_process_group("gloo", rank=rank, world_size=2)
    for operation in (dist.ReduceOp.MAX, dist.ReduceOp.MIN):
        # Position 0 is NaN on rank 0 alone, position 1 on rank 1 alone.
        values = torch.tensor([math.nan if rank == position else 1.0 for position in range(2)])
        dist.all_reduce(values, op=operation)
        results[f"{operation} {rank}"] = [math.isnan(value) for value in values.tolist()]
    dist.barrier()


if __name__ == "__main__":
    with processes.Manager() as manager:
        results = manager.dict()
        processes.spawn(rank_main, (results,), nprocs=2)
        results = dict(results)
    print("NaN of rank 0, NaN of rank 1 in the result:", results)
    assert all(kept == [True, False] for kept in results.values()), results
PYTHON
cd "$scratch" && "$environment/bin/python" -W ignore gloo_max_of_nan.py
