"""mcore. `train --doctor`: a small model of the run, in its own layout, before the first step."""

from __future__ import annotations

import time

from megatron.packing.device import Device
from megatron.packing.doctor.examine import examine
from megatron.sft.doctor.shrink import small_run
from megatron.sft.doctor.subject import subject_of_run
from megatron.sft.environment import world_from_environment
from megatron.sft.options.config import SFTConfig


def examine_run(config: SFTConfig, device: Device) -> None:
    """Examines the run, and prints a line; collective, process groups are made.

    Raises:
        ValueError: on all ranks alike if a fault is found, with the report.
    """
    start = time.monotonic()
    rank, world_size = world_from_environment()
    small = small_run(config, world_size=world_size, on_gpu=device.is_gpu)
    diagnosis = examine(subject_of_run(small, device))
    seconds = time.monotonic() - start
    if not diagnosis.is_sound:
        raise ValueError(f"--doctor found a fault:\n{diagnosis.text()}")
    if rank == 0:
        print(f"doctor: {diagnosis.verdict()} ({seconds:.1f} s)", flush=True)
