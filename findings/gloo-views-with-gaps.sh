#!/usr/bin/env bash
# torch 2.13.0, gloo: all_reduce and broadcast of a strided view change the elements between.
#
# Guess: a view with gaps (every second element) is reduced or received like any tensor, or
#   refused, as send and all_to_all_single refuse it.
# Seen: all_reduce and broadcast take numel elements from the view's first one in memory:
#   neighbours that belong to nobody's view are summed and overwritten, elements of the view at
#   the end are not touched, and nothing is raised. all_gather of the same view is right. A
#   transposed matrix is received in the order of memory.
# Here: tests of ranks refuse such tensors (tests/functional_tests/gloo_guard.py).
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
cat >"$scratch/gloo_views_with_gaps.py" <<'PYTHON'
import os
import torch
import torch.distributed as dist
import torch.multiprocessing as processes


def rank_main(rank, results):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29631")
    dist.init_process_group("gloo", rank=rank, world_size=2)
    row = torch.arange(8.0) + 10 * rank
    dist.all_reduce(row[::2])
    results[f"all_reduce {rank}"] = row.tolist()
    row = torch.arange(8.0) + 10 * rank
    dist.broadcast(row[::2], 0)
    results[f"broadcast {rank}"] = row.tolist()
    pieces = [torch.zeros(4), torch.zeros(4)]
    dist.all_gather(pieces, (torch.arange(8.0) + 10 * rank)[::2])
    results[f"all_gather {rank}"] = [piece.tolist() for piece in pieces]
    matrix = torch.arange(6.0).view(2, 3).t() if rank == 0 else torch.zeros(3, 2)
    dist.broadcast(matrix, 0)
    results[f"transposed {rank}"] = matrix.tolist()
    dist.barrier()


if __name__ == "__main__":
    with processes.Manager() as manager:
        results = manager.dict()
        processes.spawn(rank_main, (results,), nprocs=2)
        results = dict(results)
    for name in sorted(results):
        print(name, results[name])
    # Right would be [10, 1, 14, 3, 18, 5, 22, 7] on rank 0: elements 0, 2, 4, 6 summed.
    assert results["all_reduce 0"] == [10, 12, 14, 16, 4, 5, 6, 7]
    assert results["all_reduce 1"] == [10, 12, 14, 16, 14, 15, 16, 17]
    # Right would be [0, 11, 2, 13, 4, 15, 6, 17].
    assert results["broadcast 1"] == [0, 1, 2, 3, 14, 15, 16, 17]
    assert results["all_gather 1"] == [[0, 2, 4, 6], [10, 12, 14, 16]]
    assert results["transposed 0"] == [[0, 3], [1, 4], [2, 5]]
    assert results["transposed 1"] == [[0, 1], [2, 3], [4, 5]]
PYTHON
cd "$scratch" && "$environment/bin/python" -W ignore gloo_views_with_gaps.py
