#!/usr/bin/env bash
# torch 2.13.0, gloo: an element's sum over 16 ranks depends on how long its tensor is.
#
# Guess: all_reduce adds the ranks' values of an element in one order; what else is in the tensor has
#   no part in it.
# Seen: a tensor is cut into a piece for each rank, and the piece's place decides which rank is added
#   first. Of 1,000 float32 sums some 650 have other bits if zeros are appended to the tensor. All
#   ranks have the same bits. Buckets of another size, or one more weight, change the gradients of
#   all the others in the last digit.
# Here: one size of buckets for a layout; across layouts numbers are compared to rounding.
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
cat >"$scratch/gloo_sums_by_length.py" <<'PYTHON'
import os
import torch
import torch.distributed as dist
import torch.multiprocessing as processes

RANKS = 16


def rank_main(rank, results):
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29641")
    dist.init_process_group("gloo", rank=rank, world_size=RANKS)
    values = torch.randn(1000, generator=torch.Generator().manual_seed(rank))
    sums = []
    for length in (1000, 1000, 5000, 100_000):
        longer = torch.cat([values, torch.zeros(length - 1000)])
        dist.all_reduce(longer)
        sums.append(longer[:1000].clone())
    everywhere = [torch.empty(1000) for _ in range(RANKS)]
    dist.all_gather(everywhere, sums[0])
    alike = all(torch.equal(everywhere[0], other) for other in everywhere)
    if rank == 0:
        results["other bits"] = [int((sums[0] != other).sum()) for other in sums[1:]]
        results["the same on all ranks"] = alike
    dist.barrier()


if __name__ == "__main__":
    with processes.Manager() as manager:
        results = manager.dict()
        processes.start_processes(rank_main, (results,), nprocs=RANKS, start_method="fork")
        results = dict(results)
    print("of 1,000 sums, with 0, 4,000 and 99,000 zeros behind:", results)
    again, longer, longest = results["other bits"]
    assert again == 0 and longer > 300 and longest > 300 and results["the same on all ranks"]
PYTHON
cd "$scratch" && "$environment/bin/python" -W ignore gloo_sums_by_length.py
