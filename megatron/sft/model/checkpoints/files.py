"""collective. Makes all ranks agree about the files of a checkpoint: that each rank has written its
own, that all see the same folder, and that no file was damaged since.
"""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from megatron.packing.folder_gate import open_output
from megatron.sft.agreement import AgreedError, gathered
from megatron.sft.base_exceptions import describe_failure, is_failure
from megatron.sft.model.checkpoints.checksums import faults_in, file_names, read_checksums
from megatron.sft.model.checkpoints.folder import TRACKER, checkpoint_path
from megatron.sft.model.checkpoints.lock import FolderLock
from megatron.sft.model.checkpoints.shards import other_sound_iteration, shard_faults
from megatron.sft.peers import is_lost, wait_for_all

_PROBE_BYTES = 1 << 20
"""Size of a trial write, by which a full disk is recognised."""


class CheckpointError(AgreedError):
    """A checkpoint cannot be saved or loaded."""


@contextmanager
def written_or_refused(unfinished: Path, *, is_collective: bool = False) -> Iterator[None]:
    """Context that turns a failure to write on any rank into a CheckpointError on all ranks. Its
    end is collective.

    is_collective: True if the body is collective itself. If then this
    rank alone fails, the others are inside a collective of the body and cannot be told: this rank
    raises at once. Only a CheckpointException, which torch raises on all ranks alike, is shared.
    """
    message = f"{unfinished.with_suffix('')} could not be saved"
    failure = None
    try:
        yield
    except (Exception, CheckpointException) as error:
        root = _root_of_write(error, unfinished)
        cause = f"{type(root).__name__}: {' '.join(str(root).split())}"[:500]
        if isinstance(root, OSError) and root.errno in (errno.ENOSPC, errno.EDQUOT):
            cause = f"the disk is full ({cause})"
        if is_collective and not isinstance(error, CheckpointException):
            if isinstance(root, OSError):
                raise OSError(f"{message}: {cause}") from None
            raise
        failure = f"rank {dist.get_rank()}: {cause}"
    # Every rank comes here, failed or not. Those that wrote little wait for those that wrote much.
    wait_for_all()
    failures = [text for text in gathered(failure) if text is not None]
    if failures:
        if dist.get_rank() == 0:
            shutil.rmtree(unfinished, ignore_errors=True)
        raise CheckpointError(f"{message}: {failures[0]}; what was saved before is intact")


def _root_of(error: BaseException) -> BaseException:
    """Returns the cause of an error: of torch's errors of several ranks, that of the lowest."""
    while isinstance(error, CheckpointException) and error.failures:
        error = error.failures[min(error.failures)][0]
    return error


def _root_of_write(error: BaseException, folder: Path) -> BaseException:
    """Returns the cause of a failed write. If the disk is full, the cause is that, whatever torch's
    message says.
    """
    error = _root_of(error)
    # On a full disk torch raises RuntimeError, "unexpected pos 704 vs 598": try a write ourselves.
    if isinstance(error, RuntimeError):
        probe = folder / f"probe-{dist.get_rank()}"
        try:
            probe.write_bytes(bytes(_PROBE_BYTES))
        except OSError as unwritten:
            # Leave out the probe's file name, which would mislead the user.
            return OSError(unwritten.errno, unwritten.strerror)
        finally:
            with suppress(OSError):
                probe.unlink()
    return error


def check_folder(flag: str, folder: str | Path) -> FolderLock | None:
    """Checks a folder to save to, and returns rank 0's lock of it. Collective.

    Raises CheckpointError on every rank if another run saves to it, or if it is not the same folder
    on all machines.
    """
    lock = lock_of_first(flag, folder)
    check_shared(flag, folder)
    return lock


def lock_of_first(flag: str, folder: str | Path) -> FolderLock | None:
    """Returns rank 0's lock of a folder that only rank 0 writes to. Raises CheckpointError on every
    rank if another run writes to it. Collective.
    """
    lock, message = None, None
    if dist.get_rank() == 0:
        try:
            Path(folder).mkdir(parents=True, exist_ok=True)
            lock = FolderLock(folder, flag)
        except (OSError, ValueError) as error:
            message = str(error)
    message = gathered(message)[0]
    if message is not None:
        raise CheckpointError(message)
    return lock


def check_shared(flag: str, folder: str | Path) -> None:
    """Raises CheckpointError unless rank 0 can write to a folder, and all ranks see it there;
    collective.
    """
    message = None
    probe = Path(folder) / f".seen-by-all-{os.getpid()}"
    if dist.get_rank() == 0:
        try:
            open_output(probe).close()
        except OSError as error:
            message = str(error)
    # Use rank 0's name of the probe: the process number in it differs between ranks.
    message, of_first = gathered((message, probe))[0]
    missing = [
        rank
        for rank, found in enumerate(gathered((Path(folder) / of_first.name).exists()))
        if not found
    ]
    if dist.get_rank() == 0:
        probe.unlink(missing_ok=True)
    if message is None and missing:
        message = (
            f"{flag} {of_first.parent} is another folder on rank {missing[0]} than on rank 0; "
            "pass one that all share"
        )
    if message is not None:
        raise CheckpointError(message)


class Found(NamedTuple):
    """Faults of a checkpoint's files."""

    faults: list[str]
    """A line for each faulty file."""
    has_checksums: bool
    """False if only the sizes of shards could be checked."""


def found_faults(path: Path) -> Found:
    """Returns the faults of a checkpoint, the same on all ranks. Collective.

    Ranks that see the same copy of the files divide them among themselves: 8 ranks on a shared file
    system read an eighth each. If each machine has a copy of its own, each copy is read.
    """
    faults, has_checksums = list[str](), True
    rank, seen = dist.get_rank(), gathered(_seen(path))
    alike = [other for other, found in enumerate(seen) if found == seen[rank]]
    try:
        sums = read_checksums(path)
        has_checksums = sums is not None
        if sums is not None:
            names = sorted({*sums, *file_names(path)})
            faults = faults_in(path, names[alike.index(rank) :: len(alike)], sums)
        if not faults and rank == alike[0] and os.path.lexists(path / ".metadata"):
            faults = shard_faults(path)
    except (OSError, ValueError) as error:
        faults = [str(error)]
    if faults and len(alike) < len(seen):
        faults = [f"{fault} (the copy of rank {rank})" for fault in faults]
    wait_for_all()
    of_ranks = gathered(faults)
    return Found([fault for rank_faults in of_ranks for fault in rank_faults], has_checksums)


def _seen(path: Path) -> str:
    """Returns a text that is equal on all machines that share a folder, and differs between copies
    of it. It is made of inode, time of change and size of each file.

    Two copies count as one only if all of these are equal by chance. If a shared folder is taken
    for copies, it is read more than once, which only costs time.
    """
    try:
        states = {name: (path / name).stat() for name in file_names(path)}
    except OSError as error:
        return str(error)
    marks = [
        (name, state.st_ino, state.st_ctime_ns, state.st_size) for name, state in states.items()
    ]
    return hashlib.blake2b(repr(marks).encode(), digest_size=16).hexdigest()


def check_sound(folder: str | Path, iteration: int) -> None:
    """Raises CheckpointError unless every file is as it was saved; collective."""
    path = checkpoint_path(folder, iteration)
    faults, has_checksums = found_faults(path)
    if not has_checksums and not faults and dist.get_rank() == 0:
        print(
            f"note: {path} was saved by an earlier version without checksums; only the sizes of "
            "its files are checked",
            flush=True,
        )
    if faults:
        way_out = gathered(_way_back(folder, iteration) if dist.get_rank() == 0 else None)[0]
        raise CheckpointError(
            f"{faults[0]}{f', and {len(faults) - 1} more' if len(faults) > 1 else ''}; {way_out}"
        )


def _way_back(folder: str | Path, damaged: int) -> str:
    other = other_sound_iteration(folder, damaged)
    if other is None:
        return "no other checkpoint beside it is sound"
    return f"write {other} into {Path(folder) / TRACKER} to continue from the newest sound one"


@contextmanager
def read_or_refused(folder: str | Path, iteration: int) -> Iterator[None]:
    """Context that turns a library's failure to read a checkpoint into one line with the way back:
    a CheckpointError on all ranks for what torch raises on all of them, a ValueError for what this
    rank alone meets. Errors that are worded already, and those of a lost rank, pass.
    """
    try:
        yield
    except BaseException as error:
        root = _root_of(error)
        is_worded = isinstance(error, (ValueError, AssertionError, torch.OutOfMemoryError))
        if is_worded or not is_failure(error) or is_lost(root):
            raise
        message = f"{checkpoint_path(folder, iteration)} cannot be read: {describe_failure(root)}; "
        if not isinstance(error, CheckpointException):
            raise ValueError(message + _way_back(folder, iteration)) from error
        way_out = gathered(_way_back(folder, iteration) if dist.get_rank() == 0 else None)[0]
        raise CheckpointError(message + way_out) from error
