"""tensor. `--fit-to-memory`: options with which a run fits into its GPUs, before anything is built.

Rank 0 estimates them in a process of its own, and the other ranks take them over by the store at
which all have met.
"""

from __future__ import annotations

import os
import pickle
from typing import Any

from megatron.packing.device import memory_of_gpu
from megatron.packing.memory_size import parse_memory
from megatron.sft.memory_estimate import Fitted, fitted_options, gib
from megatron.sft.model.needs import host_available
from megatron.sft.options.config import SFTConfig

FOUND = "found"
"""Value of --fit-to-memory for the memory of the GPUs that are here."""
_KEY = "options that fit"
_LIMIT_SECONDS = 300.0
"""Longest time of the estimates; half of --distributed-timeout-minutes if that is less, in which
the other ranks wait.
"""


def fit_to_memory(
    config: SFTConfig, vocab_size: int, rank: int, world_size: int, store: Any = None
) -> SFTConfig:
    """Returns the options that fit into `config.training.fit_to_memory`; those of `config` where it
    is off or no GPU is found, or there is no estimate. Rank 0 prints what it has changed.

    Collective where there is a store.
    """
    if config.training.fit_to_memory == "off":
        return config
    if rank:
        chosen: SFTConfig = pickle.loads(store.get(_KEY))
        return chosen
    memory = _memory(config)
    if memory is not None:
        host = host_available()
        per_rank = None if host is None else host // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        seconds = min(_LIMIT_SECONDS, 30.0 * config.parallel.distributed_timeout_minutes)
        fitted = fitted_options(config, vocab_size, world_size, memory, per_rank, seconds=seconds)
        print(note(fitted, memory), flush=True)
        config = config if fitted.config is None else fitted.config
    if store is not None:
        store.set(_KEY, pickle.dumps(config))
    return config


def _memory(config: SFTConfig) -> int | None:
    """Returns bytes of a GPU; None without one."""
    asked = config.training.fit_to_memory
    if asked != FOUND:
        return parse_memory(asked, "--fit-to-memory")
    return memory_of_gpu(int(os.environ.get("LOCAL_RANK", "0")))


def note(fitted: Fitted, memory: int) -> str:
    """Returns the line for the log."""
    of_gpu = f"GPUs of {gib(memory)} GiB"
    if fitted.failure is not None:
        return f"note: --fit-to-memory: no estimate ({fitted.failure:.200}); options stay as given"
    if not fitted.flags:
        end = "fits" if fitted.needed <= memory else "does not fit, and no option takes less"
        return f"memory: {gib(fitted.needed)} GiB (estimated) of {of_gpu}: {end}"
    line = (
        f"chosen for {of_gpu}: {fitted.flags} ({gib(fitted.needed)} GiB instead of "
        f"{gib(fitted.given)}, estimated); --fit-to-memory off keeps options as given"
    )
    if fitted.needed > memory:
        line += "; it may not fit: take more GPUs, or lower --seq-length"
    return line
