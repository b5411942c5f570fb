"""The trainer as a user starts it: wrong options are answered at once, in one line."""

import os
import subprocess
import sys
import sysconfig
from importlib import import_module
from importlib.metadata import version
from pathlib import Path

import pytest
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

import pretrain_sft
from megatron.packing.scheduling.registry import SCHEDULERS
from megatron.sft import __main__
from megatron.sft.commands import COMMANDS
from megatron.sft.environment import fail

ROOT = Path(__file__).parents[3]
GOOD = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --train-iters 1 "
    "--global-batch-size 2"
)
GOOD_ARGUMENTS = [*GOOD.split(), "--lr", "1e-3", "--mock-data"]


def run(command):
    """Run in the repository's root as a process that no launcher started."""
    ours = {
        name: value
        for name, value in os.environ.items()
        if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")
    }
    return subprocess.run(
        [sys.executable, *command], cwd=ROOT, env=ours, capture_output=True, text=True, timeout=60
    )


@pytest.fixture
def main(monkeypatch, capsys):
    """Return a function that runs `pretrain_sft.main` here; status, stdout and stderr, as of a
    process of its own.
    """
    monkeypatch.setattr("faulthandler.register", lambda number: None)

    def run_main(*arguments, **environment):
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "TORCHELASTIC_ERROR_FILE"):
            monkeypatch.delenv(name, raising=False)
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr("sys.argv", ["pretrain_sft.py", *arguments])
        with pytest.raises(SystemExit) as end:
            pretrain_sft.main()
        return end.value.code, *capsys.readouterr()

    return run_main


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([*GOOD_ARGUMENTS, "--num-layer", "2"], "did you mean --num-layers?"),
        ([*GOOD_ARGUMENTS, "--lr", "fast"], "--lr"),
        ([*GOOD_ARGUMENTS, "--hidden-size", "65"], "--num-attention-heads"),
        ([*GOOD_ARGUMENTS, "--data-path", "x.jsonl"], "not both"),
        ([*GOOD_ARGUMENTS, "--tensor-model-parallel-size", "2"], "--nproc-per-node 2"),
        ([*GOOD_ARGUMENTS, "--config", "no-such-file.yaml"], "no-such-file.yaml"),
    ],
)
def test_wrong_options_end_with_one_line_and_status_two(arguments, words, main):
    """A traceback hides the message; status 0 lets a script go on to evaluate a model that was
    never trained.
    """
    status, out, err = main(*arguments)
    assert (status, out) == (2, "")
    (line,) = err.splitlines()
    assert line.startswith("pretrain_sft.py: error: ")
    assert words in line


@pytest.mark.parametrize(
    ("command", "name"),
    [
        (["-m", "megatron.sft"], "python -m megatron.sft"),
        ([str(Path(sysconfig.get_path("scripts"), "megatron-sft"))], "megatron-sft"),
    ],
)
def test_installed_commands_are_the_same_and_go_by_their_own_names(command, name):
    """A way to start it that only a checkout has, or a message in the name of a file that the user
    does not have.
    """
    done = run([*command, *GOOD_ARGUMENTS, "--num-layer", "2"])
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"{name}: error: unknown option --num-layer; did you mean --num-layers?\n"


@pytest.mark.parametrize("name", ["fit", "plan", "train"])
def test_an_interrupted_command_is_one_line(name, monkeypatch, capsys):
    """fit ended in a traceback, each line of it behind six [rank0]; train did so while it imports,
    and after a second Ctrl-C.
    """

    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(import_module(COMMANDS[name].module), "main", interrupt)
    monkeypatch.setattr("sys.argv", ["megatron-sft", name])
    with pytest.raises(SystemExit) as end:
        __main__.main()
    assert end.value.code == 130
    assert capsys.readouterr() == ("", f"megatron-sft {name}: interrupted\n")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(SystemExit):
        __main__.main()
    assert capsys.readouterr() == ("", "")


def test_versions_are_those_installed():
    """A report of a fault without them, or with others, sends its reader looking in the wrong
    place.
    """
    done = run(["-m", "megatron.sft", "--version"])
    names = ("megatron-sft", "megatron-core", "torch")
    assert (done.returncode, done.stdout) == (
        0,
        ", ".join(f"{name} {version(name)}" for name in names) + "\n",
    )


def test_a_process_ends_so():
    """... and of a whole process, with what the interpreter itself may add."""
    done = run(["pretrain_sft.py"])
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    assert line.startswith("pretrain_sft.py: error: ")
    assert "--num-layers" in line


def test_only_rank_zero_speaks_under_torchrun(main, tmp_path):
    """Eight ranks printing at once make the one line unreadable; without torchrun nobody else would
    tell of one.
    """
    of_rank = {"RANK": "1", "WORLD_SIZE": "2"}
    assert main("--nonsense", **of_rank, TORCHELASTIC_ERROR_FILE=str(tmp_path / "error.json")) == (
        2,
        "",
        "",
    )
    assert "error: rank 1: unknown option --nonsense" in main("--nonsense", **of_rank)[2]


def test_world_size_of_the_launcher_counts(main):
    """Options that do not fit the number of processes would hang at the first collective
    instead."""
    status, _, err = main(*GOOD_ARGUMENTS, RANK="0", WORLD_SIZE="3")
    assert status == 2
    assert "--global-batch-size 2" in err
    assert "data-parallel size 3" in err


def test_all_of_the_help_ends_with_status_zero(main):
    """A percent sign in one docstring would break all of the help."""
    status, out, _ = main("--help-all")
    assert status == 0
    assert "--sequence-packing" in out
    assert "NAMES" not in out
    assert all(name in out for name in SCHEDULERS)


@pytest.mark.parametrize("name", [None, *COMMANDS])
def test_help_is_one_screen(main, name):
    """460 lines of options hide the ten that a first run needs."""
    status, out, err = main(*([] if name is None else [name]), "--help")
    assert (status, err) == (0, "")
    assert 5 < len(out.splitlines()) <= 70
    assert max(map(len, out.splitlines())) <= 110
    assert name is not None or all(f"  {command} " in out for command in COMMANDS)


def test_help_imports_neither_torch_nor_megatron_core():
    """The first thing that a stranger types would take seconds."""
    snippet = (
        "import sys; from megatron.sft.__main__ import main; sys.argv = ['megatron-sft', name]\n"
        "try: main()\n"
        "except SystemExit: pass\n"
        "print([name for name in ('torch', 'megatron.core') if name in sys.modules])"
    )
    done = run(["-c", f"name = '--help'\n{snippet}"])
    assert done.stdout.splitlines()[-1] == "[]"


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("trian", "did you mean train?"),
        ("bake", "it is one of train, plan, "),
        ("sft", "the command of other trainers with this name is megatron-sft train"),
        ("run.yaml", "for a file of options, pass --config run.yaml"),
    ],
)
def test_unknown_commands_are_one_line(main, name, words):
    """argparse would complain of missing options, of a command that is not meant."""
    status, out, err = main(name, "--lr", "1")
    assert (status, out) == (2, "")
    (line,) = err.splitlines()
    assert line.startswith(f"pretrain_sft.py: error: unknown command {name}; {words}")


def test_answers_about_many_options_stand_above_the_line(main):
    """The last line is what a user looks at first, and torchrun's summary repeats it alone."""
    status, _, err = main("--learning_rate", "1", "--cutoff_len", "2", "--optim", "x", "--foo")
    assert status == 2
    *details, line = err.splitlines()
    assert [each.split()[:2] for each in details] == [
        ["--learning_rate", "--lr"],
        ["--cutoff_len", "--seq-length"],
        ["--optim", "drop"],
        ["--foo", "unknown"],
    ]
    assert line.startswith("pretrain_sft.py: error: 4 options are none of ours")


@pytest.mark.parametrize("name", [name for name in COMMANDS if name != "train"])
def test_every_command_shows_all_its_options(main, name):
    """--help-all is in each short help; where nothing is left out it was an unknown option."""
    status, out, err = main(name, "--help-all")
    assert (status, err) == (0, "")
    assert out.startswith(f"usage: pretrain_sft.py {name}")


def test_train_is_the_command_without_a_name(main):
    """Scripts that name no command would break."""
    arguments = [*GOOD_ARGUMENTS, "--num-layer", "2"]
    assert main("train", *arguments) == main(*arguments)


def test_wrong_options_import_neither_torch_nor_megatron_core():
    """A typing mistake would be answered after seconds of imports, on every rank."""
    snippet = (
        "import sys; from megatron.sft.__main__ import main; sys.argv = ['pretrain_sft.py', "
        "'--num-layer', '2']\n"
        "try: main()\n"
        "except SystemExit as done: print(done.code)\n"
        "print([name for name in ('torch', 'megatron.core') if name in sys.modules])"
    )
    done = run(["-c", snippet])
    assert done.stdout.splitlines() == ["2", "[]"]


@pytest.mark.parametrize("has_torchrun", [True, False])
def test_exit_is_one_line_with_status_two(capsys, monkeypatch, tmp_path, has_torchrun):
    """Every rank printing would bury the message under as many copies, but where torchrun does not
    tell of those that fail alone; status 0 would let a script go on.
    """
    monkeypatch.setattr(sys, "argv", ["somewhere/pretrain_sft.py"])
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    if has_torchrun:
        monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    of_other = "" if has_torchrun else "pretrain_sft.py: error: rank 1: bore is wide\n"
    for rank, shown in ((1, of_other), (0, "pretrain_sft.py: error: bore is wide\n")):
        with pytest.raises(SystemExit) as done:
            fail("bore is wide", rank)
        assert done.value.code == 2
        assert capsys.readouterr().err == shown


def test_any_rank_tells_torchrun(tmp_path, monkeypatch):
    """Where a file is missing on one machine only, rank 0 has nothing to say."""
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    with pytest.raises(SystemExit):
        fail("bore is wide", 3)
    failure = ProcessFailure(
        local_rank=3, pid=1, exitcode=2, error_file=str(tmp_path / "error.json")
    )
    assert ": error: bore is wide" in ChildFailedError("run", {3: failure}).format_msg()
