"""Records of every format as samples; broken ones are named, counted, and only so many skipped."""

import logging
from datetime import date
from pathlib import Path
from typing import Any

import pytest

from megatron.blending.metadatasets.metadataset import load_metadataset
from megatron.blending.metadatasets.tree import source_entries
from megatron.blending.streams.failures import SkipSample
from megatron.blending.streams.source import SourceDataset
from megatron.sft.data.chat_encoder import ChatEncoder
from megatron.sft.data.chats import (
    ChatLoad,
    num_tokens,
    of_json,
    of_parts,
    open_chats,
    source_weight,
)
from megatron.sft.data.sample_set import concatenated
from megatron.sft.data.stream import SampleStream, Share
from megatron.sft.data.tokenizer import build_tokenizer
from tests.unit_tests.blending.folders import CAPTION, CRUDE, TEXT, write_folder
from tests.unit_tests.sft.texts import text_line, text_of

BROKEN = '{"text": "half'
ROLELESS = '{"messages": [{"role": "robot", "content": "x"}]}'


@pytest.fixture(scope="module")
def encoder():
    return ChatEncoder(
        build_tokenizer("ByteLevelTokenizer"), seq_length=64, over_length_policy="error"
    )


def chats(encoder, path, max_bad=None, batch=1):
    """The samples of a path, pass after pass, in the order of the file."""
    (entry,) = source_entries(load_metadataset(path, "train"))
    opened = open_chats(entry, encoder)
    samples = concatenated(
        ["some"], [SourceDataset(opened.source, load=opened.load, shuffle=False, name="some")]
    )
    return SampleStream(samples, Share(0, 1, batch, batch), max_bad_samples_in_a_row=max_bad)


def text_in(stream):
    (sample,) = next(stream)
    return text_of(sample["tokens"])


@pytest.mark.parametrize(
    ("line", "words"), [(BROKEN, "not JSON"), (ROLELESS, "role"), ('{"txt": [1]}', "'txt'")]
)
def test_error_names_file_and_line(encoder, write_lines, line, words):
    """One bad line in a million must be found by its place, also after blank lines."""
    path = write_lines("b.jsonl", text_line("three"), "", line)
    source = chats(encoder, path)
    assert text_in(source) == "three"
    with pytest.raises(ValueError, match=words) as failure:
        next(source)
    assert str(failure.value).startswith(f"{path}:3: ")
    assert str(failure.value).count(path) == 1
    assert str(failure.value).endswith("; or pass --skip-bad-samples")


def test_over_long_sample_names_file_and_line(encoder, write_lines):
    """--seq-length too small is the commonest of mistakes; the message must say by how much and
    where.
    """
    path = write_lines("a.jsonl", text_line("one"), text_line("x" * 100))
    source = chats(encoder, path)
    next(source)
    with pytest.raises(ValueError, match=r"a\.jsonl:2: .*100 tokens.*--seq-length is 64"):
        next(source)


def test_bad_samples_are_skipped_counted_and_logged_once(encoder, write_lines, caplog):
    """Skipping that does not count hides that half of a file is unreadable; a line per epoch hides
    all else.
    """
    path = write_lines("a.jsonl", text_line("one"), BROKEN, text_line("two"), ROLELESS)
    stream = chats(encoder, path, 100, batch=4)
    with caplog.at_level(logging.WARNING, "megatron.blending"):
        assert [len(next(stream)) for _ in range(3)] == [2, 2, 2]
    assert (stream.counts.num_sequences, stream.counts.dropped(0)) == (6, {"bad sample": 6})
    assert len(caplog.messages) == 2
    (of_line_4,) = [message for message in caplog.messages if "a.jsonl:4" in message]
    assert of_line_4.startswith(f"some: {path}:4: ")


def test_a_tokenizer_that_panics_names_file_and_line(tmp_path, write_lines):
    """A pattern that gives up ends Rust in a panic, which is no Exception of Python: the run ended
    without a place, and nothing skipped the line.
    """
    pytest.importorskip("transformers")
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers

    model = models.WordLevel({"one": 0, "two": 1, "?": 2, "<end>": 3}, unk_token="?")
    panicking = Tokenizer(model)
    panicking.pre_tokenizer = pre_tokenizers.Split(Regex("(x+x+)+y"), "isolated")
    panicking.save(str(tmp_path / "tokenizer.json"))
    settings = '{"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<end>"}'
    (tmp_path / "tokenizer_config.json").write_text(settings)
    tokenizer = build_tokenizer("HuggingFaceTokenizer", str(tmp_path))
    encoder = ChatEncoder(tokenizer, seq_length=64, over_length_policy="error")
    path = write_lines("a.jsonl", text_line("one"), text_line("x" * 40), text_line("two"))
    strict = chats(encoder, path)
    next(strict)
    with pytest.raises(ValueError, match=r"a\.jsonl:2: the tokenizer fails on the text: .*retry"):
        next(strict)
    stream = chats(encoder, path, 100, batch=3)
    assert len(next(stream)) == 2
    assert stream.counts.dropped(0) == {"bad sample": 1}


def test_a_broken_source_is_an_error(encoder, write_lines):
    """Hours later one would find that a source of the blend gave nothing; samples between broken
    ones are no row.
    """
    path = write_lines("a.jsonl", *[BROKEN, text_line("good")] * 5, *[BROKEN] * 5)
    source = chats(encoder, path, 3)
    assert [len(next(source)) for _ in range(12)] == [0, 1] * 5 + [0, 0]
    with pytest.raises(
        ValueError, match=r"a\.jsonl:13.*3 samples in a row failed.*--max-bad-samples-in-a-row"
    ) as failure:
        next(source)
    assert "--skip-bad-samples" not in str(failure.value), "that is given already"
    never = chats(encoder, path, 0)
    assert [len(next(never)) for _ in range(15)][10:] == [0] * 5
    assert never.counts.dropped(0) == {"bad sample": 10}


def folder(tmp_path, dataset, **parts):
    return str(
        write_folder(
            tmp_path / "folder",
            {"s.tar": [("key", {n: p.encode() for n, p in parts.items()})]},
            dataset,
        )
    )


@pytest.mark.parametrize(
    ("dataset", "parts", "text"),
    [
        (TEXT, {"txt": "plain"}, "plain"),
        (CRUDE, {"txt": "plain"}, "plain"),
        (CRUDE, {"json": '{"instruction": "a", "output": "b"}', "jpg": "no image"}, "ab"),
        (CRUDE, {"json": '[{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]'}, "ab"),
    ],
)
def test_webdataset_samples(encoder, tmp_path, dataset, parts, text):
    """What WebDataset folders hold must train on the same tokens as a JSONL file of it."""
    assert text_in(chats(encoder, folder(tmp_path, dataset, **parts))) == text


def test_webdataset_of_something_else_is_refused_when_opened(encoder, tmp_path):
    """The first batch would fail, after the model was built on every rank."""
    path = folder(tmp_path, CAPTION, pth="x", json='{"caption": "c"}')
    with pytest.raises(ValueError, match="CaptioningSample, but must have text"):
        chats(encoder, path)


def test_weights_multiply(encoder, write_lines):
    """A weight that is lost trains on what it should not; one in the count too would change others'
    loss.
    """
    path = write_lines("a.jsonl", text_line("x", weight=0.5))
    blend = write_lines(
        "b.yaml",
        "__class__: MetadatasetV2",
        f"splits: {{train: {{path: {path}, subflavors: {{sample_weight: 0.25}}}}}}",
    )
    (sample,) = next(chats(encoder, blend))
    assert sample["loss_mask"].tolist() == [0.125]


@pytest.mark.parametrize("weight", [0, -1, "heavy", True, float("inf")])
def test_wrong_source_weight_is_refused_by_place(weight):
    """Zero would drop every sample of the source as one without loss; the blend's weight is the
    place for that.
    """
    with pytest.raises(ValueError, match=r"^here: sample_weight must be a number above 0"):
        source_weight({"sample_weight": weight}, "here: ")


def test_records_of_samples():
    """Bookkeeping of the source taken for content is refused as unknown keys, or trained on."""
    parts = {"__key__": "0", "txt": "t", "json": {"weight": 2}}
    assert of_parts(parts) == {"text": "t", "weight": 2}
    row = {"__index__": 3, "output": "o", "instruction": "i"}
    assert of_parts(row) == {"output": "o", "instruction": "i"}
    assert of_json({"__key__": "0", "txt": "t"}) == {"__key__": "0", "txt": "t"}
    assert of_json(["turn"]) == {"messages": ["turn"]}
    assert of_json(1.5) == {}


def test_calls_and_tools_of_tables(encoder):
    """Arrow gives all structs of a column the keys of each: calls were trained with the arguments
    of other tools as null. A null in JSON, as a default in a schema, is the data's own.
    """
    pytest.importorskip("pyarrow")
    calls = Path(__file__).parents[3] / "fixtures" / "released" / "datasets"

    def contents(name):
        (entry,) = source_entries(load_metadataset(str(calls / name), "train"))
        opened = open_chats(entry, encoder)
        assert isinstance(opened.load, ChatLoad)
        read: list[Any] = [opened.load.read(opened.source[row]).content for row in range(4)]
        of_calls = [content.messages[1].fields["tool_calls"][0]["function"] for content in read]
        return read, [call["arguments"] for call in of_calls], read[0].tools

    lines, arguments, tools = contents("calls.jsonl")
    assert arguments == [{"city": "Rome"}, {"x": 1, "y": "2"}, {}, {"x": None}]
    assert contents("calls.parquet") == (lines, arguments, tools)
    _, merged, merged_tools = contents("calls-merged.parquet")
    assert merged == [*arguments[:3], {}]
    del tools[1]["function"]["parameters"]["properties"]["x"]["default"]
    assert merged_tools == tools


def test_columns_of_tables_are_checked_when_opened(encoder, tmp_path, caplog):
    """Each row of a column of bytes would fail, hours later; and nobody would learn that times
    have another spelling than the data had.
    """
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    path = str(tmp_path / "a.parquet")
    parquet.write_table(pyarrow.table({"text": [b"a"]}), path)
    with pytest.raises(ValueError, match=rf"^{path}: column text of the type binary has no JSON"):
        chats(encoder, path)
    call = {"function": {"name": "f", "arguments": {"day": date(2024, 1, 31)}}}
    turns = [{"role": "user", "content": "q"}, {"role": "assistant", "tool_calls": [call]}]
    parquet.write_table(pyarrow.Table.from_pylist([{"messages": turns}]), path)
    for _ in range(2):
        (entry,) = source_entries(load_metadataset(path, "train"))
        opened = open_chats(entry, encoder)
    (note,) = caplog.messages
    assert note.startswith("messages.tool_calls.function.arguments.day of the type date32[day] is")
    assert isinstance(opened.load, ChatLoad)
    content: Any = opened.load.read(opened.source[0]).content
    (made,) = content.messages[1].fields["tool_calls"]
    assert made["function"]["arguments"] == {"day": "2024-01-31"}


def test_json_in_a_cell_of_text_is_text(encoder, tmp_path):
    """An answer in JSON was taken for a list of turns, and refused."""
    path = tmp_path / "a.csv"
    path.write_text('prompt,completion\n"[1, 2]","{""a"": 1}"\n')
    assert text_in(chats(encoder, str(path))) == '[1, 2]{"a": 1}'
    turn = '"[{""role"": ""ROLE"", ""content"": ""x""}]"'
    turns = ",".join(turn.replace("ROLE", role) for role in ("user", "assistant"))
    path.write_text(f"prompt,completion\n{turns}\n")
    assert "<assistant>" in encoder.tokenizer.show(next(chats(encoder, str(path)))[0]["labels"])


def test_probing_skips_what_is_dropped(encoder, write_lines):
    """Weights by tokens are taken from what the stream will hold: a dropped record has no
    tokens."""
    (entry,) = source_entries(load_metadataset(write_lines("a.jsonl", text_line("a")), "train"))
    opened = open_chats(entry, encoder)
    assert num_tokens(opened, {"text": "ab"}, 0) == 1 + num_tokens(opened, {"text": "a"}, 0)
    with pytest.raises(SkipSample):
        num_tokens(opened, {"text": "a", "weight": 0}, 0)


def test_a_join_is_refused(encoder, tmp_path):
    """Its joiner is code that a file names; it must not run because somebody trains on the file."""
    folder(tmp_path, TEXT, txt="plain")
    path = tmp_path / "join.yaml"
    path.write_text(
        "__class__: MetadatasetV2\nsplits:\n  train:\n    join: [{path: folder}, {path: folder}]\n"
        "    joiner: {__module__: mine, __function__: put_together}\n"
    )
    with pytest.raises(ValueError, match=r"join\.yaml:\d+.*Python code, mine\.put_together, which"):
        chats(encoder, path)


def test_wrong_fields_of_text_are_refused_by_place(encoder, tmp_path):
    """Each sample would fail in the workers, on every rank."""
    for text, fault in (
        ("text: tx", "none of 1 samples that were read has a part 'tx'; did you mean 'txt'?"),
        ("txt: txt", "TextSample has one field, text, but txt stand there"),
    ):
        path = folder(tmp_path / text[:4].strip(":"), TEXT.replace("text: txt", text), txt="plain")
        with pytest.raises(ValueError, match=r"dataset\.yaml.*field_map: ") as failure:
            chats(encoder, path)
        assert fault in str(failure.value)
