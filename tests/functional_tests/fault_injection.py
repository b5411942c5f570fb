"""The faults of the matrix: what goes wrong (kind), in which stage of a run, and on which rank.

A stage is a function of the product, which is wrapped in the process of one rank; the product knows
nothing of it.
"""

from __future__ import annotations

import errno
import importlib
import os
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

SLOW_SECONDS = 3.0
"""Of a slow rank and of one that is stopped for a while: longer than any poll, shorter than the
timeout of groups.
"""

ENDS = (
    *("exception", "refused", "KILL", "STOP"),
    *("end of data", "other data", "other options", "disk full"),
)
"""Kinds that end a run; the others only delay it."""


class Layout(NamedTuple):
    """A parallel layout, with or without a launcher that hosts the store and ends all ranks once
    one has failed.
    """

    world_size: int
    flags: str
    last_data_rank: int = 0
    has_launcher: bool = True


LAYOUTS = {
    "DP2": Layout(2, "", 1),
    "TP2": Layout(2, "--tensor-model-parallel-size 2 --sequence-parallel"),
    "PP2": Layout(2, "--pipeline-model-parallel-size 2"),
    "CP2": Layout(2, "--context-parallel-size 2"),
    "DP2xPP2": Layout(4, "--pipeline-model-parallel-size 2", 1),
    "DP2xTP2": Layout(4, "--tensor-model-parallel-size 2 --sequence-parallel", 2),
    "DP2 alone": Layout(2, "", 1, has_launcher=False),
    "PP2 alone": Layout(2, "--pipeline-model-parallel-size 2", has_launcher=False),
}
"""Those that are alone have no launcher."""
COVERED = ("DP2", "DP2 alone", "PP2 alone")
"""Layouts of the part that every test run does."""


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
    "groups": Stage("megatron.sft.distributed", "_check_gpus"),
    "verify": Stage("megatron.sft.model.checkpoints.files", "faults_in"),
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
    "later save": Stage("megatron.sft.model.checkpoints.save", "write_parts", 2),
    "export": Stage("megatron.sft.model.huggingface.write", "_write_weights"),
    "load": Stage("megatron.sft.model.checkpoints.content", "_load_state"),
    "stream": Stage("megatron.blending.loading.chunk_loader:ChunkLoader", "__next__", 3, "data"),
    # Where a full disk is found out, beside a file of a checkpoint that is being written.
    "shard": Stage("megatron.core.dist_checkpointing", "save"),
    "tracker": Stage("megatron.sft.model.checkpoints.save", "track", 1, "scheduling"),
    "metrics": Stage("megatron.sft.report.run_folder:RunLog", "step", 2, "scheduling"),
}
PHASES = {
    "before data": ("start", "groups", "verify", "load"),
    "data": ("draw", "stream", "encode", "gather", "decide", "move", "pack"),
    "step": ("forward", "backward", "optimizer", "reduce", "evaluate", "metrics"),
    "writing": ("save", "later save", "shard", "tracker", "export"),
}
PHASE_OF = {stage: phase for phase, stages in PHASES.items() for stage in stages}


class Fault(NamedTuple):
    """One of the matrix."""

    kind: str
    stage: str
    on_last: bool = True
    """On the last rank that does the stage; otherwise on the first, which writes the logs and
    decides.
    """

    def __str__(self) -> str:
        return f"{self.kind} in {self.stage}{'' if self.on_last else ' of rank 0'}"

    def rank(self, layout: Layout) -> int:
        """The rank on which it comes."""
        if not self.on_last or STAGES[self.stage].on == "scheduling":
            return 0
        return layout.last_data_rank if STAGES[self.stage].on == "data" else layout.world_size - 1

    def options(self, folder: Path) -> list[str]:
        """Of all ranks: encoding is done by a process of its own."""
        export = ["--save-hf", str(folder / "model")] if self.stage == "export" else []
        return [*export, "--num-workers", "1" if self.stage == "encode" else "0"]

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
        Path(os.environ["FAULT_MOMENT"]).write_text(str(time.monotonic()))
        if self.kind == "exception":
            raise MemoryError(f"injected in {self.stage}")
        if self.kind == "refused":
            raise ValueError(f"chats.jsonl:3: injected in {self.stage}")
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


AT_START = ("start", "groups", "load", "verify")
"""Stages before the first step: a signal ends a rank at once."""
_STEP = (
    *("draw", "encode", "gather", "decide", "move"),
    *("pack", "forward", "backward", "optimizer", "reduce", "evaluate"),
)
_SAVE = ("shard", "save", "tracker", "later save", "export", "metrics")


def _on_both(kind: str, stages: Sequence[str]) -> list[Fault]:
    """On rank 0, and on the last rank of those stages that others do, too."""
    faults = [Fault(kind, stage, on_last=False) for stage in stages]
    return faults + [Fault(kind, stage) for stage in stages if STAGES[stage].on != "scheduling"]


MATRIX = [
    *(Fault("exception", stage) for stage in (*AT_START, *_STEP, "save", "export")),
    *_on_both("KILL", (*AT_START, *_STEP, *_SAVE)),
    *_on_both(
        "STOP",
        (
            *AT_START,
            "draw",
            "gather",
            "forward",
            "reduce",
            "evaluate",
            "save",
            "later save",
            "export",
        ),
    ),
    *(
        Fault("slow", stage)
        for stage in ("start", "draw", "gather", "pack", "backward", "reduce", "save", "export")
    ),
    *(
        Fault("STOP+CONT", stage)
        for stage in ("encode", "decide", "move", "forward", "optimizer", "evaluate", "load")
    ),
    Fault("refused", "start"),
    Fault("end of data", "stream"),
    Fault("other data", "start"),
    *(Fault("other options", stage) for stage in ("start", "load")),
    *(Fault("disk full", stage) for stage in ("shard", "save", "tracker", "metrics")),
]
