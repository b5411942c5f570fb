"""pure. What the launcher says, and what a user need not read."""

from __future__ import annotations

import ctypes
import json
import logging
import os
import signal
import sys
import time
import warnings
from contextlib import suppress
from pathlib import Path
from typing import NoReturn


def world_from_environment() -> tuple[int, int]:
    """Returns (rank, world size) as torchrun says; (0, 1) for a plain `python pretrain_sft.py`."""
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
    logging.getLogger("megatron.core").setLevel(logging.ERROR)


def end_with_launcher() -> None:
    """Ask to be stopped by SIGTERM when torchrun is killed, on Linux: nobody else would end this process."""
    if "TORCHELASTIC_RUN_ID" in os.environ and sys.platform == "linux":
        set_parent_death_signal = 1
        ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGTERM)


def exit_with(message: str, rank: int) -> NoReturn:
    """End this process with status 2; rank 0 says why, in one line, and so does torchrun, of any rank, at its end."""
    line = f"pretrain_sft.py: error: {' '.join(message.split())}"
    if rank == 0:
        print(line, file=sys.stderr, flush=True)
    tell_launcher(line)
    raise SystemExit(2)


def tell_launcher(text: str) -> None:
    """Let torchrun's summary, the last thing on the terminal, show why this process ends."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path:
        extra = {"py_callstack": text, "timestamp": str(int(time.time()))}
        with suppress(OSError):  # what was printed must do
            Path(path).write_text(json.dumps({"message": {"message": text, "extraInfo": extra}}), encoding="utf-8")
