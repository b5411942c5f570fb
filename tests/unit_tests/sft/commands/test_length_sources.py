"""The lengths that a plan is made of must be those that training would see."""

import json

import numpy as np
import pytest

from megatron.packing.batch.layout import Alignment
from megatron.packing.scheduling.cost import PackCost
from megatron.packing.scheduling.step_time import StepModel
from megatron.planner.lengths import LengthOptions
from megatron.planner.sequences import sizes_of
from megatron.planner.step_record import StepLayout, StepRecord
from megatron.sft.commands.length_sources import lengths_from
from tests.unit_tests.blending.folders import write_jsonl


def read(source, needed=4, vocab_size=None, **options):
    return lengths_from(LengthOptions(source=str(source), seed=1, **options), vocab_size, needed)


@pytest.mark.parametrize("text", ["5\n7\n", "length\n5\n7\n\n", "\ufeff5\r\n7\r\n"])
@pytest.mark.parametrize("name", ["lengths.csv", "lengths.txt", "lengths"])
def test_files_of_lengths(tmp_path, text, name):
    (tmp_path / name).write_text(text, encoding="utf-8")
    assert read(tmp_path / name).lengths.tolist() == [5, 7]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("5\nx\n", "lengths.csv:2: must be one length, a whole number, but is 'x'"),
        ("5\n0\n", "lengths.csv:2: length must be 1 to"),
        ("5\n-3\n", "lengths.csv:2: must be one length"),
        pytest.param("5\n" + "9" * 5000, "lengths.csv:2: must be one length", id="long"),
        ("length\n", "lengths.csv holds none"),
        ("", "lengths.csv holds none"),
    ],
)
def test_bad_lengths_are_named_without_a_flag_of_training(tmp_path, text, said):
    """The planner has no --sft-mock-dataset-config-json to correct."""
    (tmp_path / "lengths.csv").write_text(text)
    with pytest.raises(ValueError, match=said) as failure:
        read(tmp_path / "lengths.csv")
    assert "--sft-mock" not in str(failure.value)


CHATS: list[dict[str, object]] = [
    {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}]},
    {"messages": [{"role": "user", "content": "nobody answers"}]},
    {"text": "abcde"},
]


def test_chats(tmp_path):
    """user + hi + end + assistant + yes + end, less the last one: 8; a text has an end of its
    own."""
    path = write_jsonl(tmp_path / "chats.jsonl", CHATS)
    found = read(path)
    assert (found.lengths.tolist(), found.dropped) == ([8, 5], 1)
    (tmp_path / "chats.json").write_text(json.dumps(CHATS))
    assert read(tmp_path / "chats.json").lengths.tolist() == [8, 5]


@pytest.mark.parametrize("text", ["text\nabcde\n", "text,source\nabcde,7\n"])
def test_tables_of_records_are_no_lengths(tmp_path, text):
    """A table of chats has the suffix of a file of lengths; the first lines decide."""
    (tmp_path / "chats.csv").write_text(text)
    assert read(tmp_path / "chats.csv").lengths.tolist() == [5]


def test_broken_chats_are_named_or_counted(tmp_path):
    path = tmp_path / "chats.jsonl"
    path.write_text('{"text": "abc"}\n{"txt": 1}\n{\n')
    with pytest.raises(ValueError, match=r"chats.jsonl:2: record has keys 'txt'"):
        read(path)
    found = read(path, skip_bad_samples=True)
    assert (found.lengths.tolist(), found.dropped) == ([3], 2)


def test_chats_of_odd_columns(tmp_path):
    """A plan would need the data rewritten, although training does not."""
    path = tmp_path / "chats.jsonl"
    path.write_text('{"body": "abc", "text": "x"}\n')
    assert read(path, data_columns="text=body,none=text").lengths.tolist() == [3]


@pytest.mark.parametrize(
    ("option", "value"), [("chat_template_kwargs", '{"thinking": false}'), ("chat_template", "x")]
)
def test_templates_without_a_tokenizer_are_refused(tmp_path, option, value):
    """A plan would be of other lengths than the run, which refuses them."""
    path = write_jsonl(tmp_path / "chats.jsonl", CHATS)
    with pytest.raises(ValueError, match=f"--{option.replace('_', '-')} needs --tokenizer-model"):
        read(path, **{option: value})


@pytest.mark.parametrize("as_file", [True, False])
def test_mock_data(tmp_path, as_file):
    config = '{"mode": "distribution", "type": "constant", "seq_len": 12}'
    if as_file:
        (tmp_path / "mock.json").write_text(config)
    assert read(tmp_path / "mock.json" if as_file else config).lengths.tolist() == [12] * 4


def test_mock_data_of_nothing_but_a_mode_needs_a_length():
    with pytest.raises(ValueError, match="pass it"):
        read('{"mode": "distribution"}')
    assert read('{"mode": "distribution"}', seq_length=16).lengths.max() <= 16


def test_chats_of_several_answers(tmp_path):
    """Planned as a sequence, a tree would cost pairs between its branches; as sequences, its trunk
    each time.
    """
    asked = [{"role": "user", "content": "hi"}]
    tree = {"prompt": asked, "responses": ["yes", "no"], "weights": [1, 2]}
    found = read(write_jsonl(tmp_path / "chats.jsonl", [tree, *CHATS])).sequences
    assert found.lengths.tolist() == [4 + 4 + 3, 8, 5], "user hi end; assistant, an answer"
    assert found.trees is not None
    assert found.trees.path_tokens.tolist() == [8 + 7, 8, 5]
    assert found.trees.squares.tolist() == [16 + 4 * (4 + 8) + 3 * (3 + 8), 64, 25]
    assert found.loss_tokens is not None
    assert found.loss_tokens.tolist() == [4 + 3, 4, 5]
    sizes = sizes_of(found)
    lines = [{"iteration": 1, "packs": [[[11, 8], [5]]], "sizes": sizes}]
    lines.append({"iteration": 2, "packs": [[[6]]]})
    again = read(write_jsonl(tmp_path / "packs.jsonl", lines).parent).sequences
    assert again.lengths.tolist() == [11, 8, 5, 6]
    assert again.trees is not None
    assert again.trees.path_tokens.tolist() == [15, 8, 5, 6]
    write_jsonl(tmp_path / "packs.jsonl", [{**lines[1], "sizes": sizes}])
    with pytest.raises(ValueError, match=r"packs.jsonl: not the packs of a run: sizes must be"):
        read(tmp_path)


def test_marked_answers_have_that_of_another_record(tmp_path):
    """A step of KTO also has the answer of the record before, for its divergence: plans would have
    a third too few tokens.
    """
    records = [
        {"prompt": "ab", "completion": "cde", "label": True},
        {"prompt": "fghi", "completion": "j", "label": False},
    ]
    found = read(write_jsonl(tmp_path / "chats.jsonl", records), loss="kto").sequences
    assert found.lengths.tolist() == [1 + 4 + 2, 3 + 2 + 4], "the prompt's last token twice"
    assert found.trees is not None
    assert found.trees.path_tokens.tolist() == [5 + 3, 5 + 7]


def test_runs(tmp_path):
    """A folder, and either of its files, mean its packs."""
    lines = [
        {"iteration": 1, "capacity": 9, "packs": [[[3, 4]], [[5]]]},
        {"iteration": 2, "packs": [[[6]]]},
    ]
    write_jsonl(tmp_path / "packs.jsonl", lines)
    (tmp_path / "metrics.jsonl").write_text("")
    for source in (tmp_path, tmp_path / "packs.jsonl", tmp_path / "metrics.jsonl"):
        assert read(source).lengths.tolist() == [3, 4, 5, 6]


@pytest.mark.parametrize(
    "text", [None, "", '{"packs": 3}\n', "{\n", '{"packs": [[["x"]]]}\n', '{"packs": [[[0]]]}\n']
)
def test_runs_without_packs(tmp_path, text):
    """A padded run has none."""
    if text is not None:
        (tmp_path / "packs.jsonl").write_text(text)
    with pytest.raises(ValueError, match=r"packs.jsonl: (must hold the packs|not the packs)"):
        read(tmp_path)


def test_schedules(tmp_path):
    layout = StepLayout(
        num_ranks=1, capacity=9, alignment=Alignment(), cost=PackCost(1.0, 0.0), model=StepModel()
    )  # fmt: skip
    record = StepRecord(title="x", scheduler="empty", layout=layout, packs=[[[3, 4], [9]]])
    (tmp_path / "schedule_1.json").write_text(record.to_json())
    found = read(tmp_path / "schedule_1.json")
    assert found.record == record
    assert np.array_equal(found.lengths, [3, 4, 9])
    (tmp_path / "schedule_1.json").write_text('{"kind": "schedule"}')
    with pytest.raises(ValueError, match=r"schedule_1.json: a schedule must have the key 'packs'"):
        read(tmp_path / "schedule_1.json")


def test_what_is_nothing_of_these(tmp_path):
    (tmp_path / "x.json").write_text('{"a": 1}')
    with pytest.raises(ValueError, match="but has the keys 'a'"):
        read(tmp_path / "x.json")
    with pytest.raises(ValueError, match="no such file"):
        read(tmp_path / "absent.csv")
    (tmp_path / "y.json").write_text("[")
    with pytest.raises(ValueError, match=r"y.json:1: not JSON"):
        read(tmp_path / "y.json")
