"""pure. A folder of checkpoints: which is the newest, whether its files are those that were saved,
who may write to it.

A folder holds `iter_0000100/` for each checkpoint and `latest_checkpointed_iteration.txt`, as
Megatron's do. Each checkpoint holds `checksums.json`, which is written last: the size and CRC-32 of
every file in it. `.lock` is held by the run that saves there; the system frees it when that process
ends, however it ends.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import shutil
import socket
import zlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple, TextIO

from megatron.packing.user_files import read_json, shown

TRACKER = "latest_checkpointed_iteration.txt"
BEST = "best_checkpointed_iteration.txt"
CHECKSUMS = "checksums.json"
LOCK = ".lock"
_UNFINISHED = ".unfinished"
_BLOCK = 1 << 24
_LONGEST_TRACKER = 100
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
"""Errors of locking on a file system without locks."""


def checkpoint_path(folder: str | Path, iteration: int) -> Path:
    """Returns where the checkpoint of an iteration is."""
    return Path(folder) / f"iter_{iteration:07d}"


def unfinished_path(path: Path) -> Path:
    """Returns where a checkpoint is written until it is whole."""
    return path.with_suffix(_UNFINISHED)


def iterations(folder: str | Path) -> list[int]:
    """Returns those whose checkpoints are in the folder, in order; whether they are sound is not
    looked at.
    """
    found = (
        re.fullmatch(r"iter_(\d{7,})", path.name)
        for path in Path(folder).glob("iter_*")
        if path.is_dir()
    )
    return sorted(int(match[1]) for match in found if match)


def latest_iteration(folder: str | Path) -> int | None:
    """Returns the iteration that the tracker names; None for a folder without checkpoints.

    Raises ValueError where the tracker is missing beside checkpoints, or names none of them.
    """
    return _tracked(folder, TRACKER, iterations(folder))


def best_iteration(folder: str | Path) -> int | None:
    """Returns the iteration of the checkpoint with the lowest validation loss; None where no run
    kept it.
    """
    return _tracked(folder, BEST, [])


def _tracked(folder: str | Path, name: str, found: Sequence[int]) -> int | None:
    tracker = Path(folder) / name
    if not tracker.exists():
        if found:
            raise ValueError(
                f"{tracker} is missing, though checkpoints up to iter_{found[-1]:07d} are beside "
                f"it; write the iteration to continue from into it, such as {found[-1]}, or pass "
                "another folder"
            )
        return None
    if not tracker.is_file():
        raise ValueError(
            f"{tracker} must be a file with the iteration of a checkpoint beside it, but is none; "
            "remove it, and write that number into a file of its name"
        )
    with tracker.open(errors="replace") as file:
        text = file.read(_LONGEST_TRACKER).strip()
    if not re.fullmatch(r"[0-9]{1,18}", text) or not checkpoint_path(folder, int(text)).is_dir():
        raise ValueError(
            f"{tracker} must name the iteration of a checkpoint beside it, but holds {text!r}; "
            "correct it"
        )
    return int(text)


def distributed_checkpoint(folder: str | Path) -> Path | None:
    """Returns the checkpoint in megatron-core's own format that a folder is, or that its tracker
    names (Megatron-LM's may say `release`); None for a folder of another kind.
    """
    tracker = Path(folder) / TRACKER
    if (Path(folder) / ".metadata").is_file():
        return Path(folder)
    if not tracker.is_file():
        return None
    with tracker.open(errors="replace") as file:
        is_release = file.read(_LONGEST_TRACKER).strip() == "release"
    path = (
        Path(folder) / "release"
        if is_release
        else checkpoint_path(folder, latest_iteration(folder) or 0)
    )
    if not (path / ".metadata").is_file():
        raise ValueError(
            f"{path} must be a checkpoint of --ckpt-format torch_dist, but has no .metadata; save "
            "it so"
        )
    return path


def huggingface_source(pretrained_checkpoint: str | None) -> str | None:
    """Returns the folder of --pretrained-checkpoint; None where it holds checkpoints of
    megatron-core, or where there is none.
    """
    if pretrained_checkpoint is None or distributed_checkpoint(pretrained_checkpoint) is not None:
        return None
    return pretrained_checkpoint


def track(folder: str | Path, name: str, iteration: int) -> None:
    """Lets a tracker name a checkpoint that is whole; nobody sees a half of it."""
    temporary = Path(folder) / f"{name}.tmp"
    temporary.write_text(str(iteration))
    os.replace(temporary, Path(folder) / name)


def check_load(load: str | Path, save: str | Path | None, iteration: int | None = None) -> None:
    """Raises ValueError unless `load` holds a checkpoint, or is where this run saves, which may be
    new.

    iteration: of the one that is wanted; None for the newest.
    """
    found = iterations(load)
    if iteration is not None and found and iteration not in found:
        raise ValueError(
            f"--ckpt-step {iteration} must be one of --load {load}: {', '.join(map(str, found))}"
        )
    if latest_iteration(load) is not None or (
        save is not None and Path(load).resolve() == Path(save).resolve()
    ):
        return
    folder = Path(load)
    if not folder.is_dir():
        hint = "there is no such folder"
    elif re.fullmatch(r"iter_\d+", folder.name):
        hint = f"it is one checkpoint: pass --load {folder.parent}"
    elif (folder / "config.json").exists():
        hint = "it is a HuggingFace model: pass --pretrained-checkpoint"
    else:
        hint = "only --load equal to --save may be new"
    raise ValueError(f"--load {load} holds no checkpoint; {hint}")


class Sum(NamedTuple):
    """Size in bytes and CRC-32 of a file."""

    num_bytes: int
    crc: int


def sum_of(path: Path) -> Sum:
    """Reads a file once, in blocks of 16 MiB."""
    num_bytes, crc = 0, 0
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            num_bytes, crc = num_bytes + len(block), zlib.crc32(block, crc)
    return Sum(num_bytes, crc)


def file_names(checkpoint: Path) -> list[str]:
    """Returns all files of a checkpoint but the checksums, relative to it, in order."""
    names = (str(path.relative_to(checkpoint)) for path in checkpoint.rglob("*") if path.is_file())
    return sorted(name for name in names if name != CHECKSUMS)


def write_checksums(checkpoint: Path, sums: dict[str, Sum]) -> None:
    """Writes what `faults_in` will compare with."""
    (checkpoint / CHECKSUMS).write_text(json.dumps({"crc32": sums}, indent=0) + "\n")


def read_checksums(checkpoint: Path) -> dict[str, Sum] | None:
    """Returns what was written; None for a checkpoint of a version that wrote none. ValueError if
    it is damaged.
    """
    path = checkpoint / CHECKSUMS
    if not os.path.lexists(path):
        return None
    try:
        found = read_json(path)
        files = found.get("crc32") if isinstance(found, dict) else None
        if not isinstance(files, dict) or not files:
            raise ValueError('it names no file, as {"crc32": {file: [size, checksum]}} does')
        return {name: _sum(name, values) for name, values in files.items()}
    except ValueError as error:
        raise ValueError(
            f"{path} must hold the sizes and checksums of the checkpoint's files: {error!s:.200}"
        ) from None


def _sum(name: str, values: object) -> Sum:
    if Path(name).is_absolute() or ".." in Path(name).parts:
        raise ValueError(f"it names {shown(name)}, which is no file of the checkpoint")
    if not isinstance(values, list) or [type(value) for value in values] != [int, int]:
        raise ValueError(f"of {shown(name)} it has no two whole numbers")
    return Sum(*values)


def faults_in(checkpoint: Path, names: Iterable[str], sums: dict[str, Sum]) -> list[str]:
    """Returns, of these files, what is wrong with each that is missing, foreign, or other than it
    was saved.
    """
    faults = []
    for name in names:
        path = checkpoint / name
        if name not in sums:
            faults.append(f"{path} was not saved with this checkpoint")
        elif (size := _size_of(path)) is None:
            faults.append(f"{path} is missing")
        elif size != sums[name].num_bytes:
            faults.append(f"{path} has {size:,} bytes, but {sums[name].num_bytes:,} were saved")
        elif sum_of(path) != sums[name]:
            faults.append(f"{path} is damaged: its checksum is not that of what was saved")
    return faults


def _size_of(path: Path) -> int | None:
    try:
        return path.stat().st_size if path.is_file() else None
    except (OSError, ValueError):  # no file could have such a name
        return None


def other_sound_iteration(folder: str | Path, damaged: int) -> int | None:
    """Returns the newest other checkpoint whose files are those that were saved; it reads them
    all."""
    for iteration in reversed(iterations(folder)):
        path = checkpoint_path(folder, iteration)
        try:
            sums = read_checksums(path)
        except ValueError:
            continue
        if iteration != damaged and sums and not faults_in(path, {*sums, *file_names(path)}, sums):
            return iteration
    return None


def remove_old(folder: str | Path, keep: int) -> list[str]:
    """Removes checkpoints before the tracker's, but the best one and the last `keep`, the tracker's
    among them.

    Returns a note for each that could not be removed: training must not end for files that are only
    in the way (NFS keeps those that somebody reads).
    """
    notes = []
    try:
        latest, best = latest_iteration(folder), best_iteration(folder)
        older = [
            found
            for found in iterations(folder)
            if latest is not None and found < latest and found != best
        ]
    except (OSError, ValueError) as error:
        return [f"old checkpoints in {folder} are kept: {error}"]
    for iteration in older[: max(len(older) - (keep - 1), 0)]:
        path = checkpoint_path(folder, iteration)
        try:
            shutil.rmtree(path)
        except FileNotFoundError:  # somebody else removed it
            continue
        except OSError as error:
            notes.append(f"{path} could not be removed ({error.strerror}); remove it by hand")
    return notes


class FolderLock:
    """Held by the process that writes to a folder, so that two runs never share one.

    A POSIX record lock: no child process inherits it, and the system frees it with the process, by
    any death.
    """

    def __init__(self, folder: str | Path, flag: str = "--save") -> None:
        """ValueError, naming its holder and `flag`, where another process has it. What dead runs
        left unfinished is removed.

        On a file system without locks a note is printed, and nothing is held.
        """
        self._path = Path(folder) / LOCK
        self._flag = flag
        self._file = self._locked()
        for left in Path(folder).glob(f"iter_*{_UNFINISHED}"):
            shutil.rmtree(left, ignore_errors=True)

    def renew(self) -> None:
        """Holds the folder that is there now, which is another one if the first was removed.

        Raises ValueError where another process holds it meanwhile.
        """
        try:
            is_in_place = os.path.samestat(self._path.stat(), os.fstat(self._file.fileno()))
        except FileNotFoundError:
            is_in_place = False
        if not is_in_place:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            before, self._file = self._file, self._locked()
            before.close()

    def release(self) -> None:
        """Lets others write there."""
        self._file.close()

    def _locked(self) -> TextIO:
        folder, file = self._path.parent, self._path.open("a+")
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in _NO_LOCKS:
                print(
                    f"note: {folder} has no file locks ({error.strerror}); see that no other run "
                    f"{'saves' if self._flag == '--save' else 'writes'} there",
                    flush=True,
                )
                return file
            file.seek(0)
            holder = file.read(200).strip() or "another process"
            file.close()
            done = "saved" if self._flag == "--save" else "written"
            raise ValueError(
                f"{folder} is being {done} to by {holder}; end that run, or pass another "
                f"{self._flag}"
            ) from None
        file.truncate(0)
        file.write(f"process {os.getpid()} of {socket.gethostname()}\n")
        file.flush()
        return file
