"""The options of data: what is read, and the shares of training, validation and test."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.blending.formats.sources import SOURCES
from megatron.packing.flags import FlagError, field_docstrings
from megatron.sft.options.data import DataConfig
from tests.unit_tests.sft.command_line import BASE, assert_refused, parse

CONTRADICTIONS = [
    ("--mock-data --data-path a.jsonl", 1, ["--data-path", "--mock-data", "not both"]),
    ("--no-mock-data", 1, ["--data-path FILE", "--mock-data"]),
    (
        "--no-mock-data --data-path a.jsonl --sft-mock-dataset-config-json x.json",
        1,
        ["--sft-mock-dataset-config-json", "--mock-data"],
    ),
    ("--valid-data-path a.jsonl", 1, ["--valid-data-path", "--data-path", "--mock-data"]),
    ("--split 1,2,3,4", 1, ["--split", "969,30,1", "'1,2,3,4'"]),
    ("--split a,b", 1, ["--split", "969,30,1", "'a,b'"]),
    ("--split 1,-1", 1, ["--split", "'1,-1'"]),
    ("--split 0,1", 1, ["--split", "'0,1'"]),
    ("--split nan", 1, ["--split", "'nan'"]),
    ("--split inf,1", 1, ["--split", "969,30,1", "'inf,1'"]),
    (
        "--tokenizer-type NullTokenizer --tokenizer-model t",
        1,
        ["--tokenizer-model t", "NullTokenizer", "drop"],
    ),
    ("--tokenizer-type Foo", 1, ["--tokenizer-type", "'Foo'", "ByteLevelTokenizer"]),
]


def test_help_names_every_format():
    """Users would convert files that can be read as they are."""
    named = re.findall(r"\.[a-z]+", field_docstrings(DataConfig)["data_path"])
    assert set(SOURCES) <= set(named)


@pytest.mark.parametrize(("arguments", "world_size", "words"), CONTRADICTIONS)
def test_contradiction_is_refused_with_a_way_out(arguments, world_size, words):
    """Other records would be trained on than the user believes."""
    assert_refused(arguments, world_size, words)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("", "ByteLevelTokenizer"),
        ("--tokenizer-model t", "HuggingFaceTokenizer"),
        ("--tokenizer-type HuggingFaceTokenizer", "HuggingFaceTokenizer"),
        ("--tokenizer-type HuggingFaceTokenizer --tokenizer-model t", "HuggingFaceTokenizer"),
        ("--tokenizer-type ByteLevelTokenizer", "ByteLevelTokenizer"),
    ],
)
def test_tokenizer_model_says_which_tokenizer(arguments, expected):
    """A folder that is named and not read: the model would be trained on bytes."""
    assert parse(arguments).data.resolved_tokenizer_type == expected


def test_mock_data_and_data_path_are_accepted():
    """The two kinds of data; several files are one data set."""
    assert parse("", base=f"{BASE} --mock-data").data.mock_data
    data = parse("--data-path a.jsonl b.parquet --valid-data-path c.json", base=BASE).data
    assert (list(data.data_path), list(data.valid_data_path)) == (
        ["a.jsonl", "b.parquet"],
        ["c.json"],
    )


def test_empty_list_of_files_is_refused(tmp_path):
    """`data_path: []` is a list that some script failed to fill."""
    path = tmp_path / "run.yaml"
    path.write_text("data_path: []")
    with pytest.raises(
        FlagError, match="'data_path' must be a list of at least one text, but is \\[\\]"
    ):
        parse(f"--config {path}", base=BASE)


@pytest.mark.parametrize(
    ("split", "expected"),
    [
        ("969,30,1", (0.969, 0.03, 0.001)),
        ("1", (1.0, 0.0, 0.0)),
        ("9,1", (0.9, 0.1, 0.0)),
        ("0.5,0.25,0.25", (0.5, 0.25, 0.25)),
        ("2,0,2", (0.5, 0.0, 0.5)),
    ],
)
def test_split_shares(split, expected):
    """Shares that do not sum to one leave records unread, or read them twice."""
    assert parse(f"--split {split}").data.split_shares == pytest.approx(expected)


@given(st.lists(st.floats(0.001, 1e6), min_size=1, max_size=3))
def test_split_shares_sum_to_one(shares):
    """Validation on records of the training set shows no overfitting."""
    result = DataConfig(mock_data=True, split=",".join(map(str, shares))).split_shares
    assert sum(result) == pytest.approx(1)
    assert min(result) >= 0


WRITTEN = '{"kind": "linear", "points": [[0, [5, 3]], [100, [1, 1]]]}'


def schedule_of(text):
    return DataConfig(data_path=("blend.yaml",), blend_weight_schedule=str(text)).weight_schedule(
        samples_per_step=16
    )


def test_text_and_file_are_the_same(tmp_path):
    """A schedule counted in samples where steps are meant ends a hundred times too early."""
    (tmp_path / "schedule.json").write_text(WRITTEN)
    schedule = schedule_of(WRITTEN)
    assert schedule_of(tmp_path / "schedule.json") == schedule
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
def test_what_is_no_schedule_is_refused(text, words):
    """The weights would stay as they are, without a word."""
    with pytest.raises(ValueError, match=words) as failure:
        schedule_of(text)
    assert str(failure.value).startswith("--blend-weight-schedule")
    assert "\n" not in str(failure.value)


def test_weights_before_paths(tmp_path, monkeypatch):
    """Megatron's blends would be refused, or their weights be looked for as files."""
    monkeypatch.chdir(tmp_path)
    data = DataConfig(data_path=("5", "a.jsonl", "0.5", "b.jsonl"))
    assert data.weighted_paths == ((5.0, "a.jsonl"), (0.5, "b.jsonl"))
    assert (data.paths, data.is_blend) == (("a.jsonl", "b.jsonl"), True)
    plain = DataConfig(data_path=("a.jsonl", "b.jsonl"))
    assert (plain.paths, plain.is_blend) == (("a.jsonl", "b.jsonl"), False)
    (tmp_path / "5").write_text("")
    assert DataConfig(data_path=("5", "a.jsonl")).paths == ("5", "a.jsonl")
    for wrong in (("4", "a", "b"), ("a", "4"), ("a", "4", "b", "3"), ("4", "a", "3"), ("4", "3")):
        with pytest.raises(ValueError, match="--data-path with weights must be pairs such as"):
            DataConfig(data_path=wrong)


@pytest.mark.parametrize(
    ("options", "fault"),
    [
        (
            {"chat_template": "chat.jinja"},
            "--chat-template needs --tokenizer-model, but ByteLevelTokenizer has a format",
        ),
        (
            {"data_columns": "talk=dialogue"},
            "--data-columns must be pairs such as messages=conversation",
        ),
    ],
)
def test_options_that_would_not_be_read_are_refused(options, fault):
    """A template or a mapping that is given and not read trains on something else."""
    with pytest.raises(ValueError, match=fault):
        DataConfig(data_path=("a.jsonl",), **options)
