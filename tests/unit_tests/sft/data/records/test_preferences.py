"""Preference data is refused, with options that train the good answers when they are pasted."""

import re
from typing import Any

import pytest

from megatron.sft.data.records.content import Conversation, messages_of
from megatron.sft.data.records.formats import read_record
from megatron.sft.data.records.values import SampleError

SYSTEM, USER = {"role": "system", "content": "Be."}, {"role": "user", "content": "Q?"}
GOOD, BAD = ({"role": "assistant", "content": text} for text in ("good", "bad"))
AGAIN = {"role": "user", "content": "more"}
ANSWERS = {
    "turns": ([GOOD], [BAD]),
    "turn": (GOOD, BAD),
    "conversation": ([USER, GOOD], [USER, BAD]),
    "with system": ([SYSTEM, USER, GOOD], [SYSTEM, USER, BAD]),
    "sharegpt": ([{"from": "gpt", "value": "good"}], [{"from": "gpt", "value": "bad"}]),
    "several": ([GOOD, AGAIN, GOOD], [BAD]),
}
QUESTIONS: dict[str, dict[str, Any]] = {
    "text": {"prompt": "Q?"},
    "turns": {"prompt": [USER]},
    "with system": {"prompt": [SYSTEM, USER]},
    "instruction": {"instruction": "Q?"},
    "messages": {"messages": [USER]},
}


def pasted_options(record, columns=()):
    """The content of a record, with the options that its errors name pasted."""
    columns = dict(columns)
    try:
        return read_record(record, columns).content
    except SampleError as refused:
        message = str(refused)
    advice = re.search(r"--data-columns (\S+)", message)
    assert advice is not None, message
    given = {column: name for name, column in (one.split("=") for one in advice[1].split(","))}
    assert not given.items() <= columns.items(), f"{message}, although that is given"
    return pasted_options(record, columns | given)


@pytest.mark.parametrize("question", QUESTIONS)
@pytest.mark.parametrize("answer", ANSWERS)
def test_advice_is_right_when_it_is_pasted(question, answer):
    """The pasted line led to the next error, or to answers without their questions."""
    chosen, rejected = ANSWERS[answer]
    content = pasted_options(QUESTIONS[question] | {"chosen": chosen, "rejected": rejected})
    assert isinstance(content, Conversation)
    messages = [(one.role, one.content) for one in messages_of(content) if one.role != "system"]
    more = [("user", "more"), ("assistant", "good")] if answer == "several" else []
    assert messages == [("user", "Q?"), ("assistant", "good"), *more]


def test_texts_are_trained_as_texts():
    content = pasted_options({"prompt": "Q?", "chosen": "good", "rejected": "bad"})
    assert (content.prompt, content.completion) == ("Q?", "good")


KTO = {"prompt": "Q?", "completion": "A"}
TURNS = {"messages": [USER, GOOD]}


@pytest.mark.parametrize("mark", [True, False, "True", 0, 1, 1.0, "0", "1.0"])
@pytest.mark.parametrize("record", [KTO, TURNS])
@pytest.mark.parametrize("key", ["label", "kto_tag"])
def test_marks_of_good_and_bad_answers_are_refused(mark, record, key):
    """Tables of CSV and SQL have no booleans: 0 trained the bad answers."""
    with pytest.raises(SampleError, match=rf"record has {key} .*-columns none={key}$"):
        read_record(record | {key: mark}, {})
    read_record(record | {key: mark}, {key: "none"})


@pytest.mark.parametrize(
    ("record", "mark"),
    [
        (KTO, 2),
        (KTO, 0.5),
        (KTO, "positive"),
        (TURNS, None),
        ({"instruction": "Q?", "output": "A"}, 1),
        ({"text": "Q?"}, True),
    ],
)
def test_other_labels_are_left_alone(record, mark):
    read_record(record | {"label": mark}, {})
