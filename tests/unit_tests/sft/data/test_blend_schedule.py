"""Weights over steps as users write them: read as they are meant, or refused in a line."""

import pytest

from megatron.sft.data.blend_schedule import parse_schedule

WRITTEN = '{"kind": "linear", "points": [[0, [5, 3]], [100, [1, 1]]]}'


def test_text_and_file_are_the_same(tmp_path):
    """A schedule counted in samples where steps are meant ends a hundred times too early."""
    (tmp_path / "schedule.json").write_text(WRITTEN)
    schedule = parse_schedule(WRITTEN, 16)
    assert parse_schedule(str(tmp_path / "schedule.json"), 16) == schedule
    assert schedule.points == ((0, (5, 3)), (100, (1, 1)))
    assert (schedule.kind, schedule.outputs_per_step) == ("linear", 16)
    assert schedule.segments()[-1] == (1600, (1, 1))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("none.json", "or a file with it"),
        ("{", "must be"),
        ('{"points": 5}', "must be"),
        ('{"point": []}', "must be"),
        ('{"points": [[0.5, [1, 1]]]}', "must be"),
        ('{"points": [[5, [1, 1]]]}', "start at step 0"),
        ('{"points": [[0, [1, -1]]]}', "weight 1 must be at least 0"),
        ('{"points": [[0, [1, 1]], [9, [1]]]}', "as many weights"),
        ('{"kind": "cosine", "points": [[0, [1, 1]]]}', "'cosine'"),
    ],
)
def test_what_is_none_is_refused(text, words):
    """The weights would stay as they are, without a word."""
    with pytest.raises(ValueError, match=words) as failure:
        parse_schedule(text, 1)
    assert str(failure.value).startswith("--blend-weight-schedule")
    assert "\n" not in str(failure.value)
