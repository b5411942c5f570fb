"""mcore. Start and end the process groups: NCCL where CUDA is, gloo elsewhere, by the same command."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from torch.distributed.distributed_c10d import _set_pg_timeout

from megatron.sft.environment import world_from_environment
from megatron.sft.model import cpu_support, mcore_fixes
from megatron.sft.options.config import SFTConfig


@contextmanager
def process_groups(config: SFTConfig) -> Iterator[torch.device]:
    """Makes megatron-core's groups for the layout and seeds random states; yields this rank's device."""
    rank, world_size = world_from_environment()
    device = _device()
    mcore_fixes.install()
    cpu_support.install()
    store = None if "MASTER_ADDR" in os.environ else dist.HashStore()
    dist.init_process_group(
        backend="nccl" if device.type == "cuda" else "gloo",
        rank=rank,
        world_size=world_size,
        store=store,
        timeout=timedelta(minutes=config.parallel.distributed_timeout_minutes),
    )
    make_groups(config)
    # As Megatron seeds: stages differ, so that their layers do.
    seed = config.training.seed + 100 * parallel_state.get_pipeline_model_parallel_rank()
    torch.manual_seed(seed)
    tensor_parallel.model_parallel_cuda_manual_seed(seed)
    yield device
    # Not after an error: others may be in a collective, and this rank would wait for them instead of ending the job.
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


def make_groups(config: SFTConfig) -> None:
    """Makes megatron-core's groups for the layout of `config`; the default group exists."""
    parallel = config.parallel
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=parallel.tensor_model_parallel_size,
        pipeline_model_parallel_size=parallel.pipeline_model_parallel_size,
        virtual_pipeline_model_parallel_size=config.num_virtual_stages,
        context_parallel_size=parallel.context_parallel_size,
        expert_model_parallel_size=parallel.expert_model_parallel_size,
        expert_tensor_parallel_size=1 if config.model.num_experts is not None else None,
        distributed_timeout_minutes=parallel.distributed_timeout_minutes,  # type: ignore[arg-type]  # any number
        order="tp-cp-ep-pp-dp" if parallel.use_tp_pp_dp_mapping else "tp-cp-ep-dp-pp",
    )
    # The one group that megatron-core 0.16 makes with torch's own 30 minutes.
    timeout = timedelta(minutes=parallel.distributed_timeout_minutes)
    _set_pg_timeout(timeout, parallel_state.get_expert_data_parallel_group_gloo())


def _device() -> torch.device:
    if not torch.cuda.is_available():
        return torch.device("cpu")
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    if local_rank >= torch.cuda.device_count():
        raise RuntimeError(
            f"local rank {local_rank} has no GPU: this machine has {torch.cuda.device_count()}; "
            f"start torchrun with --nproc-per-node {torch.cuda.device_count()}"
        )
    torch.cuda.set_device(local_rank)
    return torch.device("cuda", local_rank)
