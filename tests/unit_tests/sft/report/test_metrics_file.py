"""What a run writes about its steps, and what is left of it after a kill."""

import json
import subprocess
import sys
from dataclasses import replace

import pytest

from megatron.sft.report import metrics_writer
from megatron.sft.report.metrics import Evaluation
from megatron.sft.report.metrics_file import read_jsonl, read_metrics, truncate_after
from megatron.sft.report.metrics_writer import MetricsWriter
from tests.unit_tests.sft.runs import SOURCE, STEP


def write_steps(run_dir, iterations, resume_iteration=None):
    """A run that reports these steps, evaluates before the first and after each even one, and marks
    its start.
    """
    writer = MetricsWriter(
        run_dir, train_iters=100, log_interval=1000, resume_iteration=resume_iteration
    )
    if resume_iteration is None:
        writer.event("run", iteration=0, seq_length=1024)
        writer.evaluation(Evaluation(iteration=0, split="valid", loss=9.0, num_tokens=10))
    for iteration in iterations:
        writer.step(replace(STEP, iteration=iteration))
        if iteration % 2 == 0:
            writer.evaluation(
                Evaluation(iteration=iteration, split="valid", loss=5.0 / iteration, num_tokens=10)
            )
    writer.close()


def test_lines_of_runs_from_before_there_were_sources(tmp_path):
    """A report of an older run would end with a missing key."""
    write_steps(tmp_path, [7])
    (record,) = [line for line in read_jsonl(tmp_path / "metrics.jsonl") if line["kind"] == "train"]
    for name in ("sources", "dropped"):
        del record[name]
    (tmp_path / "metrics.jsonl").write_text(json.dumps(record) + "\n")
    assert repr(read_metrics(tmp_path).steps) == repr([STEP])  # as NaN equals nothing


def test_file_reads_back_exactly(tmp_path):
    """Without it a field could be lost or rounded between the run and its report; NaN and infinity
    would break JSON.
    """
    writer = MetricsWriter(tmp_path / "run", train_iters=10, log_interval=1)
    writer.event("run", iteration=0, seq_length=1024, note=None)
    step = replace(STEP, sources={"a": SOURCE, "b": SOURCE}, dropped={"b": {"over length": 3}})
    writer.step(step)
    nothing = replace(SOURCE, num_loss_tokens=0, loss=float("nan"))
    writer.step(
        replace(
            STEP,
            predicted_seconds=0.3,
            sources={"a": nothing},
            iteration=8,
            loss=float("nan"),
            grad_norm=float("inf"),
            skipped=True,
        )
    )
    writer.evaluation(Evaluation(iteration=8, split="valid", loss=0.1 + 0.2, num_tokens=123))
    writer.close()
    steps, evaluations, events = read_metrics(tmp_path / "run")
    assert repr(steps[0]) == repr(step)  # as NaN equals nothing
    assert steps[1].skipped
    assert steps[1].predicted_seconds == 0.3
    assert str(steps[1].sources["a"].loss) == "nan"
    assert str((steps[1].loss, steps[1].grad_norm)) == "(nan, nan)"
    assert evaluations == [Evaluation(iteration=8, split="valid", loss=0.1 + 0.2, num_tokens=123)]
    assert events == [
        {"kind": "event", "event": "run", "iteration": 0, "seq_length": 1024, "note": None}
    ]
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line, parse_constant=pytest.fail)["kind"] for line in lines] == [
        *("event", "train", "train", "evaluation")
    ]
    first = json.loads(lines[1])
    assert (first["fill"], first["balance"], first["moved"], first["moved_tokens"]) == (
        0.75,
        1.02,
        0.125,
        750,
    )
    assert (first["step_cost"], first["step_cost_bound"], first["bubble"]) == (20.4, 20.0, 0.02)
    assert (first["predicted_seconds"], first["prediction_error"]) == (None, None)


def test_delays_stand_where_sequences_may_wait(tmp_path):
    """Without it the histogram could be lost, or the files of runs without delay change."""
    delayed = replace(STEP, iteration=8, delays=[14, 0, 2], waiting=3)
    assert " | 2 delayed, 3 waiting" in delayed.to_line(200)
    writer = MetricsWriter(tmp_path, train_iters=10, log_interval=1)
    writer.step(STEP)
    writer.step(delayed)
    writer.close()
    assert not {"delays", "waiting"} & set(read_jsonl(tmp_path / "metrics.jsonl")[0])
    assert repr(read_metrics(tmp_path).steps) == repr([STEP, delayed])


def test_killed_run_keeps_its_lines(tmp_path):
    """Without it the last lines, those that explain a crash, would die in a buffer."""
    code = (
        "import os, sys; from megatron.sft.report.metrics import Evaluation\n"
        "from megatron.sft.report.metrics_writer import MetricsWriter\n"
        "writer = MetricsWriter(sys.argv[1], train_iters=2, log_interval=1)\n"
        "writer.evaluation(Evaluation(iteration=1, split='valid', loss=2.0, num_tokens=10)); "
        "os.kill(os.getpid(), 9)"
    )
    killed = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, timeout=60
    )
    assert killed.returncode == -9
    assert killed.stdout == "valid loss 2.0000 after step 1 (10 loss tokens, perplexity 7.389)\n"
    assert [each.loss for each in read_metrics(tmp_path).evaluations] == [2.0]


@pytest.mark.parametrize("checkpoint", [0, 1, 4, 5])
def test_resumed_run_equals_one_never_stopped(tmp_path, checkpoint):
    """Without it steps after the checkpoint would stand twice in the file, and plots and sums would
    be wrong.
    """
    write_steps(tmp_path / "whole", range(1, 9))
    write_steps(tmp_path / "killed", range(1, 7))
    with (tmp_path / "killed" / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "train", "iterat')
    write_steps(tmp_path / "killed", range(checkpoint + 1, 9), resume_iteration=checkpoint)
    whole, killed = (
        (tmp_path / name / "metrics.jsonl").read_bytes() for name in ("whole", "killed")
    )
    assert killed == whole


def test_new_run_in_an_old_folder_starts_empty(tmp_path):
    """Without it the lines of two unrelated runs would be reported as one."""
    write_steps(tmp_path, range(1, 9))
    write_steps(tmp_path, range(1, 3))
    assert [step.iteration for step in read_metrics(tmp_path).steps] == [1, 2]


def test_reader_leaves_out_a_line_still_being_written(tmp_path):
    """Without it a report on a running or killed run would fail now and then."""
    write_steps(tmp_path, [1, 2])
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "train"')
    assert len(read_metrics(tmp_path).steps) == 2


def test_log_lines_without_a_terminal(tmp_path, capsys):
    """Without it `--log-interval` could be off by one, or a log file be full of progress bars."""
    writer = MetricsWriter(tmp_path, train_iters=9, log_interval=4)
    for iteration in range(1, 10):
        writer.step(replace(STEP, iteration=iteration))
    writer.close()
    out, err = capsys.readouterr()
    assert [line.split(" |")[0] for line in out.splitlines()] == ["step 4/9", "step 8/9"]
    assert err == ""


def test_progress_bar_on_a_terminal(tmp_path, capsys, monkeypatch):
    """Without it a resumed run's bar would start at zero, or the log lines would tear it apart."""
    monkeypatch.setattr(metrics_writer.sys.stderr, "isatty", lambda: True)
    writer = MetricsWriter(tmp_path, train_iters=9, log_interval=1, resume_iteration=6)
    writer.step(STEP)
    writer.evaluation(Evaluation(iteration=7, split="valid", loss=2.0, num_tokens=10))
    writer.close()
    out, err = capsys.readouterr()
    assert out == "valid loss 2.0000 after step 7 (10 loss tokens, perplexity 7.389)\n"
    assert " 7/9 " in err
    assert "loss 2.3457, 12,000 tokens/s, fill 75%" in err


def test_import_is_pure():
    """Without it reading metrics, or the report, would wait seconds for torch."""
    code = (
        "import sys, megatron.sft.report.metrics_writer, megatron.sft.report.report\n"
        "print([name for name in ('torch', 'numpy', 'matplotlib', 'tqdm', 'megatron.core') if name "
        "in sys.modules])"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert result.stdout == "[]\n"


def test_truncate_keeps_lines_without_iteration_before_the_cut(tmp_path):
    """Without it the description of the run, written before its first step, could be cut off."""
    path = tmp_path / "lines.jsonl"
    path.write_text('{"event": "a"}\n{"iteration": 1}\n{"event": "b"}\n{"iteration": 2}\n')
    truncate_after(path, 1)
    assert read_jsonl(path) == [{"event": "a"}, {"iteration": 1}]
    truncate_after(tmp_path / "absent.jsonl", 1)
    assert not (tmp_path / "absent.jsonl").exists()


@pytest.mark.parametrize(
    "damage",
    [
        b"{",
        b"\xff\xfe",
        b"[1]",
        b'{"kind": "train", "iteration": 2}',
        b'{"kind": "train", "iteration": "two"}',
        b"[" * 5000,
    ],
)
def test_a_damaged_line_is_named_and_blocks_nothing(tmp_path, damage, capsys):
    """One flipped bit in a log would end a run of weeks when it is resumed, or when it is done."""
    write_steps(tmp_path, [1, 2, 3])
    path = tmp_path / "metrics.jsonl"
    lines = path.read_bytes().split(b"\n")
    path.write_bytes(b"\n".join([*lines[:1], damage, *lines[1:]]))
    truncate_after(path, 2)
    assert [step.iteration for step in read_metrics(tmp_path).steps] == [1, 2]
    assert f"{path}:2: damaged, and left out" in capsys.readouterr().err
