"""The report on a run: its table and its picture."""

import json
import re
from pathlib import Path

import pytest
import yaml
from matplotlib.figure import Figure

from megatron.sft.commands import report as command
from megatron.sft.report import report
from megatron.sft.report.metrics import Evaluation, SourceMetrics
from megatron.sft.report.metrics_file import read_metrics
from megatron.sft.report.metrics_writer import MetricsWriter
from megatron.sft.report.model_card import CARD, write_card
from megatron.sft.report.plot import packs_to_draw, plot_loss
from tests.unit_tests.sft.command_line import parse
from tests.unit_tests.sft.runs import step

README = Path(__file__).parents[4] / "README.md"
NUMBER = re.compile(r"\d[\d,.]*")


def rows_of(run_dir):
    """The report as {what: how much}, rows without a name under that of the row before."""
    rows: dict[str, str] = {}
    name = ""
    for what, how_much in report.table(read_metrics(run_dir), run_dir):
        name = what or name
        rows[name] = f"{rows[name]}; {how_much}" if name in rows else how_much
    return rows


def write_packs(run_dir, num_steps, packs):
    lines = [
        json.dumps({"iteration": i + 1, "capacity": 1000, "packs": packs}) + "\n"
        for i in range(num_steps)
    ]
    (run_dir / "packs.jsonl").write_text("".join(lines))


def test_sources_by_hand(tmp_path):
    """A source that was hardly read, or that got worse, is what one looks for in the report of a
    blend.
    """
    writer = MetricsWriter(tmp_path, train_iters=4, log_interval=100)
    writer.event("run", iteration=0, seq_length=1000, global_batch_size=8)
    for iteration, loss in enumerate((4.0, 3.0, 2.0, float("nan")), 1):
        few = SourceMetrics(sequences=1, tokens=100, num_loss_tokens=50, loss=loss)
        most = SourceMetrics(sequences=7, tokens=1900, num_loss_tokens=1550, loss=8.0)
        dropped = {"few": {"bad sample": 2}} if iteration < 3 else {}
        writer.step(
            step(iteration, sources={"few": few, "most": most}, dropped=dropped, dropped_samples=2)
        )
    writer.close()
    rows = rows_of(tmp_path)
    assert [name for name in rows if name.startswith("source")] == ["source most", "source few"]
    assert rows["source most"] == "28 samples, 7,600 tokens (95.0%), loss 8.0000 -> 8.0000"
    assert rows["source few"] == "4 samples, 400 tokens (5.0%), loss 4.0000 -> 2.0000"
    assert rows["samples"] == "8 dropped (4 bad sample of few), 0 truncated"


def test_rows_by_hand(run_dir):
    """The numbers that a user judges packing by could be wrong, and nothing else would notice."""
    expected = {
        "trained": "4 steps, 32 sequences, 8,000 tokens",
        "training loss": "8.5000 -> 6.0000   (means of the first and the last steps)",
        "valid loss": "9.5000 -> 6.5000   (after step 0 and step 4)",
        "test loss": "6.0000   (after step 4)",
        "speed": "1,000 tokens/s   (median step); 0.5 TFLOP/s per device   (median step); "
        "5.0% of the time waiting for data",
        "padding": "2.3% of the tokens computed, 75.0% without packing",
        "padding removed": "99.2%, for 3.91x fewer tokens computed",
        "balance": "1.0500 mean, 1.2000 worst   (modelled step time / lower bound)",
        "moved": "12.5% of the tokens, between data-parallel ranks",
        "fill": "50.0% of the packs' capacity",
        "samples": "2 dropped, 1 truncated",
        "optimizer": "1 steps skipped, as gradients overflowed",
    }
    assert expected.items() <= rows_of(run_dir).items()


def test_readme_shows_the_table_that_is_printed(run_dir):
    """Whoever tries the project compares the two line by line."""
    shown = re.search(r"It ends like this:\n\n```\n(.*?)\nfiles ", README.read_text(), re.DOTALL)
    assert shown is not None
    printed = [
        row
        for row in report.table(read_metrics(run_dir), run_dir)
        if row[0] not in ("test loss", "optimizer")
    ]
    rows = [(line[:18].rstrip(), line[18:]) for line in shown[1].splitlines()]
    assert [(name, NUMBER.sub("#", value)) for name, value in rows] == [
        (name, NUMBER.sub("#", value)) for name, value in printed
    ]
    config = yaml.safe_load((README.parent / "examples/tiny_chat/config.yaml").read_text())
    steps, sequences = config["train-iters"], config["train-iters"] * config["global-batch-size"]
    assert rows[0][1].startswith(f"{steps} steps, {sequences:,} sequences, ")


def test_the_padded_run_itself_removes_nothing(tmp_path):
    """The baseline could claim a gain over itself."""
    writer = MetricsWriter(tmp_path, train_iters=1, log_interval=100)
    writer.event("run", iteration=0, seq_length=1000)
    writer.step(step(1, padded_tokens=8000))
    writer.close()
    rows = rows_of(tmp_path)
    assert rows["padding removed"] == "0.0%, for 1.00x fewer tokens computed"
    assert rows["training loss"].startswith("9.0000 -> 9.0000")


def test_shared_prefixes_by_hand(tmp_path):
    """What trees save would be seen nowhere, as padding is all that packing itself removes."""
    writer = MetricsWriter(tmp_path, train_iters=2, log_interval=100)
    writer.event("run", iteration=0, seq_length=1000)
    writer.step(step(1, path_tokens=0))  # no tree in this step
    writer.step(step(2, path_tokens=5000))
    writer.close()
    expected = "computed once; separate sequences would have 1.75x the tokens"
    assert rows_of(tmp_path)["shared prefixes"] == expected


def test_nothing_to_report_on_is_one_clear_error(tmp_path):
    """A mistyped folder would end in a stack trace, or in a report full of nan."""
    with pytest.raises(
        ValueError, match=r"absent.metrics\.jsonl .*no such file; give the folder of a run"
    ):
        report.report(tmp_path / "absent")
    writer = MetricsWriter(tmp_path, train_iters=1, log_interval=1)
    with pytest.raises(ValueError, match='at least one "run" event'):
        report.report(tmp_path)
    writer.event("run", iteration=0, seq_length=1000)
    with pytest.raises(ValueError, match="at least one training step"):
        report.report(tmp_path)


def test_steps_without_a_line_are_named(run_dir, tmp_path, capsys, monkeypatch):
    """On a full disk a run of 20 steps said that it had trained 6, also in the model's card."""
    metrics = read_metrics(run_dir)
    (what, how_many), *others = report.table(metrics, run_dir, 20)
    assert (what, how_many) == ("missing", "the lines of 16 steps; all figures are of the others")
    assert others == report.table(metrics, run_dir, 4)
    holed = metrics._replace(steps=[metrics.steps[0], *metrics.steps[2:]])
    assert report.table(holed, run_dir)[0][1].startswith("the lines of 1 steps")
    write_card(tmp_path, parse(), run_dir, 20)
    assert "missing          the lines of 16 steps" in (tmp_path / CARD).read_text()

    def half_a_picture(path, *_):
        path.write_bytes(b"PNG")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("megatron.sft.report.plot.plot", half_a_picture)
    report.report(run_dir, 20)
    shown = capsys.readouterr().out
    assert "lines of 16 steps" in shown
    assert "no plot: OSError: [Errno 28] No space left" in shown
    assert report.PLOT_FILE not in shown


def test_rows_of_a_pipeline_with_a_prediction(tmp_path):
    """A balance below 1 needs its bubble beside it, and a prediction its error: signs must not
    cancel in the mean.
    """
    writer = MetricsWriter(tmp_path, train_iters=2, log_interval=100)
    writer.event("run", iteration=0, seq_length=1000)
    pipeline = {"num_ranks": 1, "num_stages": 4}
    writer.step(step(1, **pipeline, step_cost=9.0, bubble=0.1, predicted_seconds=1.8))
    writer.step(step(2, **pipeline, step_cost=9.5, bubble=0.2, predicted_seconds=1.35))
    writer.close()
    rows = rows_of(tmp_path)
    assert rows["balance"].startswith("0.925 mean, 0.950 worst")
    assert rows["bubble"] == "15.0% mean"
    assert rows["prediction"].startswith(
        "15.0% mean absolute error of the passes, which were 75% of the time"
    )
    assert "moved" not in rows


def test_delays_are_summed_over_the_steps(tmp_path):
    """Without it nobody would see how late outliers are, or that some are still to come."""
    writer = MetricsWriter(tmp_path, train_iters=2, log_interval=100)
    writer.event("run", iteration=0, seq_length=1000)
    writer.step(step(1, delays=[7], waiting=2))
    writer.step(step(2, delays=[900, 0, 1], waiting=1))
    writer.close()
    assert rows_of(tmp_path)["delay"].endswith(": 0: 907, 2: 1; 1 still wait")


def test_packs_drawn_are_spread_over_the_run_and_few(run_dir):
    """Without it the picture of a long or wide run would be a smear, or show its first steps
    only."""
    lines = [
        {"iteration": i, "capacity": 1000, "packs": [[[500, 400], [900]], [[1000], []]]}
        for i in range(1, 101)
    ]
    drawn = packs_to_draw(lines)
    assert len(drawn) == 64
    assert sorted({pack.iteration for pack in drawn})[-2:] == [93, 100]
    assert [pack.lengths for pack in drawn[:4]] == [[500, 400], [900], [1000], []]
    assert [pack.at for pack in drawn[:5]] == pytest.approx([0, 1, 2.4, 3.4, 6.0])
    wide = [{"iteration": 1, "capacity": 1000, "packs": [[[500], [900]]] * 512}]
    assert len(packs_to_draw(wide)) == 64


@pytest.mark.parametrize("num_stages", [1, 4])
@pytest.mark.parametrize("has_packs", [False, True])
def test_plot_is_a_picture(run_dir, has_packs, num_stages):
    """Without it a change of matplotlib, or a step whose loss is NaN, would leave `make run`
    without its picture.
    """
    pytest.importorskip("matplotlib")
    metrics = run_dir / "metrics.jsonl"
    metrics.write_text(
        metrics.read_text().replace('"num_stages": 1', f'"num_stages": {num_stages}')
    )
    if has_packs:
        write_packs(run_dir, 4, [[[500, 400], [900]], [[1000], []]])
    report.report(run_dir)
    content = (run_dir / "report.png").read_bytes()
    assert content.startswith(b"\x89PNG")
    height = int.from_bytes(content[20:24], "big")
    assert height == (988 if has_packs else 494)


def test_command_line(run_dir, capsys, monkeypatch):
    """Without it the report would need matplotlib, which the project does not require."""
    monkeypatch.setattr(report.importlib.util, "find_spec", lambda name: None)
    command.main([str(run_dir)], "report")
    printed = capsys.readouterr().out
    assert printed.endswith("no plot: matplotlib is missing; do pip install matplotlib\n")
    assert f"\nfiles             {run_dir}: metrics.jsonl\n" in printed
    with pytest.raises(SystemExit) as exit_info:
        command.main([str(run_dir / "absent")], "report")
    assert exit_info.value.code == 2
    assert capsys.readouterr().err.startswith("report: error: ")


def test_every_held_out_set_is_drawn():
    """The fourth had a colour no more, and was left out without a word."""
    names = [f"set {number}" for number in range(13)]
    evaluations = [
        Evaluation(iteration=1, split=name, loss=float(number), num_tokens=1)
        for number, name in enumerate(names)
    ]
    axes = Figure().add_subplot()
    plot_loss(axes, [step(1)], evaluations)
    lines = {str(line.get_label()).removeprefix("held out: "): line for line in axes.lines}
    looks = [(lines[name].get_color(), lines[name].get_marker()) for name in names]
    assert len(set(looks)) == 12
