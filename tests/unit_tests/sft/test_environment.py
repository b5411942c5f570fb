"""What a start of the trainer does before megatron-core is imported."""

import gc
import importlib
import re
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch

from megatron.sft.environment import (
    check_temporary_folder,
    quick_imports,
    world_from_environment,
)

ROOT = Path(__file__).resolve().parents[3]


def test_compiling_waits_for_the_first_call(monkeypatch):
    """Importing torch's compiler is a quarter of what a start takes, for functions that most runs
    never call.
    """
    compiled = []

    def compile_now(function, **options):
        compiled.append((function.__name__, options))
        return function

    monkeypatch.setattr(torch, "compile", compile_now)
    with quick_imports():

        @torch.compile(dynamic=True)
        def twice(x):
            return 2 * x

        @torch.compile
        def thrice(x):
            return 3 * x

    assert torch.compile is compile_now
    assert not compiled
    assert [twice(2), twice(x=3), thrice(2)] == [4, 6, 6]
    assert compiled == [("twice", {"dynamic": True}), ("thrice", {})]
    assert twice.__name__ == "twice"


def test_imports_are_quick_and_what_they_hide_is_there_afterwards(monkeypatch):
    """Collections of cycles among modules that stay are a quarter of a start; a run that logs to a
    board needs it later.
    """
    monkeypatch.delitem(sys.modules, "torch.utils.tensorboard", raising=False)
    gc.unfreeze()
    with quick_imports():
        assert not gc.isenabled()
        with pytest.raises(ImportError):
            importlib.import_module("torch.utils.tensorboard")
    assert gc.isenabled()
    assert gc.get_freeze_count() > 0
    gc.unfreeze()
    importlib.import_module("torch.utils.tensorboard")


@pytest.mark.parametrize("where", ["> /dev/full", "| true", ">&-"])
def test_output_that_nobody_takes(where):
    """A closed terminal or a full disk behind a log would end a run of days at its next line."""
    code = (
        "from megatron.sft.environment import outlive_output; outlive_output(); import sys, time; "
        "time.sleep(0.1);[print('x' * 1000, flush=True) for _ in range(200)]; print('left'); "
        "print('done', file=sys.stderr)"
    )
    command = f"set -o pipefail; {sys.executable} -c {shlex.quote(code)} {where}"
    done = subprocess.run(
        ["bash", "-c", command], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stderr) == (0, "done\n")


@pytest.mark.parametrize(
    ("variables", "fault"),
    [
        ({"RANK": "x"}, "RANK must be a whole number, but is 'x' in the environment; unset it"),
        ({"WORLD_SIZE": ""}, "WORLD_SIZE must be a whole number, but is '' in the environment"),
        ({"LOCAL_RANK": "-1"}, "LOCAL_RANK must be a whole number, but is '-1'"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "RANK must be less than WORLD_SIZE, but they are 2 and"),
    ],
)
def test_wrong_numbers_of_a_launcher_are_named(monkeypatch, variables, fault):
    """A script that sets them by hand, with a typo, ended in a traceback of int()."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    assert world_from_environment() == (0, 1)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=re.escape(fault)):
        world_from_environment()


def test_a_missing_temporary_folder_is_named(tmp_path, monkeypatch):
    """The first data worker failed, or torch's compiler, on a path that the user has nowhere."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "gone"))
    told = r"temporary files cannot be made in .*/gone: No such file or directory; set TMPDIR to a"
    with pytest.raises(ValueError, match=told):
        check_temporary_folder()
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setattr(tempfile, "_candidate_tempdir_list", lambda: [str(tmp_path / "gone")])
    with pytest.raises(ValueError, match="No usable temporary directory found in"):
        check_temporary_folder()


@pytest.mark.slow
@pytest.mark.parametrize(("module", "freed"), [("triton", "freed"), ("other", "")])
def test_triton_is_freed_at_the_end(module, freed):
    """Else each rank ends with a hundred lines, as "nanobind: leaked 514 functions!"."""
    code = f"""
import sys, types
from megatron.sft.environment import quick_imports

class Function:
    def __del__(self, write=sys.stdout.write):
        write("freed")

made = sys.modules[{module!r}] = types.ModuleType({module!r})
made.function = Function()
made.function.cycle = made.function
with quick_imports():
    pass
"""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (ended.stdout, ended.stderr) == (freed, "")
