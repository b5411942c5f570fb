"""The faults of the matrix: what goes wrong (kind), in which stage of a step, and on which rank.

A stage is a function of the product, which is wrapped in the process of one rank; the product knows
nothing of it.
"""

from __future__ import annotations

import errno
import importlib
import os
import signal
import time
from collections.abc import Callable
from typing import Any, NamedTuple

SLOW_SECONDS = 3.0
"""Of a slow rank and of one that is stopped for a while: longer than any poll, shorter than the
timeout of groups.
"""

ENDS = ("exception", "KILL", "STOP", "end of data", "other data", "other options", "disk full")
"""Kinds that end a run; the others only delay it."""


class Layout(NamedTuple):
    """One of the six."""

    world_size: int
    flags: str
    last_data_rank: int = 0


LAYOUTS = {
    "DP2": Layout(2, "", 1),
    "TP2": Layout(2, "--tensor-model-parallel-size 2 --sequence-parallel"),
    "PP2": Layout(2, "--pipeline-model-parallel-size 2"),
    "CP2": Layout(2, "--context-parallel-size 2"),
    "DP2xPP2": Layout(4, "--pipeline-model-parallel-size 2", 1),
    "DP2xTP2": Layout(4, "--tensor-model-parallel-size 2 --sequence-parallel", 2),
}


class Stage(NamedTuple):
    """A function, and at which of its calls the fault comes: at step 3 or 4 of a run that continues
    step 2.
    """

    owner: str
    name: str
    call: int = 1
    on: str = "any"
    """Which ranks call it: any, data ranks, or the scheduling rank."""


_EXCHANGE = "megatron.packing.step.exchange"
STAGES = {
    "start": Stage("megatron.sft.data.datasets", "build_datasets"),
    "draw": Stage("megatron.sft.data.stream:SampleStream", "__next__", 3, "data"),
    "encode": Stage("megatron.sft.data.chat_encoder:ChatEncoder", "encode", 5, "data"),
    "gather": Stage(_EXCHANGE, "gather", 2, "data"),
    "decide": Stage(_EXCHANGE, "decide", 2, "scheduling"),
    "move": Stage("megatron.packing.step.global_batch", "move", 2, "data"),
    "pack": Stage("megatron.packing.step.global_batch", "pack", 2),
    "forward": Stage("megatron.sft.training.passes", "forward_step", 2),
    "backward": Stage("megatron.core.pipeline_parallel.schedules", "backward_step", 2),
    "optimizer": Stage("megatron.sft.training.update:Updater", "update_weights", 2),
    "reduce": Stage("megatron.sft.training.train", "Reduction", 2),
    "evaluate": Stage("megatron.sft.training.train:Trainer", "_evaluate"),
    "save": Stage("megatron.sft.model.checkpoints.save", "write_parts"),
    "load": Stage("megatron.sft.model.checkpoints.content", "_load_state"),
    "stream": Stage("megatron.blending.loading.chunk_loader:ChunkLoader", "__next__", 3, "data"),
    # Where a full disk is found out, beside a file of a checkpoint that is being written.
    "shard": Stage("megatron.core.dist_checkpointing", "save"),
    "tracker": Stage("megatron.sft.model.checkpoints.save", "track", 1, "scheduling"),
    "metrics": Stage("megatron.sft.report.run_folder:RunLog", "step", 2, "scheduling"),
}


class Fault(NamedTuple):
    """One of the matrix."""

    kind: str
    stage: str

    def __str__(self) -> str:
        return f"{self.kind} in {self.stage}"

    def rank(self, layout: Layout) -> int:
        """The last rank that does the stage; for KILL and STOP the first, which writes the logs and
        decides.
        """
        if self.kind in ("KILL", "STOP") or STAGES[self.stage].on == "scheduling":
            return 0
        return layout.last_data_rank if STAGES[self.stage].on == "data" else layout.world_size - 1

    def options(self) -> list[str]:
        """Of all ranks: encoding is done by a process of its own."""
        return ["--num-workers", "1" if self.stage == "encode" else "0"]

    def inject(self) -> list[str]:
        """Make the fault come in this process; returns what differs in its options."""
        if self.kind == "other options":
            return {"start": ["--lr", "2e-2"], "load": ["--hidden-size", "32"]}[self.stage]
        if self.kind == "other data":
            return ["--data-path", os.environ["OTHER_DATA"]]
        stage = STAGES[self.stage]
        module, _, name = stage.owner.partition(":")
        owner: Any = importlib.import_module(module)
        owner = getattr(owner, name) if name else owner
        setattr(owner, stage.name, self._wrapped(getattr(owner, stage.name), stage.call))
        return []

    def _wrapped(self, function: Callable[..., Any], call: int) -> Callable[..., Any]:
        calls = 0

        def wrapped(*arguments: Any, **keywords: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == call:
                self._happen()
            return function(*arguments, **keywords)

        return wrapped

    def _happen(self) -> None:
        if self.kind == "exception":
            raise MemoryError(f"injected in {self.stage}")
        if self.kind == "end of data":
            raise StopIteration
        if self.kind == "disk full":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "injected")
        if self.kind == "slow":
            time.sleep(SLOW_SECONDS)
            return
        if self.kind == "STOP+CONT" and os.fork() == 0:
            time.sleep(SLOW_SECONDS)
            os.kill(os.getppid(), signal.SIGCONT)
            os._exit(0)
        os.kill(os.getpid(), signal.SIGKILL if self.kind == "KILL" else signal.SIGSTOP)


_STEP = (
    "start",
    "draw",
    "encode",
    "gather",
    "decide",
    "move",
    "pack",
    "forward",
    "backward",
    "optimizer",
)
_ALL = (*_STEP, "reduce", "evaluate", "save", "load")
MATRIX = [
    *(Fault(kind, stage) for kind in ("exception", "KILL") for stage in _ALL),
    *(Fault("STOP", stage) for stage in ("draw", "gather", "forward", "reduce", "save")),
    *(
        Fault("slow", stage)
        for stage in ("start", "draw", "gather", "pack", "backward", "reduce", "save")
    ),
    *(
        Fault("STOP+CONT", stage)
        for stage in ("encode", "decide", "move", "forward", "optimizer", "evaluate", "load")
    ),
    Fault("end of data", "stream"),
    Fault("other data", "start"),
    *(Fault("other options", stage) for stage in ("start", "load")),
    Fault("KILL", "shard"),
    *(Fault("disk full", stage) for stage in ("shard", "save", "tracker", "metrics")),
]
