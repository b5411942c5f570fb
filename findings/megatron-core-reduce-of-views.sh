#!/usr/bin/env bash
# megatron-core 0.16.1: the sum over tensor-parallel ranks of a gradient that is a view is lost.
#
# Guess: the backward pass of copy_to_tensor_model_parallel_region gives every rank the sum of the
#   ranks' gradients, whatever the gradient's strides are; or a view is refused.
# Seen: a contiguous gradient is summed in place. Of a transposed one a contiguous copy is summed and
#   thrown away: each rank gets its own gradient back, as if it were alone. No error, no warning, and
#   a sum over the parts of a gradient shows nothing where ranks agree. The forward pass of
#   reduce_from_tensor_model_parallel_region does the same with its input. In 0.19.2 the copy is
#   returned.
# Here: what ranks share for their own heads gets its gradient contiguous before it is summed
#   (shared_by_ranks of megatron/packing/model/layers/shared_inputs.py).
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
export CUDA_VISIBLE_DEVICES="" OMP_NUM_THREADS=1
cat >"$scratch/reduce_of_views.py" <<'PYTHON'
import os
import torch
import torch.distributed as dist
import torch.multiprocessing as processes


def rank_main(rank, results):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29653")
    dist.init_process_group("gloo", rank=rank, world_size=2)
    from megatron.core.tensor_parallel import mappings

    group = dist.group.WORLD
    for name, is_view in (("contiguous", False), ("transposed", True)):
        gradient = torch.full((3, 2), float(rank + 1))
        gradient = gradient.t() if is_view else gradient.t().contiguous()
        x = torch.zeros(2, 3, requires_grad=True)
        mappings.copy_to_tensor_model_parallel_region(x, group).backward(gradient)
        results[f"backward {name}", rank] = x.grad.unique().tolist()
        given = torch.full((3, 2), float(rank + 1))
        given = given.t() if is_view else given.t().contiguous()
        out = mappings.reduce_from_tensor_model_parallel_region(given, group)
        results[f"forward {name}", rank] = out.unique().tolist()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    with processes.Manager() as manager:
        found = manager.dict()
        processes.spawn(rank_main, (found,), nprocs=2)
        found = dict(found)
    for key, values in sorted(found.items()):
        print(*key, values)
    for way in ("backward", "forward"):
        assert found[f"{way} contiguous", 0] == found[f"{way} contiguous", 1] == [3.0]
        assert found[f"{way} transposed", 0] == [1.0]
        assert found[f"{way} transposed", 1] == [2.0]
PYTHON
"$environment/bin/python" -W ignore "$scratch/reduce_of_views.py" 2>&1 | grep -v -i warn
echo "as stated"
