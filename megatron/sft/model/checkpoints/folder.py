"""pure. A folder of checkpoints: lists them, finds the newest and the best, removes old ones.

The names of its files are Megatron-LM's: see the package.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Sequence
from pathlib import Path

from megatron.packing.folder_gate import write_output
from megatron.packing.quoting import shown

TRACKER = "latest_checkpointed_iteration.txt"
BEST = "best_checkpointed_iteration.txt"
UNFINISHED = ".unfinished"
_LONGEST_TRACKER = 100


def checkpoint_path(folder: str | Path, iteration: int) -> Path:
    """Returns the folder of one checkpoint: `iter_0000100` for iteration 100."""
    return Path(folder) / f"iter_{iteration:07d}"


def unfinished_path(path: Path) -> Path:
    """Returns the folder that a checkpoint is written to until it is complete."""
    return path.with_suffix(UNFINISHED)


def iterations(folder: str | Path) -> list[int]:
    """Returns the iterations of all checkpoints in the folder, in order. Their files are not
    checked.
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
    """Returns the iteration of the checkpoint with the lowest validation loss; None if no run
    recorded one (--keep-best).
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
            f"{tracker} must name the iteration of a checkpoint beside it, but "
            f"holds {shown(text)}; "
            "correct it"
        )
    return int(text)


def distributed_checkpoint(folder: str | Path) -> Path | None:
    """Returns the folder of a checkpoint in megatron-core's own format: `folder` itself, or the one
    that its tracker names (Megatron-LM's may name `release`). Returns None for any other folder.
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
    """Returns --pretrained-checkpoint if it is a HuggingFace folder; None if it is not given, or
    has checkpoints of megatron-core.
    """
    if pretrained_checkpoint is None or distributed_checkpoint(pretrained_checkpoint) is not None:
        return None
    return pretrained_checkpoint


def track(folder: str | Path, name: str, iteration: int) -> None:
    """Writes the number of a complete checkpoint into a tracker. The file is replaced in one step,
    so that no reader sees half of it.
    """
    temporary = Path(folder) / f"{name}.tmp"
    write_output(temporary, str(iteration))
    os.replace(temporary, Path(folder) / name)


def check_load(load: str | Path, save: str | Path | None, iteration: int | None = None) -> None:
    """Raises ValueError unless `load` has a checkpoint. If it equals `save` it may be empty: the
    same command then starts a run and continues it.

    iteration: the checkpoint to load; None for the newest.
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


def remove_old(folder: str | Path, keep: int) -> list[str]:
    """Removes old checkpoints. The best one stays, and so do the last `keep`, of which the newest
    is the one that the tracker names.

    Returns a note for each checkpoint that could not be removed. It is not an error, since training
    can go on (NFS keeps files that somebody reads).
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
