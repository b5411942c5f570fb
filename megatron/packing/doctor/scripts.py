"""tensor. Subjects in files of their users: functions that make one, and scripts with a hook."""

from __future__ import annotations

import importlib.util
import os
import runpy
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from megatron.packing.doctor.hook import ENVIRONMENT, Examined
from megatron.packing.doctor.report import Diagnosis
from megatron.packing.doctor.subject import Subject
from megatron.packing.doctor.unusable import reason_of


def load_subject(text: str) -> Subject:
    """Returns the subject that a function in a Python file makes.

    Raises:
        ValueError: if there is no such file or function, or it returns something else.
    """
    file, _, name = text.rpartition(":")
    path = Path(file)
    if Path(text.removesuffix(":")).is_file():
        raise ValueError(
            f"--subject {text}: name a function of it, too: {text.rstrip(':')}:FUNCTION"
        )
    if not file or not path.is_file():
        raise ValueError(
            f"--subject {text}: there is no file {file or text}; pass FILE.py:FUNCTION"
        )
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise ValueError(f"--subject {text}: {file} is not a Python file; pass FILE.py:FUNCTION")
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
        make = getattr(module, name, None)
        subject = make() if callable(make) else None
    except (Exception, SystemExit) as error:  # of anybody's code
        raise ValueError(f"--subject {text}: {reason_of(error)}") from error
    if not callable(make):
        raise ValueError(f"--subject {text}: {file} has no function {name}")
    if not isinstance(subject, Subject):
        raise ValueError(
            f"--subject {text}: {name} returned {type(subject).__name__}, not a "
            "megatron.packing.doctor.subject.Subject"
        )
    return subject


def run_script(path: Path, arguments: Sequence[str]) -> tuple[Diagnosis, bool]:
    """Runs a script up to its hook. Returns the diagnosis, and whether this process reports it.

    Raises:
        ValueError: if there is no such file, it raises, or it ends without reaching a hook.
    """
    if not path.is_file():
        raise ValueError(f"--script {path}: there is no such file; pass a Python script")
    try:
        with _as_started(path, arguments):
            runpy.run_path(str(path), run_name="__main__")
    except Examined as examined:
        return examined.diagnosis, examined.is_first
    except (Exception, SystemExit) as error:  # of anybody's code
        raise ValueError(
            f"--script {path} ended before examine_here: {reason_of(error)}"
            if isinstance(error, SystemExit)
            else f"--script {path}: {reason_of(error)}"
        ) from error
    raise ValueError(
        f"--script {path} ended without examine_here of megatron.packing.doctor.hook; call it in "
        "front of the training loop"
    )


@contextmanager
def _as_started(path: Path, arguments: Sequence[str]) -> Iterator[None]:
    """Sets what `python path arguments` has, and the doctor's mark, within the block."""
    argv, folders = sys.argv, list(sys.path)
    sys.argv = [str(path), *arguments]
    sys.path.insert(0, str(path.absolute().parent))
    os.environ[ENVIRONMENT] = "1"
    try:
        yield
    finally:
        del os.environ[ENVIRONMENT]
        sys.argv = argv
        sys.path[:] = folders
