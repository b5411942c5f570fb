"""Prompts of --sample-prompts: records without their answers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron.sft.data.chat_encoder import ChatEncoder
from megatron.sft.data.prompts import MAX_PROMPTS, read_prompts
from megatron.sft.data.tokenizer import build_tokenizer

TOKENIZER = build_tokenizer("ByteLevelTokenizer")
ENCODER = ChatEncoder(TOKENIZER, 64, "truncate")
USER = {"role": "user", "content": "Hi?"}
ANSWER = {"role": "assistant", "content": "Yes."}


def prompts_of(tmp_path: Path, *records: object) -> list[tuple[str, str]]:
    """(question, prompt as the model sees it) of each record in a file."""
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return [(one.text, TOKENIZER.show(one.ids)) for one in read_prompts(str(path), ENCODER)]


@pytest.mark.parametrize(
    "record",
    [
        {"messages": [USER]},
        {"messages": [USER, ANSWER]},
        {"prompt": [USER]},
        {"prompt": [USER], "completion": [ANSWER]},
        {"instruction": "Hi?"},
        {"instruction": "Hi?", "output": "Yes."},
    ],
)
def test_the_answer_is_not_read(tmp_path: Path, record: dict[str, object]) -> None:
    """A model that is shown the answer gives it back, and looks trained."""
    assert prompts_of(tmp_path, record) == [("Hi?", "<user>Hi?<end><assistant>")]


def test_earlier_answers_are_context(tmp_path: Path) -> None:
    """The last turn is asked, behind all that was said."""
    ((text, shown),) = prompts_of(tmp_path, {"messages": [USER, ANSWER, USER, ANSWER]})
    assert text == "Hi?"
    assert shown == "<user>Hi?<end><assistant>Yes.<end><user>Hi?<end><assistant>"


def test_text_is_continued(tmp_path: Path) -> None:
    """A base model has no turns."""
    assert prompts_of(tmp_path, {"prompt": "Once"}, {"prompt": "a", "completion": "b"}) == [
        ("Once", "Once"),
        ("a", "a"),
    ]


@pytest.mark.parametrize(
    ("records", "message"),
    [
        ([{"text": "Once"}], "prompt 1: has nothing to answer; give messages, or prompt"),
        ([{"messages": [ANSWER]}], "prompt 1: has nothing to answer; give a user's turn"),
        ([{"prompt": "a"}, {"prompt": "a" * 64}], "prompt 2: is 64 tokens long, which leaves no"),
        ([{"prompt": "a"}] * (MAX_PROMPTS + 1), "must have 1 to 64 prompts, but has 65"),
        ([{"colour": "red"}], "prompt 1: record has keys 'colour', but must have"),
    ],
)
def test_what_cannot_be_asked_is_one_line(
    tmp_path: Path, records: list[object], message: str
) -> None:
    """Before the first step: a run of days must not end at its first evaluation."""
    with pytest.raises(ValueError, match=r"--sample-prompts .*prompts\.jsonl") as raised:
        prompts_of(tmp_path, *records)
    assert message in str(raised.value)
