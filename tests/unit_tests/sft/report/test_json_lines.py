"""Files of lines that a run was killed over."""

from megatron.sft.report.json_lines import read_jsonl, truncate_after


def test_truncate_keeps_lines_without_iteration_before_the_cut(tmp_path):
    """Without it the description of the run, written before its first step, could be cut off."""
    path = tmp_path / "lines.jsonl"
    path.write_text('{"event": "a"}\n{"iteration": 1}\n{"event": "b"}\n{"iteration": 2}\n')
    truncate_after(path, 1)
    assert read_jsonl(path) == [{"event": "a"}, {"iteration": 1}]
    truncate_after(tmp_path / "absent.jsonl", 1)
    assert not (tmp_path / "absent.jsonl").exists()
