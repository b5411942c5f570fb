"""Damage by tables, seen in records: one line for each kind, with a count."""

import json

import pytest

from megatron.blending.metadatasets.metadataset import load_metadataset
from megatron.blending.metadatasets.tree import source_entries
from megatron.sft.data import record_notes
from megatron.sft.data.chat_encoder import ChatEncoder
from megatron.sft.data.chats import open_chats
from megatron.sft.data.preference.encode import PairEncoder
from megatron.sft.data.record_notes import notes_on_records
from megatron.sft.data.tokenizer import build_tokenizer


def opened(path, preferences=None):
    tokenizer = build_tokenizer("ByteLevelTokenizer")
    encoder = ChatEncoder(tokenizer, 100, "error", preferences=preferences)
    (entry,) = source_entries(load_metadataset(str(path), "train"))
    return open_chats(entry, encoder)


def chat(question="q", answer="a"):
    return {
        "messages": [
            {"role": "user", "content": question},
            {"role": "assistant", "content": answer},
        ]
    }


def calling(arguments, properties=None):
    call = {"function": {"name": "f", "arguments": arguments}}
    record = chat()
    record["messages"][1]["tool_calls"] = [call]
    schema = {"type": "object", "properties": properties}
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    return {**record, "tools": [tool]} if properties else record


TEXT, NUMBER = {"type": "string"}, {"type": "integer"}
PARTS = '[{"type":"text","text":"hi"}]'


@pytest.mark.parametrize(
    ("records", "starts"),
    [
        ([chat()] * 3 + [chat(PARTS)], ["1 of 4 records read have content that is JSON text: a"]),
        ([chat('"q"', '"a"')] * 2, ["2 of 2 records read have content that is JSON text: a list"]),
        ([chat('"q"', '"a"'), chat()], []),
        (
            [calling({"x": None}), calling({"x": None}), chat()],
            ["2 of 3 records read have nulls in calls or tools (x of f, in every call), which"],
        ),
        ([calling('{"x": null}')] * 2, []),
        ([calling({"x": None}, {"y": TEXT})] * 2, []),
        (
            [calling({"day": "2024-01-02T03:04:05"}), calling({"day": "2024-01-02T03:04:05Z"})],
            ["times of the argument day of f are spelled as tables spell them, or in several ways"],
        ),
        ([calling({"day": "2024-01-02 03:04:05"})], ["times of the argument day of f are spelled"]),
        ([calling({"day": "2024-01-02T03:04:05"}), calling({"day": "tomorrow"})], []),
        (
            [calling({"day": 1704164645000}, {"day": TEXT}), calling({"day": 3}, {"day": NUMBER})],
            ["1 arguments are numbers where the tool's schema says string, or with a fraction"],
        ),
        ([calling({"n": 3.0}, {"n": NUMBER})], ["1 arguments are numbers where the tool's schema"]),
        (["{", chat()], []),
        (
            [{**chat(), "weight": None, "system": None}] * 2,
            ["weight, system: null in all of 2 records read, and trained as if absent. If a"],
        ),
        ([{**chat(), "weight": None}, {**chat(), "weight": 0.5}], []),
        ([{**chat(), "date": None}] * 2, []),
        (
            [{"prompt": "when", "completion": "2024-01-02 03:04:05"}] * 2,
            ["completion is a time in all of 2 records read, spelled as tables spell them"],
        ),
        ([{"prompt": "when", "completion": "2024-01-02T03:04:05Z"}] * 2, []),
        (
            [{"prompt": "q", "completion": text} for text in ("2024-01-02 03:04:05", "never")],
            [],
        ),
    ],
)
def test_each_kind_is_one_line(tmp_path, records, starts):
    """datasets and pandas change data in silence; the model would learn their spelling."""
    lines = [line if isinstance(line, str) else json.dumps(line) for line in records]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    notes = notes_on_records([opened(tmp_path / "a.jsonl")])
    assert [note[: len(start)] for note, start in zip(notes, starts, strict=True)] == starts


def test_pairs_whose_chosen_answer_has_the_lower_score(tmp_path):
    """Exchanged columns would train the worse answers, and no loss would show it. Some such pairs
    are no fault: people choose, and a model scores.
    """
    pair = {"prompt": "q", "chosen": "a", "rejected": PARTS}
    scores = [(1, 2.5), (2, 2), (3, 1), (None, 4)]
    records = [{**pair, "score_chosen": one, "score_rejected": other} for one, other in scores]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, records)))
    parts, note = notes_on_records([opened(tmp_path / "a.jsonl", PairEncoder())])
    assert parts.startswith("4 of 4 records read have content that is JSON text")
    assert note.startswith("score_chosen is below score_rejected in 1 of 3 pairs read, which are")
    assert note.endswith("pass --data-columns chosen=rejected,rejected=chosen")


def test_nulls_of_a_table_that_a_schema_names(tmp_path):
    """Whether the call had a null, or nothing, a table does not say."""
    parquet = pytest.importorskip("pyarrow.parquet")
    import pyarrow

    rows = [
        calling({"x": None, "y": "a"}, {"x": TEXT, "y": TEXT}),
        calling({"x": "b", "y": "c"}, {"x": TEXT, "y": TEXT}),
    ]
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    (note,) = notes_on_records([opened(tmp_path / "a.parquet")])
    assert note.startswith("1 arguments are null in a table and left out (x of f), as a table")


def test_keys_of_turns_that_are_null_everywhere(tmp_path):
    """Thoughts that a join lost: a run would train answers without them, and nothing would say."""
    parquet = pytest.importorskip("pyarrow.parquet")
    import pyarrow

    text, rows = pyarrow.string(), [chat(), chat()]
    for row in rows:
        row["messages"][1]["reasoning_content"] = None
    turn = pyarrow.struct({"role": text, "content": text, "reasoning_content": text})
    schema = pyarrow.schema({"messages": pyarrow.list_(turn)})
    parquet.write_table(pyarrow.Table.from_pylist(rows, schema), tmp_path / "a.parquet")
    (note,) = notes_on_records([opened(tmp_path / "a.parquet")])
    assert note.startswith("reasoning_content of messages: null in all of 2 records read")


def test_the_ends_of_a_source_are_read(tmp_path, monkeypatch):
    """Lists come late: the last rows alone are damaged. A start must not read all of a blend."""
    monkeypatch.setattr(record_notes, "MAX_RECORDS", 8)
    lines = [json.dumps(chat())] * 50 + [json.dumps(chat(PARTS))]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    source = opened(tmp_path / "a.jsonl")
    assert notes_on_records([source])[0].startswith("1 of 8 records")
    assert notes_on_records([source] * 9)[0].startswith("9 of 36 records")
    assert notes_on_records([]) == []
    monkeypatch.setattr(record_notes, "MAX_CHARACTERS", 20)
    monkeypatch.setattr(record_notes, "_READ_AT_ONCE", 2)
    assert notes_on_records([source])[0].startswith("1 of 2 records"), "books are not all read"
