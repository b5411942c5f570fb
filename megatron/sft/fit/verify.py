"""mcore. `megatron-sft fit --verify`: two steps for real on one GPU, and the bytes that torch's
allocator held at most in each phase.

`python -m megatron.sft.fit.verify` reads a pickled `Request` from its standard input and prints a
JSON object: phase -> bytes. A process of its own, as one with CUDA cannot be a fake world.
"""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from megatron.packing.device import Device
from megatron.sft.environment import let_memory_grow, quick_imports, silence_warnings
from megatron.sft.fit.counter import ByteCounter, Phase
from megatron.sft.launch import child_environment

if TYPE_CHECKING:
    from megatron.sft.fit.estimate import Request, StageEstimate

_NO_GPU = 3
"""Exit status of the process where torch finds no GPU."""


class AllocatorCounter(ByteCounter):
    """Takes the bytes of each phase from torch's allocator.

    Sees no operations: under a dispatch mode torch.compile leaves functions as they are, and fused
    SwiGLU would be measured without fusion.
    """

    def __enter__(self) -> AllocatorCounter:
        return self

    def __exit__(self, *exception: Any) -> None:
        pass

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """See `ByteCounter`."""
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        start = torch.cuda.memory_allocated()
        yield
        torch.cuda.synchronize()
        end, peak = torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated()
        self.phases.append(Phase(name=name, start=start, end=end, peak=peak, at_peak={}))


def measured(request: Request, counter: ByteCounter) -> dict[str, int]:
    """Returns the peak of each phase of two steps on this device, the second with the optimizer's
    state.
    """
    with quick_imports():
        from megatron.sft.distributed import process_groups
        from megatron.sft.fit.stages import one_step
        from megatron.sft.fit.step import run_step
    config = one_step(request.config)
    with process_groups(config) as device:
        run_step(config, request.vocab_size, request.data(1), counter, device=device)
    return {phase.name: phase.peak for phase in counter.phases}


def measured_elsewhere(request: Request, environment: Mapping[str, str]) -> dict[str, int]:
    """Returns the same from a process that sees the GPU; ValueError where it cannot."""
    if request.world_size != 1:
        raise ValueError(
            "--verify runs the steps on one GPU; pass --world-size 1, and a layout and a model "
            "that fit there"
        )
    command = [sys.executable, "-m", "megatron.sft.fit.verify"]
    done = subprocess.run(
        command,
        input=pickle.dumps(request),
        capture_output=True,
        env=child_environment(environment),
    )
    if done.returncode == _NO_GPU:
        raise ValueError("--verify needs a GPU that torch can use, but there is none here")
    if done.returncode:
        last = done.stderr.decode(errors="replace").strip().splitlines()[-1:]
        raise ValueError(f"--verify failed on the GPU: {' '.join(last)}")
    return json.loads(done.stdout.splitlines()[-1])


def comparison(stage: StageEstimate, found: Mapping[str, int]) -> Iterator[tuple[str, int, int]]:
    """Yields phase, estimated and measured bytes."""
    states = sum(part.num_bytes for part in stage.states)
    passes = sum(part.num_bytes for part in stage.passes)
    yield "building the model", stage.build.num_bytes, found["build"]
    yield "passes", states + passes, found["forward and backward 2"]
    yield "optimizer step", states + stage.optimizer.num_bytes, found["optimizer 2"]


def main() -> None:
    """See the module."""
    silence_warnings(0)
    let_memory_grow()  # torch reads it when it first uses the GPU
    if not Device.here().is_gpu:
        raise SystemExit(_NO_GPU)
    request = pickle.load(sys.stdin.buffer)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        os.environ.pop(name, None)
    print(json.dumps(measured(request, AllocatorCounter())))


if __name__ == "__main__":
    main()
