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

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from megatron.sft.agreement import AgreedError, gathered
from megatron.sft.model.checkpoints.checksums import faults_in, file_names, read_checksums
from megatron.sft.model.checkpoints.folder import TRACKER, checkpoint_path, other_sound_iteration
from megatron.sft.model.checkpoints.lock import FolderLock
from megatron.sft.peers import wait_for_all

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
        root = _root_of(error, unfinished)
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


def _root_of(error: BaseException, folder: Path) -> BaseException:
    """Returns the cause of an error. If the disk is full, the cause is that, whatever torch's
    message says.
    """
    while isinstance(error, CheckpointException) and error.failures:
        error = next(iter(error.failures.values()))[0]
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
            probe.touch()
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


def found_faults(path: Path) -> list[str] | None:
    """Returns a line for each faulty file of a checkpoint, the same on all ranks; None if the
    checkpoint has no checksums. Collective.

    Ranks that see the same copy of the files divide them among themselves: 8 ranks on a shared file
    system read an eighth each. If each machine has a copy of its own, each copy is read.
    """
    faults: list[str] | None = None
    rank, seen = dist.get_rank(), gathered(_seen(path))
    alike = [other for other, found in enumerate(seen) if found == seen[rank]]
    try:
        sums = read_checksums(path)
        names = sorted({*(sums or ()), *file_names(path)})
        own = names[alike.index(rank) :: len(alike)]
        faults = None if sums is None else faults_in(path, own, sums)
    except (OSError, ValueError) as error:
        faults = [str(error)]
    if faults and len(alike) < len(seen):
        faults = [f"{fault} (the copy of rank {rank})" for fault in faults]
    wait_for_all()
    of_ranks = [rank_faults for rank_faults in gathered(faults) if rank_faults is not None]
    return [fault for rank_faults in of_ranks for fault in rank_faults] if of_ranks else None


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
    found = found_faults(path)
    if found is None and dist.get_rank() == 0:
        print(
            f"note: {path} was saved by an earlier version without checksums; it is not checked",
            flush=True,
        )
    if found:
        other = other_sound_iteration(folder, iteration) if dist.get_rank() == 0 else None
        other = gathered(other)[0]
        way_out = (
            f"write {other} into {Path(folder) / TRACKER} to continue from the newest sound one"
            if other
            else ("no other checkpoint beside it is sound")
        )
        raise CheckpointError(
            f"{found[0]}{f', and {len(found) - 1} more' if len(found) > 1 else ''}; {way_out}"
        )
