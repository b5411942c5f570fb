"""The folders of a run: what is refused before any work, and what a step leaves in them."""

import importlib.util
import json
from types import SimpleNamespace
from typing import Any

import pytest

from megatron.packing.batch.layout import Alignment
from megatron.packing.scheduling.cost import PackCost
from megatron.packing.scheduling.step_time import StepModel
from megatron.planner.lengths import LengthOptions
from megatron.planner.plan import plan
from megatron.planner.step_record import StepLayout, StepRecord
from megatron.sft.commands.length_sources import lengths_from
from megatron.sft.model.checkpoints.content import Progress
from megatron.sft.options.output import OutputConfig
from megatron.sft.report.run_folder import RunLog, dump_schedule, prepare_output
from tests.unit_tests.sft.command_line import parse
from tests.unit_tests.sft.runs import STEP


def test_a_folder_with_checkpoints_is_not_written_over(tmp_path, monkeypatch):
    """A forgotten --load would start again and put its first checkpoints before those of the old
    run.
    """
    monkeypatch.chdir(tmp_path)
    prepare_output(OutputConfig(save=str(tmp_path / "new")))
    assert (tmp_path / "new").is_dir()
    (tmp_path / "old/iter_0000007").mkdir(parents=True)
    (tmp_path / "old/latest_checkpointed_iteration.txt").write_text("7")
    with pytest.raises(ValueError, match=r"up to step 7; continue it with --load"):
        prepare_output(OutputConfig(save=str(tmp_path / "old")))
    prepare_output(OutputConfig(save=str(tmp_path / "old"), load=str(tmp_path / "old")))
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="must be a folder that can be written to"):
        prepare_output(OutputConfig(run_dir=str(tmp_path / "file")))
    (tmp_path / "other/iter_0000003").mkdir(parents=True)
    (tmp_path / "other/latest_checkpointed_iteration.txt").write_text("3")
    with pytest.raises(
        ValueError, match=r"old holds a run's checkpoints"
    ):  # they would be overwritten
        prepare_output(OutputConfig(save=str(tmp_path / "old"), load=str(tmp_path / "other")))
    with pytest.raises(ValueError, match=r"pass another --save-hf"):
        prepare_output(OutputConfig(save_hf=str(tmp_path / "file" / "model")))
    with pytest.raises(ValueError, match=r"--save-hf .*new is the folder of --save, too"):
        prepare_output(
            OutputConfig(save=str(tmp_path / "new"), save_hf=str(tmp_path / "x" / ".." / "new"))
        )


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(
    ("is_measured", "head", "time"), [(True, "time, ms", "10.0"), (False, "time, units", "0.01")]
)
def test_a_dumped_step_keeps_its_unit(tmp_path, monkeypatch, capsys, is_measured, head, time):
    """Scheduled by seconds and drawn without them, a step of 10 ms would be one of 0.01 of nobody
    knows what.
    """
    from megatron.packing.step.delay import Delayed
    from megatron.packing.step.global_batch import GlobalBatch
    from megatron.packing.step.settings import PackingSettings
    from megatron.sft.report import run_folder

    measured = tmp_path / "cost.json"
    measured.write_text('{"linear": 0.001, "quadratic": 0, "fixed": 0, "model": {}}')
    monkeypatch.setattr(run_folder.dist, "get_world_size", lambda: 2)
    settings = PackingSettings(
        scheduler="default",
        alignment=Alignment(),
        capacity=10,
        over_length_policy="error",
        microbatch_multiple=1,
        cost=PackCost(0.001, 0.0),
        model=StepModel(),
    )
    config = parse(
        f"--sequence-packing --dump-schedule {STEP.iteration}"
        + f" --pack-cost {measured}" * is_measured
    )
    log = run_folder.RunLog(config, tmp_path, Progress(0, 0, evaluation_due=False))
    packs = [[[10]], [[4, 2]]]
    unread: Any = None
    decision: Any = SimpleNamespace(
        stats=SimpleNamespace(num_ranks=2, tokens=1, num_loss_tokens=1),
        pack_lengths=lambda: packs,
        pack_sizes=dict,
    )
    batch = GlobalBatch(
        microbatches=[],
        stats=unread,
        decision=decision,
        settings=settings,
        delayed=Delayed.none(),
    )
    log.step(STEP, batch)
    log.close()
    path = tmp_path / f"schedule_{STEP.iteration}.json"
    assert json.loads(path.read_text())["packs"] == packs
    capsys.readouterr()
    plan([str(path), "--scheduler", "default"], lengths_from)
    printed = capsys.readouterr().out
    row = next(
        line.split() for line in printed.splitlines() if line.startswith("as it ran (default)")
    )
    assert head in printed
    assert row[9] == time


def test_a_dumped_step_is_read_by_the_planner(tmp_path):
    """And its page opens in a browser, its picture where matplotlib is."""
    layout = StepLayout(
        num_ranks=2, capacity=9, alignment=Alignment(), cost=PackCost(1.0, 0.1), model=StepModel()
    )  # fmt: skip
    record = StepRecord(
        title="step 7", scheduler="default", layout=layout, packs=[[[3, 4], [9]], [[8], []]]
    )
    names = [path.name for path in dump_schedule(tmp_path / "schedule_7", record)]
    plotted = importlib.util.find_spec("matplotlib") is not None
    assert names == ["schedule_7.json", "schedule_7.html", *["schedule_7.png"] * plotted]
    assert all((tmp_path / name).stat().st_size > 100 for name in names)
    assert (
        lengths_from(LengthOptions(source=str(tmp_path / "schedule_7.json")), None, 1).record
        == record
    )


def test_options_that_cannot_be_written_name_the_folder(tmp_path):
    """A disk may hold what was tried before the run, and no more."""
    (tmp_path / "options.json").mkdir()
    with pytest.raises(ValueError, match=r"options\.json cannot be written: .*another --run-dir"):
        RunLog(parse(), tmp_path, Progress(0, 0, evaluation_due=False))
