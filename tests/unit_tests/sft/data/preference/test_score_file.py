"""Log-probabilities of a reference are found by what was scored, and by nothing else."""

from __future__ import annotations

from pathlib import Path as FilePath

import numpy as np
import pytest

from megatron.packing.batch.tree import Path
from megatron.sft.data.preference.score_file import (
    ScoreFile,
    check_can_write,
    is_list_of_scores,
    is_score_file,
    key_of,
    write_scores,
)
from megatron.sft.data.records.values import SampleError

HEADER = {"weights": "a", "weights_source": "--pretrained-checkpoint old", "tokenizer": "b"}


def side(*ids: int, start: int = 1) -> tuple[Path, np.ndarray]:
    values = np.array(ids)
    is_answer = np.arange(len(ids) - 1) >= start
    return Path(values[:-1], values[1:], is_answer.astype(np.float32)), is_answer


def test_sums_are_found_by_tokens(tmp_path: FilePath) -> None:
    """A table by row number gives each record another one's reference after shuffling."""
    sides = [side(1, 2, 3), side(1, 2, 4), side(1, 2, 3, start=0)]
    keys = [key_of(*each) for each in sides]
    heads = [keys[0].of_head(1), keys[0].of_head(2)]
    file = str(tmp_path / "scores.npz")
    rows = np.array([*keys, *heads, keys[0]])  # one twice, as padding batches repeat records
    assert write_scores(file, HEADER, rows, [-1.5, -2.5, -3.5, -4.5, -5.5, -1.5]) == 5
    found = ScoreFile.read(file)
    assert [found.of(*each) for each in sides] == [-1.5, -2.5, -3.5]
    assert [found.head(*sides[0], count) for count in (1, 2)] == [-4.5, -5.5]
    with pytest.raises(SampleError, match="is not in --reference-file"):
        found.of(*side(1, 2, 5))


def test_a_wrong_file_is_refused(tmp_path: FilePath) -> None:
    """Another model's numbers would train, with margins that mean nothing."""
    file = str(tmp_path / "scores.npz")
    write_scores(file, HEADER, np.array([key_of(*side(1, 2, 3))]), [-1.0])
    found = ScoreFile.read(file)
    found.check(HEADER)
    found.check({**HEADER, "weights_source": "a folder that was moved"})
    new = {**HEADER, "weights": "c", "weights_source": "--pretrained-checkpoint new"}
    for header, said in (
        (new, "of --pretrained-checkpoint old, not --pretrained-checkpoint new; make it again"),
        ({**HEADER, "weights": "c"}, "of other files in --pretrained-checkpoint old, which have"),
        ({**HEADER, "tokenizer": "c"}, "with another tokenizer; make it again"),
    ):
        with pytest.raises(ValueError, match=f"was made {said}"):
            found.check(header)
    with pytest.raises(ValueError, match="does not exist"):
        ScoreFile.read(str(tmp_path / "none"))
    (tmp_path / "text").write_text("scores")
    with pytest.raises(ValueError, match="no file of megatron-sft score"):
        ScoreFile.read(str(tmp_path / "text"))


def test_a_file_of_something_else_is_not_replaced(tmp_path: FilePath) -> None:
    """score --reference-file pairs.jsonl wrote over the data, after minutes of passes; a folder
    that does not exist was found out then, too.
    """
    scores, lines, data, empty = (tmp_path / name for name in ("a.npz", "b.jsonl", "data", "empty"))
    write_scores(str(scores), HEADER, np.array([key_of(*side(1, 2, 3))]), [-1.0])
    lines.write_text('{"split": "train", "record": "a:1", "chosen": 1.0, "rejected": [0.5]}\n')
    data.write_text('{"chosen": "a", "rejected": "b"}\n')
    empty.touch()
    for path in (scores, empty, tmp_path / "new"):
        check_can_write("--reference-file", str(path), is_score_file)
    for path in (lines, empty, tmp_path / "new"):
        check_can_write("--write-scores", str(path), is_list_of_scores)
    for is_ours, paths in ((is_score_file, (data, lines)), (is_list_of_scores, (data, scores))):
        for path in paths:
            with pytest.raises(ValueError, match="was not written by megatron-sft score; name ano"):
                check_can_write("--reference-file", str(path), is_ours)
    with pytest.raises(ValueError, match="its folder does not exist"):
        check_can_write("--reference-file", str(tmp_path / "none" / "a.npz"), is_score_file)
    with pytest.raises(ValueError, match="must be a file, but is none"):
        check_can_write("--reference-file", str(tmp_path), is_score_file)
