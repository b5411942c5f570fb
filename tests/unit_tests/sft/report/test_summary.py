"""A run in numbers, from one small enough to check by hand."""

import pytest

from megatron.sft.report.metrics_file import MetricsWriter
from megatron.sft.report.summary import Change, summarize
from tests.unit_tests.sft.runs import step


def test_summary_by_hand(run_dir):
    """Without it the numbers that a user judges packing by could be wrong, and nothing else would notice."""
    summary = summarize(run_dir)
    assert summary.num_steps == 4
    assert (summary.num_sequences, summary.num_tokens) == (32, 8000)
    assert summary.training_loss == Change(before=8.5, after=6.0, first_step=1, last_step=4)
    assert summary.held_out_loss == {"valid": Change(9.5, 6.5, 0, 4), "test": Change(6.0, 6.0, 4, 4)}
    assert (summary.tokens_per_second, summary.tflops_per_device) == (1000.0, 0.5)
    assert summary.data_share == pytest.approx(0.05)
    assert summary.padding == pytest.approx(1 - 2000 / 2048)
    assert summary.baseline_padding == pytest.approx(0.75)
    assert summary.padding_removed == pytest.approx(1 - 48 / 6000)
    assert summary.fewer_tokens == pytest.approx(8000 / 2048)
    assert (summary.balance_mean, summary.balance_worst) == (pytest.approx(1.05), 1.2)
    assert summary.fill == 0.5
    assert (summary.dropped_samples, summary.cut_samples, summary.skipped_steps) == (2, 1, 1)
    assert [path.name for path in summary.files] == ["metrics.jsonl"]


def test_the_padded_run_itself_removes_nothing(tmp_path):
    """Without it the baseline could claim a gain over itself."""
    writer = MetricsWriter(tmp_path, train_iters=1, log_interval=100)
    writer.event("run", iteration=0, seq_length=1000)
    writer.step(step(1, padded_tokens=8000))
    writer.close()
    summary = summarize(tmp_path)
    assert (summary.padding_removed, summary.fewer_tokens) == (0, 1)
    assert summary.training_loss == Change(9.0, 9.0, 1, 1)


def test_nothing_to_report_on_is_one_clear_error(tmp_path):
    """Without it a mistyped folder would end in a stack trace, or in a report full of nan."""
    with pytest.raises(ValueError, match="there is no such file; give the folder of a run"):
        summarize(tmp_path / "absent")
    writer = MetricsWriter(tmp_path, train_iters=1, log_interval=1)
    with pytest.raises(ValueError, match='must hold at least one "run" event, but has none'):
        summarize(tmp_path)
    writer.event("run", iteration=0, seq_length=1000)
    with pytest.raises(ValueError, match="must hold at least one training step, but has none"):
        summarize(tmp_path)
