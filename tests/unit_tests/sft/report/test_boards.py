"""What is drawn while a run goes, also where it is killed and continued."""

import contextlib
import json
import math
import sys
from dataclasses import replace

import pytest

from megatron.sft.options.output import OutputConfig
from megatron.sft.report.boards import open_boards
from megatron.sft.report.metrics import DRAWN, Evaluation
from megatron.sft.report.metrics_writer import MetricsWriter
from tests.unit_tests.sft.command_line import assert_refused
from tests.unit_tests.sft.runs import SOURCE, STEP

STUB = """
import json, pathlib

class Run:
    id = "a1b2"

    def __init__(self, **options):
        self.log({"init": options})

    def log(self, values, **more):
        with pathlib.Path(__file__).with_name("log.jsonl").open("a") as file:
            file.write(json.dumps([values, more]) + "\\n")

    def finish(self, **options):
        self.log({"finish": options})

def init(**options):
    if options["project"] == "locked":
        raise RuntimeError("no API key")
    return Run(**options)
"""

OF_EVALUATION = {"valid/loss", "valid/perplexity"}


def run_part(output, run_dir, resume_iteration, iterations):
    """A run that draws these steps, and evaluates after the last."""
    run_dir.mkdir(exist_ok=True)
    boards = open_boards(output, run_dir, resume_iteration, {"lr": 0.1})
    writer = MetricsWriter(
        run_dir, train_iters=9, log_interval=10, resume_iteration=resume_iteration, boards=boards
    )  # fmt: skip
    for iteration in iterations:
        writer.step(
            replace(STEP, iteration=iteration, loss=float(iterations[0]), sources={"a": SOURCE})
        )
    writer.evaluation(Evaluation(iteration=iterations[-1], split="valid", loss=2.0, num_tokens=10))
    writer.close()


def test_tensorboard_scalars(tmp_path):
    """Without it a wrong name would show only at the first step of a long run with TensorBoard."""
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    output = OutputConfig(tensorboard_dir=str(tmp_path / "tensorboard"))
    run_part(output, tmp_path, None, [1, 2, 3, 4])
    run_part(output, tmp_path, 2, [3, 4])  # killed after step 4 with a checkpoint of step 2
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    names = {*(f"train/{name}" for name in DRAWN), "train/loss of a", *OF_EVALUATION}
    assert set(events.Tags()["scalars"]) == names
    assert [(point.step, point.value) for point in events.Scalars("train/loss")] == [
        (1, 1),
        (2, 1),
        (3, 3),
        (4, 3),
    ]


def test_missing_tensorboard_is_one_clear_error(tmp_path, monkeypatch):
    """Without it the user would get a stack of imports that doesn't say which option asked for the
    package.
    """
    output = OutputConfig(tensorboard_dir="tensorboard")
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(
        ValueError,
        match="--tensorboard-dir needs the package tensorboard; do pip install tensorboard",
    ):
        open_boards(output, tmp_path, None, {})


@pytest.fixture
def wandb(tmp_path, monkeypatch):
    """A package of that name; a function that returns what it was told."""
    (tmp_path / "wandb.py").write_text(STUB)
    monkeypatch.syspath_prepend(tmp_path)
    yield lambda: [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    sys.modules.pop("wandb", None)


def test_wandb_draws_one_run_of_all_parts(tmp_path, wandb):
    """A run that is continued would be a second curve, or its points stand at the wrong steps."""
    run_dir = tmp_path / "first"
    output = OutputConfig(wandb_project="tiny", wandb_entity="us")
    run_part(output, run_dir, None, [1, 2])
    run_part(output, run_dir, 2, [3])
    run_part(
        replace(output, wandb_exp_name="second"), run_dir, None, [1]
    )  # a new one in an old folder
    told = wandb()
    started = [values["init"] for values, _ in told if "init" in values]
    assert [(each["id"], each["name"], each["resume"]) for each in started] == [
        *((None, "first", "allow"), ("a1b2", "first", "allow"), (None, "second", "allow"))
    ]
    assert {key: started[0][key] for key in ("project", "entity", "dir", "config")} == {
        "project": "tiny", "entity": "us", "dir": str(run_dir), "config": {"lr": 0.1}
    }  # fmt: skip
    steps = [
        (more["step"], values["train/loss"]) for values, more in told if "train/loss" in values
    ]
    assert steps == [(1, 1.0), (2, 1.0), (3, 3.0), (1, 1.0)]
    assert next(each for each in told if "valid/loss" in each[0]) == [
        {"valid/loss": 2.0, "valid/perplexity": pytest.approx(math.exp(2))},
        {"step": 2},
    ]
    drawn = {*(f"train/{name}" for name in DRAWN), "train/loss of a"}
    assert {name for values, more in told if more for name in values} == drawn | OF_EVALUATION
    assert [values["finish"] for values, _ in told if "finish" in values] == [{"exit_code": 0}] * 3


def test_wandb_shows_a_run_that_ends_with_an_error_as_failed(tmp_path, wandb):
    """Such a run would look as if it had been finished."""
    (board,) = open_boards(OutputConfig(wandb_project="tiny"), tmp_path, None, {})
    with pytest.raises(ZeroDivisionError), contextlib.closing(board):
        _ = 1 / 0
    assert wandb()[-1] == [{"finish": {"exit_code": 1}}, {}]


def test_wandb_that_cannot_start_is_one_clear_error(tmp_path, wandb):
    """A stack of its own network code does not say which option to drop."""
    with pytest.raises(
        ValueError, match="--wandb-project locked: no API key; run wandb login, or set WANDB_MODE"
    ):
        open_boards(OutputConfig(wandb_project="locked"), tmp_path, None, {})


def test_missing_wandb_is_told_before_anything_is_built(monkeypatch):
    """The first step would end the run."""
    monkeypatch.setattr("megatron.sft.options.output.find_spec", lambda name: None)
    assert_refused("--wandb-project tiny", 1, ["--wandb-project", "pip install wandb"])
