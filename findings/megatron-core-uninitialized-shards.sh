#!/usr/bin/env bash
# megatron-core 0.16.1: weights that are not initialized are not marked as shards of tensor parallel.
#
# Guess: perform_initialization=False, for weights that are read from files, only saves the time
#   of drawing numbers.
# Seen: the function that draws also sets tensor_model_parallel and partition_dim. Without it each
#   rank but the first of a tensor-parallel group is taken for a copy: the norm of gradients
#   counts one rank's part of every such weight. No error.
# Here: weights are marked when they are built (build.mark_shards,
#   tests/functional_tests/test_hf_training.py).
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
cat >"$scratch/megatron_core_uninitialized_shards.py" <<'PYTHON'
import os
import tempfile
import torch
import torch.distributed as dist

store = tempfile.mktemp()
dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
from megatron.core import parallel_state

parallel_state.initialize_model_parallel()

from megatron.core.tensor_parallel import ColumnParallelLinear
from megatron.core.tensor_parallel.layers import param_is_not_tensor_parallel_duplicate
from megatron.core.transformer import TransformerConfig

marked = {}
for draws in (True, False):
    config = TransformerConfig(
        num_layers=1, hidden_size=8, num_attention_heads=2, use_cpu_initialization=True,
        perform_initialization=draws,
    )
    weight = ColumnParallelLinear(
        8, 8, config=config, init_method=config.init_method, bias=False, skip_bias_add=False
    ).weight
    marked[draws] = getattr(weight, "tensor_model_parallel", False)
    print(f"perform_initialization={draws}: a shard of tensor parallel: {marked[draws]}")
assert marked == {True: True, False: False}
assert param_is_not_tensor_parallel_duplicate(weight)  # of rank 0 alone, here
PYTHON
cd "$scratch" && "$environment/bin/python" -W ignore megatron_core_uninitialized_shards.py
