"""pure. What the launcher says, and what a user need not read."""

from __future__ import annotations

import logging
import os
import warnings


def world_from_environment() -> tuple[int, int]:
    """Returns (rank, world size) as torchrun says; (0, 1) without a launcher."""
    return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


def local_rank() -> int:
    """Returns this rank's number on its machine."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def quiet(rank: int) -> None:
    """Keeps megatron-core's and torch's import-time notices out of the log; errors stay, from every rank."""
    for notice in ("Apex is not installed", "transformer_engine", "Transformer Engine", "FutureWarning", "fused Adam"):
        warnings.filterwarnings("ignore", message=f".*{notice}.*")
    warnings.filterwarnings("ignore", category=FutureWarning)
    warnings.filterwarnings("ignore", module=r"megatron\.core.*|torch\.distributed.*")
    if rank != 0:
        warnings.simplefilter("ignore")
        logging.getLogger("megatron.sft").setLevel(logging.ERROR)
    logging.getLogger("megatron.core").setLevel(logging.ERROR)
