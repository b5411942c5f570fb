#!/usr/bin/env bash
# gloo in torch 2.13.0: a transposed tensor is sent in memory's order, and arrives as another matrix.
#
# Guess: collectives see tensors as values of a shape: broadcast of a transposed weight gives
#   every rank its values, or is refused as not contiguous.
# Seen: shapes are compared, strides are not. Rank 0 broadcasts the transpose of a 2 x 3 matrix,
#   rank 1 receives into a contiguous 3 x 2 tensor and holds other values in its places.
#   all_reduce sums w[i, j] of one rank with w[j, i] of another. No error, no warning; sums and
#   norms of the whole agree, so that a checksum does not show it.
# Here: tests of ranks refuse every collective on a tensor that is not contiguous
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
cat >"$scratch/gloo_transposed_tensors.py" <<'PYTHON'
import os
import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def work(rank, store):
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    stored = torch.arange(6.0).reshape(2, 3).t()  # as a layer keeps the transpose of a file's weight
    received = stored if rank == 0 else torch.zeros(3, 2)
    dist.broadcast(received, 0)
    ones = torch.arange(6.0).reshape(2, 3).t()
    total = ones if rank == 0 else ones.contiguous()
    dist.all_reduce(total)
    both = [None, None]
    dist.all_gather_object(both, (received.tolist(), total.tolist()))
    if rank == 0:
        for number, (values, sums) in enumerate(both):
            print(f"rank {number}: broadcast {values}, all_reduce {sums}")
        assert both[0][0] == [[0, 3], [1, 4], [2, 5]]
        assert both[1][0] == [[0, 1], [2, 3], [4, 5]]
        assert [[0, 6], [2, 8], [4, 10]] not in (both[0][1], both[1][1])
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(work, (os.path.abspath("store"),), 2)
PYTHON
cd "$scratch" && "$environment/bin/python" -W ignore gloo_transposed_tensors.py
