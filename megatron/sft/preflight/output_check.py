"""mcore. Tries before the first step everything that a run writes later: companion files, folders,
free space.

A fault raises the same CheckpointError on every rank, with the flag, the folder and the way out.
"""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist

from megatron.packing.user_files import disk_fault, read_json
from megatron.sft.agreement import gathered
from megatron.sft.model.checkpoints.files import (
    CheckpointError,
    check_folder,
    check_shared,
    lock_of_first,
)
from megatron.sft.model.checkpoints.folder import checkpoint_path, latest_iteration, unfinished_path
from megatron.sft.model.checkpoints.lock import FolderLock
from megatron.sft.model.huggingface.companions import COMPANIONS, Companions
from megatron.sft.model.huggingface.tensors import Tensors
from megatron.sft.model.huggingface.write import target_of, unfinished_folder
from megatron.sft.model.lora.names import AdapterWeights
from megatron.sft.options.config import SFTConfig

_MIN_BYTES_PER_WEIGHT = 12
"""Least bytes of a trained weight in a checkpoint: the weight and Adam's two moments in float32."""


class Planned(NamedTuple):
    """Least number of bytes that a run writes into a folder."""

    flag: str
    folder: Path
    num_bytes: int
    """Bytes of a single copy."""
    num_kept: int = 1
    """Copies that are kept in the end."""


class Locks(NamedTuple):
    """Rank 0's locks of the folders that the run writes to; None on other ranks."""

    save: FolderLock | None
    run_dir: FolderLock | None
    """None also if it is the folder of --save."""

    def release(self) -> None:
        """Frees the locks."""
        for lock in self:
            if lock is not None:
                lock.release()


def check_output(companions: Companions, run_dir: Path | None) -> Locks:
    """Tries all outputs of the run of `companions`, and returns the locks of its folders.
    Collective.

    run_dir: folder of the run's metrics, which is locked; None if it writes none.
    """
    config = companions.config
    output = config.output
    lock = None if output.save is None else check_folder("--save", output.save)
    run_lock = None
    if run_dir is not None and not (
        output.save is not None and Path(output.save).resolve() == run_dir.resolve()
    ):
        run_lock = lock_of_first("--run-dir", run_dir)
    if output.save_hf is not None:
        check_shared("--save-hf", target_of(output.save_hf).parent)
    fault = None
    if dist.get_rank() == 0:
        try:
            _try_companions(companions)
            for line in check_room(_planned(companions)):
                print(line, flush=True)
        except ValueError as error:
            fault = str(error)
    fault = gathered(fault)[0]
    if fault is not None:
        raise CheckpointError(fault)
    return Locks(lock, run_lock)


def _try_companions(companions: Companions) -> None:
    output = companions.config.output
    if output.save is not None and companions.are_saved():
        with _trial(
            "--save", output.save, unfinished_path(checkpoint_path(output.save, 0))
        ) as folder:
            (folder / COMPANIONS).mkdir()
            companions.write(folder / COMPANIONS)
    if output.save_hf is not None:
        with _trial(
            "--save-hf", output.save_hf, unfinished_folder(target_of(output.save_hf))
        ) as folder:
            if companions.config.lora.writes_adapter:
                companions.write_beside_adapter(
                    AdapterWeights(companions.weights(), companions.config.lora), folder
                )
            else:
                companions.write(folder)


@contextmanager
def _trial(flag: str, given: str, folder: Path) -> Iterator[Path]:
    """Context with a trial folder, which is removed at its end. JSON files in it are read back.
    Raises ValueError if anything fails.
    """
    try:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        yield folder
        for path in folder.rglob("*config.json"):
            read_json(path, any_integer=True)
    except OSError as error:
        name = error.filename2 or error.filename
        place = f" ({name})" if name else ""
        raise ValueError(
            f"{flag} {given} cannot be written: {disk_fault(error)}{place}; correct that, or "
            f"pass another {flag}"
        ) from None
    except ValueError as error:
        raise ValueError(f"{flag} {given} cannot be written: {error}") from None
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _planned(companions: Companions) -> list[Planned]:
    """Returns the outputs of the run with their sizes. Without a HuggingFace family the size of the
    model is not known, and nothing is planned.
    """
    config = companions.config
    output = config.output
    planned: list[Planned] = []
    if not companions.has_family():
        return planned
    weights: Tensors = companions.weights()
    adapter = AdapterWeights(companions.weights(), config.lora) if config.lora.lora else None
    num_saves = _num_saves(config)
    if output.save is not None and num_saves:
        num_bytes = _MIN_BYTES_PER_WEIGHT * num_weights(adapter or weights)
        # One more than are kept: an old one is removed only when the new one is complete.
        num_kept = min(num_saves, (output.keep_checkpoints or num_saves) + 1)
        planned.append(Planned("--save", Path(output.save), num_bytes, num_kept))
    if output.save_hf is not None:
        dtype = (
            torch.float32
            if config.lora.writes_adapter
            else getattr(torch, companions.dtype_written())
        )
        written = adapter if adapter is not None and config.lora.writes_adapter else weights
        planned.append(
            Planned(
                "--save-hf", target_of(output.save_hf).parent, num_weights(written) * dtype.itemsize
            )
        )
    return planned


def _num_saves(config: SFTConfig) -> int:
    """Returns the number of checkpoints that this run will save."""
    output, last = config.output, config.training.train_iters
    done = 0
    if output.load is not None and not output.finetune:
        done = output.ckpt_step or latest_iteration(output.load) or 0
    return output.num_saves(done, last)


def num_weights(tensors: Tensors) -> int:
    """Returns the number of weights in a folder of these tensors."""
    return sum(math.prod(part.shape) for weight in tensors.all() for part in weight.parts)


def check_room(planned: list[Planned]) -> list[str]:
    """Returns notes about outputs that may not fit on disk. Raises ValueError if one cannot fit.

    Outputs on the same device are added up: once for what must fit at any time, and with all copies
    that are kept.
    """
    notes = []
    once: dict[int, int] = {}
    kept: dict[int, int] = {}
    for flag, folder, num_bytes, num_kept in planned:
        disk, device = os.statvfs(folder), os.stat(folder).st_dev
        once[device] = once.get(device, 0) + num_bytes
        kept[device] = kept.get(device, 0) + num_bytes * num_kept
        free = disk.f_bfree * disk.f_frsize
        if not disk.f_blocks:  # the file system does not report its size
            continue
        if once[device] > free:
            raise ValueError(
                f"{flag} {folder} has {_size(free)} free, but the run writes at least "
                f"{_size(once[device])} there; make room, or pass another {flag}"
            )
        if kept[device] > free:
            notes.append(
                f"note: {flag} {folder} has {_size(free)} free, but the run will keep at least "
                f"{_size(kept[device])} there; make room, or pass --keep-checkpoints"
            )
    return notes


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:,.1f} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:,.1f} MB"
