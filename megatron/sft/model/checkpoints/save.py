"""mcore. Saves one checkpoint: copies the state, writes it, then moves the folder into place.

    1. iter_0000200.unfinished/ is created, and every rank writes its files into it
    2. rank 0 adds the HuggingFace files and checksums.json
    3. the folder is renamed to iter_0000200/
    4. the tracker names it

A run that is killed at any point leaves the previous checkpoint as the latest. With
`in_background` step 1 runs in a thread while training continues.
"""

from __future__ import annotations

import inspect
import os
import shutil
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist
from megatron.core import dist_checkpointing

from megatron.sft.agreement import gathered
from megatron.sft.model.build import Training
from megatron.sft.model.checkpoints.checksums import Sum, file_names, sum_of, write_checksums
from megatron.sft.model.checkpoints.content import METADATA, Progress, state_to_save
from megatron.sft.model.checkpoints.files import written_or_refused
from megatron.sft.model.checkpoints.folder import TRACKER, checkpoint_path, track, unfinished_path
from megatron.sft.model.checkpoints.write import Part, write_parts
from megatron.sft.model.huggingface.companions import COMPANIONS

# From 0.17 on `save` has a choice of writers, whose default needs a package of its own.
_HAS_WRITERS = "async_strategy" in inspect.signature(dist_checkpointing.save).parameters
_WRITER: dict[str, Any] = {"async_strategy": "mcore"} if _HAS_WRITERS else {}


class CheckpointSave:
    """A checkpoint that is being saved. The constructor and `finish` are collective. Until `finish`
    returns, no reader sees the checkpoint.
    """

    def __init__(
        self,
        folder: str | Path,
        training: Training,
        progress: Progress,
        model_options: dict[str, Any],
        data: dict[str, Any],
        write_companions: Callable[[Path], object] | None = None,
        *,
        in_background: bool = False,
    ) -> None:
        """Args:
        model_options: options that must be the same in a run that loads the checkpoint.
        data: identity of the data. A run that loads the checkpoint with other data prints a note.
        write_companions: function that writes the model's HuggingFace files, without weights, into
            a folder.
        in_background: copy the state to host memory, and write it in a thread while training
            continues.
        """
        self.iteration = progress.iteration
        self._folder, self._write_companions = folder, write_companions
        self._unfinished = unfinished_path(checkpoint_path(folder, progress.iteration))
        self._sums: dict[str, Sum] = {}
        self._failure: Exception | None = None
        state = state_to_save(training, progress, model_options, data)
        with written_or_refused(self._unfinished):
            if dist.get_rank() == 0:
                shutil.rmtree(self._unfinished, ignore_errors=True)
                self._unfinished.mkdir(parents=True)
        with written_or_refused(self._unfinished, is_collective=True):
            self._request = dist_checkpointing.save(
                state,
                str(self._unfinished),
                content_metadata=METADATA,
                async_sharded_save=True,
                **_WRITER,
            )
        # The tensors are those of the run, wherever they are. On a rank that has nothing to write
        # there is no function, and no parts.
        parts = self._request.async_fn_args[1] if self._request.async_fn is not None else []
        if in_background:  # the next step would change them under the writing thread
            parts = [
                (path, key, (others, [(item, held.to("cpu", copy=True)) for item, held in tensors]))
                for path, key, (others, tensors) in parts
            ]
        self._thread = threading.Thread(target=self._write, args=(parts,), name="save", daemon=True)
        if in_background:
            self._thread.start()
        else:
            self._write(parts)

    @property
    def is_written(self) -> bool:
        """True once this rank has written its files."""
        return not self._thread.is_alive()

    def finish(self) -> None:
        """Waits until all files are written, and moves the checkpoint into place. Raises
        CheckpointError on every rank if any rank could not write.
        """
        if self._thread.ident is not None:
            self._thread.join()
        # Share failures before `finalize`, which is collective: a rank that failed would not enter
        # it, and the others would wait for it.
        with written_or_refused(self._unfinished):
            if self._failure is not None:
                raise self._failure
        with written_or_refused(self._unfinished, is_collective=True):
            for finalize in self._request.finalize_fns:
                finalize()
        sums = {
            name: found
            for sums_of_rank in gathered(self._sums)
            for name, found in sums_of_rank.items()
        }
        with written_or_refused(self._unfinished):
            if dist.get_rank() == 0:
                self._place(sums)

    def _write(self, parts: Sequence[Part]) -> None:
        try:
            results, self._sums = write_parts(parts)
            if self._request.async_fn is not None:  # None where this rank has nothing to write
                *_, queue = self._request.async_fn_args
                queue.put(results)  # as megatron-core's own function does, which isn't called
        except Exception as failure:  # raised by `finish`, on all ranks alike
            self._failure = failure

    def _place(self, sums: dict[str, Sum]) -> None:
        unfinished, path = self._unfinished, checkpoint_path(self._folder, self.iteration)
        if self._write_companions is not None:
            (unfinished / COMPANIONS).mkdir()
            self._write_companions(unfinished / COMPANIONS)
        others = [name for name in file_names(unfinished) if name not in sums]
        write_checksums(unfinished, sums | {name: sum_of(unfinished / name) for name in others})
        # The order matters. Checksums come last into the folder, the rename makes it visible, and
        # only then does the tracker name it: at no point does it name an incomplete checkpoint.
        shutil.rmtree(path, ignore_errors=True)
        os.replace(unfinished, path)
        track(self._folder, TRACKER, self.iteration)
