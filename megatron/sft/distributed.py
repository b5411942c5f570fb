"""mcore. Starts and ends the process groups, by NCCL on GPUs and by gloo on CPU."""

from __future__ import annotations

import os
import re
import socket
import threading
import time
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from importlib.util import find_spec
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from torch.distributed.distributed_c10d import _set_pg_timeout
from torch.distributed.rendezvous import rendezvous

from megatron.packing.device import CPU, Device
from megatron.packing.flags import flag_of
from megatron.packing.quoting import shown
from megatron.packing.versions import package_version
from megatron.sft.agreement import AgreedError, check_agreement, differences, gathered
from megatron.sft.environment import keep_launch_order, local_rank, world_from_environment
from megatron.sft.model import cpu_support, mcore_fixes
from megatron.sft.options.config import SFTConfig

_ANSWER_SECONDS = 30.0
"""Maximum wait for the store. One that does not answer by then is an error."""
_PACKAGES = ("torch", "megatron-core", "megatron-sft", "numpy")
_KERNELS = {
    "transformer_engine": "transformer-engine",
    "triton": "triton",
    "flash_attn": "flash-attn-4",
    "fla": "flash-linear-attention",
}
"""Modules whose presence decides layers and kernels, and the packages that bring them."""


@contextmanager
def process_groups(
    config: SFTConfig,
    read: Mapping[str, str] | None = None,
    store: dist.Store | None = None,
) -> Iterator[Device]:
    """Makes megatron-core's groups for the parallel layout and seeds random states; yields this
    rank's device. Raises AgreedError unless all ranks have the same options, versions and files.

    Args:
        read: fingerprints of the files that this rank reads.
        store: store at which all ranks met; by default they meet here (see `meet`).
    """
    rank, world_size = world_from_environment()
    if config.training.deterministic_mode:
        use_deterministic_kernels()
    if max(config.parallel.tensor_model_parallel_size, config.parallel.context_parallel_size) > 1:
        keep_launch_order()
    device = _device()
    mcore_fixes.install()
    cpu_support.install()
    timeout = timedelta(minutes=config.parallel.distributed_timeout_minutes)
    store = meet(rank, world_size, timeout) if store is None else store
    _check_gpus(device, rank, world_size, store)
    backend = "nccl" if device.is_gpu else "gloo"
    dist.init_process_group(backend, rank=rank, world_size=world_size, store=store, timeout=timeout)
    # Files come first: other records are other numbers of steps, too.
    # Before groups are made: ranks with other options would wait in other groups.
    check_agreement({**(read or {}), **_options_and_versions(config)})
    _warn_of_other_ranks(device)
    make_groups(config)
    # As Megatron seeds: stages differ, so that their layers do.
    # Data-parallel, tensor and context ranks of a stage share it: what they hold alike must start
    # alike.
    seed = config.training.seed + 100 * parallel_state.get_pipeline_model_parallel_rank()
    torch.manual_seed(seed)
    tensor_parallel.model_parallel_cuda_manual_seed(seed)
    yield device
    # Not after an error: others may be in a collective, and this rank would wait for them instead
    # of ending the job.
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


def use_deterministic_kernels() -> None:
    """Lets torch, cuBLAS, NCCL and Transformer Engine add up in the same order each time, for the
    rest of the process. Before CUDA is used. torch then raises an error for an operation that has
    no such kernel.
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    os.environ.setdefault("NCCL_ALGO", "Ring")
    os.environ.setdefault("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "0")
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # it is read by nothing


def meet(rank: int, world_size: int, timeout: timedelta) -> dist.Store:
    """Returns the store at which all ranks meet: torchrun's, or that of rank 0 without torchrun.
    Raises ValueError if there is none.
    """
    if "MASTER_ADDR" not in os.environ:
        if world_size > 1:
            raise ValueError(
                f"WORLD_SIZE is {world_size}, but MASTER_ADDR is not set in the environment; set "
                "MASTER_ADDR and MASTER_PORT to where rank 0 shall listen, or start with torchrun"
            )
        return dist.HashStore()
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        store: dist.Store = next(iter(rendezvous("env://", rank, world_size, timeout=timeout)))[0]
        # torchrun keeps it over --max-restarts, with the addresses of ranks that are gone.
        return dist.PrefixStore(f"attempt {os.environ['TORCHELASTIC_RESTART_COUNT']}", store)
    address, port = os.environ["MASTER_ADDR"], os.environ.get("MASTER_PORT", "")
    if not re.fullmatch("[0-9]{1,5}", port):
        raise ValueError(
            f"MASTER_PORT must be the number of a port, but is {shown(port)} in the environment; "
            "set it alike on all ranks, or start with torchrun"
        )
    return _store_of_first(rank, world_size, (address, int(port)), timeout)


def _store_of_first(
    rank: int, world_size: int, place: tuple[str, int], timeout: timedelta
) -> dist.Store:
    """Returns the store that rank 0 keeps, where no launcher does; ValueError on each rank where
    something else listens there, before the timeout.
    """
    made: list[dist.Store | Exception] = []

    def make() -> None:
        try:
            made.append(
                dist.TCPStore(*place, world_size, rank == 0, timeout, wait_for_workers=False)
            )
        except (dist.DistError, RuntimeError) as error:
            made.append(error)

    if rank != 0:
        _wait_for_listener(place, timeout)
    # In a thread, as torch waits for ever for an answer of what is no store.
    thread = threading.Thread(target=make, name="store", daemon=True)
    thread.start()
    thread.join(_ANSWER_SECONDS)
    if not made or isinstance(made[0], Exception):
        cause = f" ({' '.join(str(made[0]).split()):.200})" if made else ""
        fault = "rank 0 cannot listen"
        if rank != 0:
            fault = "rank 0 has ended, or something else listens"
        raise ValueError(
            f"{fault} at port {place[1]} of {place[0]}{cause}; see the log of rank 0, or set "
            "another MASTER_PORT on all ranks"
        )
    return made[0]


def _wait_for_listener(place: tuple[str, int], timeout: timedelta) -> None:
    end = time.monotonic() + timeout.total_seconds()
    while True:
        try:
            socket.create_connection(place, timeout=_ANSWER_SECONDS).close()
            return
        except OSError as error:
            if time.monotonic() > end:
                raise ValueError(
                    f"rank 0 does not listen at port {place[1]} of {place[0]} ({error}); start it, "
                    "or set MASTER_ADDR and MASTER_PORT to where it is"
                ) from None
        time.sleep(0.1)


def make_groups(config: SFTConfig) -> None:
    """Makes megatron-core's groups for the parallel layout. The default group exists already."""
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


def _options_and_versions(config: SFTConfig) -> dict[str, Any]:
    options = {
        flag_of(name): value for group in config.to_dict().values() for name, value in group.items()
    }
    versions = {name: package_version(name) for name in _PACKAGES}
    kernels = {
        name: "not installed" if find_spec(module) is None else package_version(name)
        for module, name in _KERNELS.items()
    }
    return options | versions | kernels


def _warn_of_other_ranks(device: Device) -> None:
    """Warns of what makes some ranks slower than others; collective. Only rank 0 shows warnings."""
    if device.is_gpu:
        own = {"GPU": device.name, "fault of Triton": device.triton_fault}
        for difference in differences(gathered(own)):
            warnings.warn(f"the slowest rank sets the speed: {difference}", stacklevel=2)


def _device() -> Device:
    if not torch.cuda.is_available():
        return CPU
    num_gpus = torch.cuda.device_count()
    # A single visible GPU, as by `srun --gpus-per-task=1` or Ray, is this process's own.
    index = local_rank() if num_gpus > 1 else 0
    if index >= num_gpus:
        raise ValueError(
            f"local rank {index} has no GPU: this machine has {num_gpus}; start torchrun with "
            f"--nproc-per-node {num_gpus}"
        )
    torch.cuda.set_device(index)
    return Device("cuda", index)


def _check_gpus(device: Device, rank: int, world_size: int, store: dist.Store) -> None:
    """Raises AgreedError unless each rank has a GPU of its own, or none has one. The store
    compares them, since no collective could: NCCL fails for ranks that share a GPU.
    """
    own = str(torch.cuda.get_device_properties(device.place).uuid) if device.is_gpu else "-"
    store.set(f"gpu {rank}", own)
    gpus = store.multi_get([f"gpu {number}" for number in range(world_size)])  # type: ignore[attr-defined]  # waits for all
    if set(gpus) == {b"-"}:
        return
    for number, gpu in enumerate(gpus):
        if gpu == b"-":
            raise AgreedError(
                f"rank {number} finds no GPU, but others do; see nvidia-smi on its machine, or set "
                "CUDA_VISIBLE_DEVICES= on all ranks to train on CPUs"
            )
        if (first := gpus.index(gpu)) != number:
            raise AgreedError(
                f"ranks {first} and {number} have the same GPU ({gpu.decode()}); start one process "
                "per GPU, and set LOCAL_RANK to its number on its machine, or let it see one GPU"
            )
