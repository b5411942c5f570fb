"""torchrun in the same command: which options are its own, and what ends the terminal's last
line.
"""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from megatron.packing.flags import FlagError
from megatron.sft.launch import Launch, taken_apart, torchrun_arguments

ROOT = Path(__file__).parents[3]
MODULE = ("-m", "megatron.sft")
GOOD = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 2 --seq-length 64 --train-iters 1 "
    "--global-batch-size 2 --lr 1e-3 --mock-data --eval-iters 0"
)


def run(arguments, cwd=ROOT, **variables):
    """Run as a process that no launcher started."""
    left_out = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
    ours = {name: value for name, value in os.environ.items() if name not in left_out} | variables
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=cwd, env=ours, capture_output=True, text=True, timeout=120)


def test_options_are_taken_apart():
    """An option that goes to the wrong one of the two is refused there."""
    given = ["--nproc_per_node=2", "--lr", "1", "--rdzv-endpoint", "a:1", "--bf16"]
    torchrun = ["--nproc-per-node", "2", "--rdzv-endpoint", "a:1"]
    assert taken_apart(given) == Launch(torchrun, ["--lr", "1", "--bf16"])
    assert taken_apart(["--lr", "1"]) == Launch([], ["--lr", "1"])


@pytest.mark.parametrize(
    ("given", "size"),
    [
        ("--nproc-per-node 8", 8),
        ("--nnodes 2 --nproc-per-node 8", 16),
        ("--nproc-per-node gpu", None),
    ],
)
def test_number_of_processes(given, size):
    """Options are checked against it before anything starts."""
    assert taken_apart(given.split()).world_size == size


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("--nproc-per-node", "needs a value"),
        ("--nnodes 2", "--nnodes needs --nproc-per-node"),
        (
            "--nproc-per-node two",
            "--nproc-per-node two must be a number of processes from 1, or gpu",
        ),
        ("--nproc-per-node=0", "--nproc-per-node 0 must be a number of processes from 1, or gpu"),
        ("--nproc 2", "unknown option --nproc; did you mean --nproc-per-node?"),
        ("--nproc_per_nod 2", "unknown option --nproc_per_nod; did you mean --nproc-per-node?"),
    ],
)
def test_halves_are_refused(given, said):
    """Two machines would each train alone."""
    with pytest.raises(FlagError, match=said):
        taken_apart(given.split())


def test_a_mistyped_flag_is_the_only_line():
    """Under torchrun it is line 1 of 42, or is missing, where another rank failed first."""
    done = run([*MODULE, "--nproc-per-node", "2", *GOOD.split(), "--lrr", "1"])
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.endswith("error: unknown option --lrr; did you mean --lr?\n")
    assert done.stderr.count("\n") == 1


@pytest.mark.slow
def test_what_torchrun_refuses_is_the_only_line():
    """It was the last of 25, a traceback."""
    done = run([*MODULE, "--nproc-per-node", "1", "--nnodes", "2:1", *GOOD.split()])
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    assert line.startswith("python -m megatron.sft: error: torchrun: min_nodes must be > 0")


@pytest.mark.slow
def test_what_ends_a_run_is_the_last_line(tmp_path):
    """torchrun's own traceback and summary push it off the screen."""
    done = run([*MODULE, "--nproc-per-node", "2", *GOOD.split(), "--save", "/proc/none"])
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith("megatron-sft: error: /proc/none must be a folder")


NOT_INSTALLED = """
import importlib.metadata, sys
sys.meta_path = [one for one in sys.meta_path if "Editable" not in getattr(one, "__name__", "")]
by_name = importlib.metadata.distribution
def distribution(name):
    if name == "megatron-sft":
        raise importlib.metadata.PackageNotFoundError(name)
    return by_name(name)
importlib.metadata.distribution = distribution
"""
"""Takes the installed project away from every process that has it as sitecustomize.py."""


@pytest.mark.slow
def test_a_run_from_a_checkout_that_is_not_installed(tmp_path):
    """Ends with its report and status 0. Whole runs of other tests are forks, which draw none.

    The processes did not find the package outside the checkout's folder, and the run ended after
    reading its data, for its own version, which ranks compare.
    """
    (tmp_path / "sitecustomize.py").write_text(NOT_INSTALLED)
    script = [str(ROOT / "pretrain_sft.py"), "train", "--nproc-per-node", "1", *GOOD.split()]
    done = run(
        [*script, "--run-dir", str(tmp_path / "run")], cwd=tmp_path, PYTHONPATH=str(tmp_path)
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "step 1/1" in done.stdout
    assert (tmp_path / "run/report.png").exists()


def test_a_signal_that_is_ignored_stays_so():
    """torchrun would end a run that somebody left behind with nohup."""
    found = Launch(["--nproc-per-node", "2"], ["--lr", "1"])
    heard = (signal.SIGTERM, signal.SIGINT, signal.SIGQUIT)
    # A shell starts what it runs in the background with some of these ignored.
    before = {each: signal.signal(each, signal.SIG_DFL) for each in (*heard, signal.SIGHUP)}
    try:
        assert "SIGHUP" in torchrun_arguments(found)[1]
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        name, signals, *rest = torchrun_arguments(found)
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
    assert (name, signals) == ("--signals-to-handle", "SIGTERM,SIGINT,SIGQUIT")
    assert rest == [*found.torchrun, "-m", "megatron.sft", "train", *found.training]
