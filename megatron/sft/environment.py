"""pure. The launcher's variables, signals and streams of this process, and its last words."""

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

from megatron.packing.user_files import shortened

_ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
LAUNCHED = "MEGATRON_SFTLAUNCHED"
"""Is set where `megatron.sft.launch` started this process, and says what ended it."""


def world_from_environment() -> tuple[int, int]:
    """Returns (rank, world size) as torchrun says; (0, 1) without a launcher.

    ValueError where they are no such numbers.
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
            f"{name} must be a whole number, but is {text!r:.60} in the environment; unset it, or "
            "start with torchrun, which sets it"
        )
    return int(text)


def check_temporary_folder() -> None:
    """Raises ValueError where temporary files, which data workers need, cannot be made."""
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
    """Returns how many processes read for each rank: its share of the cores, but for one that
    computes and one that prepares batches; at most 4.
    """
    ranks = max(1, _number_from_environment("LOCAL_WORLD_SIZE", 1))
    return max(0, min(4, len(os.sched_getaffinity(0)) // ranks - 2))


def silence_warnings(rank: int) -> None:
    """Keeps megatron-core's and torch's import-time notices out of the log; errors stay, from every
    rank.
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
    """Makes importing torch and megatron-core take two thirds of its time.

    `torch.compile` waits with importing its compiler until a function that it was given meanwhile
    is called: megatron-core decorates a dozen functions, most of which no run calls. Boards, which
    megatron-core imports for the annotations of its timers, are as if they were not installed.
    Python's collector of cycles rests, and from then on passes over the modules, which stay.
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
    """Lets Python free Triton's modules at the end: Triton (nanobind) prints a hundred lines about
    what is not freed. Without it they stay, as freeing all modules takes a second.
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


def end_with_launcher() -> None:
    """Asks to be stopped by SIGTERM when torchrun is killed, on Linux: nobody else would end this
    process.
    """
    if "TORCHELASTIC_RUN_ID" in os.environ and sys.platform == "linux":
        set_parent_death_signal = 1
        ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGTERM)


def outlive_output() -> None:
    """Lets this process outlive a standard output or error that is closed or full: what it prints
    is dropped then.
    """
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is not None and not isinstance(stream, _Output):
            setattr(sys, name, _Output(stream))


class _Output:
    """A stream that goes to the null device from its first failing write on; otherwise the stream
    that it wraps.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """Writes the text, or drops it."""
        try:
            return self._stream.write(text)
        except OSError:
            self._drop()
            return len(text)

    def flush(self) -> None:
        """Flushes what was written, or drops it."""
        try:
            self._stream.flush()
        except OSError:
            self._drop()

    def _drop(self) -> None:
        null = os.open(os.devnull, os.O_WRONLY)
        # The descriptor itself, so that buffered text, other processes and C libraries follow.
        os.dup2(null, self._stream.fileno())
        os.close(null)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def program() -> str:
    """Returns by what name the user started this process."""
    name = Path(sys.argv[0]).name
    if LAUNCHED in os.environ:
        return "megatron-sft"
    return "python -m megatron.sft" if name == "__main__.py" else name


def fail(message: str, rank: int, details: Sequence[str] = ()) -> NoReturn:
    """Ends this process with status 2. Rank 0 says why in one line, and torchrun in its summary,
    the last thing on the terminal, of every rank that has something to say; under another launcher
    each rank says it itself.

    details: lines that rank 0 prints before.
    """
    if rank == 0:
        _print_lines(details)
    if rank != 0 and _ERROR_FILE not in os.environ:
        message = f"rank {world_from_environment()[0]}: {message}"
    tell_torchrun(message, is_shown=rank == 0 or _ERROR_FILE not in os.environ)
    raise SystemExit(2)


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
    """Lets torchrun's summary say why this process ends; `is_shown`: and this process itself."""
    line = f"{program()}: error: {shortened(' '.join(message.split()))}"
    if is_shown and LAUNCHED not in os.environ:
        print(line, file=sys.stderr, flush=True)
    path = os.environ.get(_ERROR_FILE)
    if path:
        extra = {"py_callstack": line, "timestamp": str(int(time.time()))}
        with suppress(OSError):  # what was printed must do
            Path(path).write_text(
                json.dumps({"message": {"message": line, "extraInfo": extra}}), encoding="utf-8"
            )
