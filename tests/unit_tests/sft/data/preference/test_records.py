"""Records of preference data in the forms of their makers."""

from __future__ import annotations

from typing import Any

import pytest

from megatron.sft.data.preference.records import read_preference
from megatron.sft.data.records.content import Conversation
from megatron.sft.data.records.values import SampleError

USER, GOOD, BAD = (
    {"role": role, "content": text}
    for role, text in (("user", "Q?"), ("assistant", "good"), ("assistant", "bad"))
)
SYSTEM = {"role": "system", "content": "Be."}
HUMAN, GPT, GPT_BAD = (
    {"from": role, "value": text}
    for role, text in (("human", "Q?"), ("gpt", "good"), ("gpt", "bad"))
)
CHATS: dict[str, dict[str, Any]] = {
    "TRL": {"prompt": [USER], "chosen": [GOOD], "rejected": [BAD]},
    "TRL, text answers": {"prompt": [USER], "chosen": "good", "rejected": "bad"},
    "implicit": {"chosen": [USER, GOOD], "rejected": [USER, BAD]},
    "UltraFeedback, binarized": {
        "prompt": "Q?",
        "prompt_id": "1",
        "messages": [USER, GOOD],
        "chosen": [USER, GOOD],
        "rejected": [USER, BAD],
        "score_chosen": 8.5,
        "score_rejected": 2.0,
    },
    "UltraFeedback": {
        "instruction": "Q?",
        "completions": [
            {"response": "bad", "overall_score": 2.0, "model": "x"},
            {"response": "good", "overall_score": 9.5, "model": "y"},
        ],
    },
    "ms-swift": {"messages": [USER, GOOD], "rejected_response": "bad"},
    "ms-swift, turns": {"messages": [USER, GOOD], "rejected_messages": [USER, BAD]},
    "LLaMA-Factory, alpaca": {
        "instruction": "Q?",
        "input": "",
        "chosen": "good",
        "rejected": "bad",
    },
    "LLaMA-Factory, sharegpt": {"conversations": [HUMAN], "chosen": GPT, "rejected": GPT_BAD},
    "NeMo-RL": {
        "context": [USER],
        "completions": [{"rank": 1, "completion": [BAD]}, {"rank": 0, "completion": [GOOD]}],
        "task_name": "x",
    },
    "HelpSteer2": {
        "prompt": "Q?",
        "response_1": "good",
        "response_2": "bad",
        "preference_strength": -2,
    },
    "HelpSteer3": {
        "context": [USER],
        "response1": "bad",
        "response2": "good",
        "overall_preference": 1,
    },
}


def said(path: Any) -> list[tuple[str, str, float]]:
    assert isinstance(path, Conversation)
    return [
        (one.role, one.content, one.weight * (one.role == "assistant")) for one in path.messages
    ]


@pytest.mark.parametrize("name", CHATS)
def test_each_form_gives_the_same_pair(name: str) -> None:
    """Answers exchanged would train the worse one; a trained prompt would change each loss."""
    found = read_preference(CHATS[name], {}, is_marked=False).content
    expected = [[("user", "Q?", 0.0), ("assistant", text, 1.0)] for text in ("good", "bad")]
    assert [said(path) for path in found.paths] == expected


def test_texts_stay_texts() -> None:
    """A template around a text would train another prompt. Spaces go with the answer, as TRL's."""
    explicit = {"prompt": "2+2=", "chosen": "4", "rejected": "5"}
    implicit = {"chosen": "2+2= 4", "rejected": "2+2= 5"}
    for record, answers in ((explicit, ("4", "5")), (implicit, (" 4", " 5"))):
        paths = read_preference(record, {}, is_marked=False).content.paths
        assert [tuple(path) for path in paths] == [("2+2=", answer) for answer in answers]
    equal = read_preference({"chosen": "ab", "rejected": "ab"}, {}, is_marked=False)
    assert [tuple(path) for path in equal.content.paths] == [("a", "b"), ("a", "b")]


def test_turns_before_the_answer_are_not_trained() -> None:
    """Earlier answers are the same on both sides: they would count twice, in no comparison."""
    before = [SYSTEM, USER, GOOD, USER]
    for record in (
        {"chosen": [*before, GOOD], "rejected": [*before, BAD]},
        {"messages": [*before, GOOD], "rejected_response": "bad"},
        {"conversations": before, "chosen": GOOD, "rejected": BAD},
    ):
        paths = read_preference(record, {}, is_marked=False).content.paths
        assert [weight for _, _, weight in said(paths[0])] == [0, 0, 0, 0, 1]
        assert said(paths[1])[-1] == ("assistant", "bad", 1)


def test_several_rejected_answers_stay_in_order() -> None:
    """The first path is the chosen one: its place says so later."""
    record = {"prompt": [USER], "chosen": "good", "rejected": ["bad", "worse"]}
    paths = read_preference(record, {}, is_marked=False).content.paths
    assert [said(path)[-1][1] for path in paths] == ["good", "bad", "worse"]


def test_answers_may_begin_with_the_result_of_a_tool() -> None:
    """They would be taken for whole conversations, and the prompt beside them for their copy."""
    call = {"type": "function", "function": {"name": "f", "arguments": {}}}
    prompt = [USER, {"role": "assistant", "content": "", "tool_calls": [call]}]
    record = {
        "prompt": prompt,
        "chosen": [{"role": "tool", "content": "1"}, GOOD],
        "rejected": [{"role": "tool", "content": "2"}, BAD],
    }
    paths = read_preference(record, {}, is_marked=False).content.paths
    assert [[text for _, text, _ in said(path)] for path in paths] == [
        ["Q?", "", "1", "good"],
        ["Q?", "", "2", "bad"],
    ]


@pytest.mark.parametrize(
    ("record", "is_good"),
    [
        ({"prompt": [USER], "completion": [GOOD], "label": True}, True),
        ({"prompt": "Q?", "completion": "bad", "label": "False"}, False),
        ({"messages": [USER, GOOD], "label": 1}, True),
        ({"conversations": [HUMAN, GPT], "kto_tag": False}, False),
        ({"instruction": "Q?", "output": "good", "kto_tag": True}, True),
    ],
)
def test_marks_are_read(record: dict[str, Any], is_good: bool) -> None:
    """A mark that is text, "False", is true for Python."""
    found = read_preference(record, {}, is_marked=True).content
    assert found.is_good is is_good
    assert len(found.paths) == 1


@pytest.mark.parametrize(
    ("record", "marked", "words"),
    [
        ({"prompt": "Q?", "completion": "x"}, True, "label or kto_tag"),
        ({"prompt": "Q?", "completion": "x", "label": "maybe"}, True, "true or false"),
        ({"messages": [USER, GOOD]}, False, "a pair must have"),
        ({"prompt": "Q?", "completion": "x", "label": True}, False, "--loss kto"),
        ({"chosen": [USER, GOOD], "rejected": [GOOD, BAD]}, False, "no common first turn"),
        ({"prompt": "other", **CHATS["implicit"]}, False, "do not begin with"),
        ({**CHATS["HelpSteer2"], "preference_strength": 0}, False, "which of its responses"),
        # Each of these was trained with its prompt lost or twice, or was answered in other words.
        ({**CHATS["implicit"], "prompt": [GOOD]}, False, "a prompt that chosen and rejected do no"),
        ({**CHATS["TRL"], "chosen": [USER, GOOD]}, False, "and the other as an answer alone"),
        ({**CHATS["TRL"], "messages": [SYSTEM]}, False, "messages that chosen and rejected do not"),
        ({**CHATS["TRL"], "chosen": None}, False, "^chosen is empty: has keys 'prompt', 'reject"),
        ({"prompt": "Q?", "completion": "x", "label": None}, True, "^label is empty: has no mark"),
        ({**CHATS["TRL"], "chosen": 4}, False, "^chosen must be text"),
        ({**CHATS["TRL"], "rejected": 4}, False, "^rejected must be text"),
        ({**CHATS["TRL"], "rejected": ["bad", None]}, False, r"^rejected\[1\] must be text"),
        ({"messages": [USER, GOOD]}, False, "beside pairs with --sft-weight 1"),
        ({"messages": 1, "rejected_response": "bad"}, False, "messages must be a list of turns"),
        (
            {**CHATS["HelpSteer2"], "prompt": None},
            False,
            "two responses, but no prompt, context or",
        ),
        (
            {"context": [USER], "completions": [{"rank": 0, "completion": [GOOD]}] * 2},
            False,
            "no single best",
        ),
    ],
)
def test_what_is_no_pair_says_what_is(record: dict[str, Any], marked: bool, words: str) -> None:
    """A guess would train the wrong answer."""
    with pytest.raises(SampleError, match=words):
        read_preference(record, {}, is_marked=marked)
