#!/usr/bin/env bash
# megatron-core 0.16.1: override_opt_param_scheduler keeps the checkpoint's peak learning rate.
#
# Guess: a run that is continued with override_opt_param_scheduler=True and another learning rate has
#   that one.
# Seen: the scheduler says 2.0, and the groups stay at 1.0: get_lr takes max_lr and min_lr of a group
#   first, and load_state_dict of the optimizer brings those back from the checkpoint. Decay steps and
#   style do change: half of what was asked for is done, without a warning.
# Here: peak and floor of the groups are those of the options, as a checkpoint is read
#   (megatron/sft/model/checkpoints/content.py).
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
cat >"$scratch/megatron_core_peak_of_the_checkpoint.py" <<'PYTHON'
import tempfile
import torch
import torch.distributed as dist

store = tempfile.mktemp()
dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
from megatron.core import parallel_state, tensor_parallel

parallel_state.initialize_model_parallel()

original = torch.tensor
torch.tensor = lambda *values, device=None, **more: original(*values, **more)  # its scale is on CUDA

from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.transformer import TransformerConfig

tensor_parallel.random.get_cuda_rng_tracker().fork = lambda *_: torch.no_grad()
torch.cuda.current_device = lambda: "cpu"


def run(lr, decay_steps):
    config = TransformerConfig(
        num_layers=1, hidden_size=16, num_attention_heads=2, ffn_hidden_size=24,
        use_cpu_initialization=True,
    )
    model = GPTModel(config, get_gpt_layer_local_spec(), vocab_size=32, max_sequence_length=8)
    wrapped = DistributedDataParallel(config, DistributedDataParallelConfig(), model)
    optimizer = get_megatron_optimizer(OptimizerConfig(optimizer="adam", lr=lr, min_lr=0.0), [wrapped])
    schedule = OptimizerParamScheduler(
        optimizer, init_lr=0.0, max_lr=lr, min_lr=0.0, lr_warmup_steps=0, lr_decay_style="linear",
        lr_decay_steps=decay_steps, start_wd=0.1, end_wd=0.1, wd_incr_steps=20,
        wd_incr_style="constant", use_checkpoint_opt_param_scheduler=False,
        override_opt_param_scheduler=True,
    )
    return optimizer, schedule


optimizer, schedule = run(1.0, 20)
schedule.step(4)
saved = optimizer.state_dict(), schedule.state_dict()
optimizer, schedule = run(2.0, 40)
optimizer.load_state_dict(saved[0])
schedule.load_state_dict(saved[1])
rates = {group["lr"] for group in optimizer.param_groups}
print(f"step 4 with peak 2.0 and 40 steps of decay: {rates}, {2.0 * 36 / 40} was asked for; "
      f"the scheduler's peak {schedule.max_lr}, the groups' "
      f"{[group['max_lr'] for group in optimizer.param_groups]}")
assert schedule.max_lr == 2.0 and schedule.lr_decay_steps == 40
assert rates == {1.0 * 36 / 40}
PYTHON
cd "$scratch" && "$environment/bin/python" -W ignore megatron_core_peak_of_the_checkpoint.py
