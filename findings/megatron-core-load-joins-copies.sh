#!/usr/bin/env bash
# megatron-core 0.16.1: a checkpoint is read into the run's own tensors, but not those with SwiGLU.
#
# Guess: dist_checkpointing.load reads into the tensors of the state that it is given, so that a run
#   that fits can also be continued.
# Seen: gate and up projection are read into their halves of the run's tensor, and then joined in new
#   memory; all of a state's new tensors exist at once: weights, main weights and both moments of the
#   largest layers, 14 bytes a weight.
# Here: halves that were read in place are not joined (megatron/sft/model/checkpoints/shares.py).
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
cat >"$scratch/megatron_core_load_joins_copies.py" <<'PYTHON'
import os
import tempfile
import torch
import torch.distributed as dist


def main():
    store = tempfile.mktemp()
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    from megatron.core import dist_checkpointing, parallel_state

    parallel_state.initialize_model_parallel()
    torch.cuda.synchronize, torch.cuda.current_device = lambda: None, lambda: "cpu"  # no GPU here
    from megatron.core.dist_checkpointing import ShardedTensor
    from megatron.core.transformer.mlp import apply_swiglu_sharded_factory

    def state():
        whole, first_layer = torch.ones(8, 4), torch.ones(16, 4)
        joined = ShardedTensor.from_rank_offsets("first_layer", first_layer)
        return {
            "whole": ShardedTensor.from_rank_offsets("whole", whole),
            "first_layer": apply_swiglu_sharded_factory(joined, ()),
        }

    folder = tempfile.mkdtemp()
    dist_checkpointing.save(state(), folder)
    asked = state()
    held = {name: entry.data for name, entry in asked.items()}
    loaded = dist_checkpointing.load(asked, folder)
    in_place = {name: loaded[name].data_ptr() == held[name].data_ptr() for name in held}
    print(f"loaded in the memory that was given: {in_place}")
    assert in_place == {"whole": True, "first_layer": False}


if __name__ == "__main__":
    main()
PYTHON
cd "$scratch" && "$environment/bin/python" -W ignore megatron_core_load_joins_copies.py
