"""pure. What the launcher says, and what a user need not read."""

from __future__ import annotations

import logging
import os
import warnings


def world_from_environment() -> tuple[int, int]:
    """Returns (rank, world size) as torchrun says; (0, 1) for a plain `python pretrain_sft.py`."""
    return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


def local_rank() -> int:
    """Returns this rank's number on its machine."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def default_num_workers() -> int:
    """Returns how many processes read for each rank: its share of the cores, but for one that computes and one that
    prepares batches; at most 4.
    """
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return max(0, min(4, len(os.sched_getaffinity(0)) // ranks - 2))


def quiet(rank: int) -> None:
    """Keeps megatron-core's and torch's import-time notices out of the log; errors stay, from every rank."""
    for notice in ("Apex is not installed", "transformer_engine", "Transformer Engine", "FutureWarning", "fused Adam"):
        warnings.filterwarnings("ignore", message=f".*{notice}.*")
    warnings.filterwarnings("ignore", category=FutureWarning)
    warnings.filterwarnings("ignore", module=r"megatron\.core.*|torch\.distributed.*")
    if rank != 0:
        warnings.simplefilter("ignore")
    logging.getLogger("megatron.core").setLevel(logging.ERROR)
