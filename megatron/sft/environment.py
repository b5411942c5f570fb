"""pure. The environment of this process: the launcher's variables, signals, output streams, and the
last line when it ends.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import json
import logging
import os
import re
import signal
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache, partial, wraps
from pathlib import Path
from typing import Any, NoReturn, TextIO

from megatron.packing.quoting import shortened, shown

_ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
LAUNCHED = "MEGATRON_SFT_LAUNCHED"
"""Variable that is set if `megatron.sft.launch` started this process. The launching process then
prints the error that ended the run.
"""


def world_from_environment() -> tuple[int, int]:
    """Returns (rank, world size) from the launcher's variables; (0, 1) without a launcher. Raises
    ValueError if they are not valid.
    """
    rank = _number_from_environment("RANK", 0)
    world_size = _number_from_environment("WORLD_SIZE", 1)
    if rank >= world_size:
        raise ValueError(
            f"RANK must be less than WORLD_SIZE, but they are {rank} and {world_size} in the "
            "environment; unset both, or start with torchrun, which sets them"
        )
    local_rank()
    return rank, world_size


def local_rank() -> int:
    """Returns this rank's number on its machine."""
    return _number_from_environment("LOCAL_RANK", 0)


def _number_from_environment(name: str, default: int) -> int:
    text = os.environ.get(name, str(default))
    if not re.fullmatch("[0-9]{1,9}", text):
        raise ValueError(
            f"{name} must be a whole number, but is {shown(text)} in the environment; unset it, or "
            "start with torchrun, which sets it"
        )
    return int(text)


def check_temporary_folder() -> None:
    """Raises ValueError if temporary files cannot be made. Data workers need them."""
    try:
        with tempfile.TemporaryFile():
            pass
    except OSError as error:
        place = f" in {tempfile.tempdir}" if error.filename else ""
        raise ValueError(
            f"temporary files cannot be made{place}: {error.strerror}; set TMPDIR to a "
            "folder that can be written to"
        ) from None


def default_num_workers() -> int:
    """Returns the number of data workers of each rank: its share of the cores, less one to compute
    and one to prepare batches; at most 4.
    """
    ranks = max(1, _number_from_environment("LOCAL_WORLD_SIZE", 1))
    return max(0, min(4, len(os.sched_getaffinity(0)) // ranks - 2))


def silence_warnings(rank: int) -> None:
    """Hides warnings that megatron-core and torch print when they are imported. Errors of all ranks
    are still printed.
    """
    for notice in (
        "Apex is not installed",
        "transformer_engine",
        "Transformer Engine",
        "FutureWarning",
        "fused Adam",
    ):
        warnings.filterwarnings("ignore", message=f".*{notice}.*")
    warnings.filterwarnings("ignore", category=FutureWarning)
    warnings.filterwarnings("ignore", module=r"megatron\.core.*|torch\.distributed.*")
    if rank != 0:
        warnings.simplefilter("ignore")
        logging.getLogger("megatron.sft").setLevel(logging.ERROR)
    # cpp_extension warns where CUDA's compiler is installed, but no GPU.
    for name in ("megatron.core", "torch.utils.cpp_extension"):
        logging.getLogger(name).setLevel(logging.ERROR)


@contextmanager
def quick_imports() -> Iterator[None]:
    """Context in which importing torch and megatron-core takes two thirds of the usual time.

    - `torch.compile` imports its compiler only when a compiled function is called. megatron-core
      decorates a dozen functions, and most of them are never called.
    - TensorBoard and wandb appear as not installed. megatron-core imports them only for type
      annotations of its timers.
    - Python's cyclic garbage collector is off, and later skips the modules, which are never freed.
    """
    was_collecting = gc.isenabled()
    gc.disable()
    hidden = [name for name in ("torch.utils.tensorboard", "wandb") if name not in sys.modules]
    sys.modules.update(dict.fromkeys(hidden))  # type: ignore[arg-type]  # None: an ImportError
    try:
        with _lazy_compile():
            yield
        gc.freeze()
        atexit.register(_unfreeze_triton)
    finally:
        for name in hidden:
            del sys.modules[name]
        if was_collecting:
            gc.enable()


def _unfreeze_triton() -> None:
    """Lets Python free all modules at exit if Triton is imported: Triton (nanobind) prints a
    hundred lines about objects that are not freed. Otherwise they are not freed, which saves a
    second.
    """
    if "triton" in sys.modules:
        gc.unfreeze()


@contextmanager
def _lazy_compile() -> Iterator[None]:
    import torch

    compile_now = torch.compile

    def compile_when_called(function: Any = None, **options: Any) -> Any:
        if function is None:
            return partial(compile_when_called, **options)
        compiled = cache(lambda: compile_now(function, **options))
        return wraps(function)(lambda *arguments, **named: compiled()(*arguments, **named))

    torch.compile = compile_when_called  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.compile = compile_now


def let_memory_grow() -> None:
    """Lets torch's allocator on CUDA enlarge its segments, unless the user has configured it.
    Before torch is imported.

    Packs have other lengths in each step. Freed segments of a fixed size are then too small for the
    next ones, and stay beside them until memory runs out.
    """
    if "PYTORCH_CUDA_ALLOC_CONF" not in os.environ:
        os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")


def keep_launch_order() -> None:
    """Lets a GPU before Blackwell start kernels of all streams in the order of their launches,
    unless the user has configured it. Before CUDA is used.

    megatron-core launches collectives of tensor and context parallel ranks before the products that
    hide them, and such a GPU may otherwise start the products first.
    """
    if 0 < _compute_capability() < 10:
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")


def _compute_capability() -> int:
    """Returns the major number of the machine's first GPU; 0 without one. It asks the driver's
    library, as asking CUDA would start it.
    """
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return 0
    gpu, major, minor = ctypes.c_void_p(), ctypes.c_int(), ctypes.c_int()
    # Each call only returns an error if the one before it failed.
    nvml.nvmlInit_v2()
    nvml.nvmlDeviceGetHandleByIndex_v2(0, ctypes.byref(gpu))
    nvml.nvmlDeviceGetCudaComputeCapability(gpu, ctypes.byref(major), ctypes.byref(minor))
    return major.value


def end_with_launcher() -> None:
    """Makes Linux send SIGTERM to this process when torchrun is killed: nothing else ends it."""
    if "TORCHELASTIC_RUN_ID" in os.environ and sys.platform == "linux":
        set_parent_death_signal = 1
        ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGTERM)


def outlive_output() -> None:
    """Keeps this process alive if stdout or stderr is closed or full: its output is dropped."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is not None and not isinstance(stream, _Output):
            setattr(sys, name, _Output(stream))


class _Output:
    """Wraps a stream. From its first failing write on, it writes to the null device."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """Writes the text, or drops it if that fails."""
        try:
            return self._stream.write(text)
        except OSError:
            self._drop()
            return len(text)

    def flush(self) -> None:
        """Flushes the stream, or drops its text if that fails."""
        try:
            self._stream.flush()
        except OSError:
            self._drop()

    def _drop(self) -> None:
        null = os.open(os.devnull, os.O_WRONLY)
        # Replace the file descriptor itself, so that buffered text, child processes and C libraries
        # write to the null device as well.
        os.dup2(null, self._stream.fileno())
        os.close(null)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def program() -> str:
    """Returns the name that the user started this process by."""
    name = Path(sys.argv[0]).name
    if LAUNCHED in os.environ:
        return "megatron-sft"
    return "python -m megatron.sft" if name == "__main__.py" else name


def fail(message: str, rank: int, details: Sequence[str] = ()) -> NoReturn:
    """Ends this process with status 2. Rank 0 prints the message in one line. Messages of all ranks
    are in torchrun's summary, the last thing on the terminal; under another launcher each rank
    prints its own.

    details: lines that rank 0 prints before the message.
    """
    if rank == 0:
        _print_lines(details)
    if rank != 0 and not has_error_file():
        message = f"rank {world_from_environment()[0]}: {message}"
    tell_torchrun(message, is_shown=rank == 0 or not has_error_file())
    raise SystemExit(2)


def has_error_file() -> bool:
    """Returns whether torchrun prints what this process reports."""
    return _ERROR_FILE in os.environ


def exit_with_message(program: str, failure: Exception) -> NoReturn:
    """Ends a subcommand of one process with status 2 and one line, below the failure's details."""
    _print_lines(getattr(failure, "details", ()))
    message = shortened(" ".join(str(failure).split()))
    print(f"{program}: error: {message}", file=sys.stderr, flush=True)
    raise SystemExit(2)


def _print_lines(lines: Sequence[str]) -> None:
    for line in lines:
        print(line.rstrip(), file=sys.stderr)


def tell_torchrun(message: str, *, is_shown: bool) -> None:
    """Writes a message for torchrun's summary of this process. With `is_shown` prints it, too."""
    line = f"{program()}: error: {shortened(' '.join(message.split()))}"
    if is_shown and LAUNCHED not in os.environ:
        print(line, file=sys.stderr, flush=True)
    path = os.environ.get(_ERROR_FILE)
    if path:
        extra = {"py_callstack": line, "timestamp": str(int(time.time()))}
        with suppress(OSError):  # the summary is a convenience: the message may be printed already
            Path(path).write_text(
                json.dumps({"message": {"message": line, "extraInfo": extra}}), encoding="utf-8"
            )
